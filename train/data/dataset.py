"""All records of a run: read once to learn their sizes and to find the broken ones, then packed into rows."""

from __future__ import annotations

import collections
import concurrent.futures
import dataclasses
import hashlib
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import track

from cpjax.train.data.encode import Encoder
from cpjax.train.data.files import Records
from cpjax.train.data.options import RecordsConfig
from cpjax.train.data.packing import bucket_shapes, pack_records
from cpjax.train.data.records import Record, RecordError

_AHEAD = 1024
"""Records that are queued for the threads at a time."""


class Skipped:
    """Records that were left out: how many for each reason, and what was said about the first of them."""

    def __init__(self) -> None:
        self.counts: collections.Counter[str] = collections.Counter()
        self.first: dict[str, str] = {}
        self._seen: set[int] = set()
        self._lock = threading.Lock()  # the threads of a stream share it

    def add(self, index: int, error: RecordError) -> None:
        """Counts a record, once however often it comes up."""
        with self._lock:
            if index not in self._seen:
                self._seen.add(index)
                self.counts[error.reason] += 1
                self.first.setdefault(error.reason, str(error))

    def __str__(self) -> str:
        """Reasons and counts, most frequent first; empty if there are none."""
        return ", ".join(f"{count:,} {reason}" for reason, count in self.counts.most_common())


class Notices:
    """What the user should know of records that are used: how many it is true of, and where the first of them is."""

    def __init__(self) -> None:
        self.counts: collections.Counter[str] = collections.Counter()
        self.first: dict[str, str] = {}

    def add(self, notices: Iterable[str], source: str) -> None:
        """Counts each notice of a record once."""
        for notice in dict.fromkeys(notices):
            self.counts[notice] += 1
            self.first.setdefault(notice, source)

    def lines(self) -> list[str]:
        """One for each notice, most frequent first."""
        return [
            f"{notice}: {count:,} {'record' if count == 1 else 'records'}, first {self.first[notice]}"
            for notice, count in self.counts.most_common()
        ]


@dataclasses.dataclass(frozen=True)
class Dataset:
    """Records by number, the rows they are packed into, and the shapes those rows have.

    Attributes:
        records: all of them, broken ones too.
        encoder: makes rows of them.
        options: what was asked for.
        sizes: int [records, 2], tokens and patches; 0 for a record that was left out.
        packs: numbers of the records of each row.
        shapes: (tokens, patches) that a batch is padded to, ascending; 0 patches where no record has any.
        skipped: what was left out; images that turn out to be damaged are added while training.
        notices: names that are not used, and what is not learned, in records that were not left out.
    """

    records: Records
    encoder: Encoder
    options: RecordsConfig
    sizes: np.ndarray
    packs: Sequence[Sequence[int]]
    shapes: Sequence[tuple[int, int]]
    skipped: Skipped
    notices: Notices

    @classmethod
    def open(cls, options: RecordsConfig, encoder: Encoder, *, seed: int = 0, multiple: int = 1) -> Dataset:
        """Opens the files and looks at every record; images are opened, but not decoded.

        Args:
            options: files and limits.
            encoder: of the model's folder.
            seed: of the packing.
            multiple: what the tokens of each record are rounded up to when they are packed; layouts that pad each
                document by itself need it.

        Raises:
            ValueError: a file cannot be opened, a record is broken and `options.broken` is "stop", or none is left.
        """
        records, skipped, notices = Records(options.files), Skipped(), Notices()
        sizes = np.zeros((len(records), 2), int)

        def look(index: int) -> tuple[str, list[str]] | RecordError:
            said: list[str] = []
            try:
                record = records[index]
                sizes[index] = measure(record, encoder, options, multiple, said.append)
            except RecordError as error:
                if options.broken == "stop":
                    raise
                return error
            return record.source, said

        with concurrent.futures.ThreadPoolExecutor(options.workers) as pool:
            # Packing needs the sizes of all records before the first step; 20,000 short ones take some ten seconds.
            starts, terminal = range(0, len(records), _AHEAD), Console(stderr=True)
            hidden = len(starts) == 1 or not terminal.is_terminal
            for start in track(starts, "looking at records", console=terminal, transient=True, disable=hidden):
                ahead = range(start, min(start + _AHEAD, len(records)))
                for index, found in zip(ahead, pool.map(look, ahead), strict=True):  # in the order of the records
                    if isinstance(found, RecordError):
                        skipped.add(index, found)
                    else:
                        source, said = found
                        notices.add(said, source)
        kept = np.flatnonzero(sizes[:, 0])
        if not kept.size:
            raise ValueError(f"all {len(records)} records are broken ({skipped}): {next(iter(skipped.first.values()))}")
        budget = (options.tokens, options.patches)
        packs = (
            [kept[pack].tolist() for pack in pack_records(sizes[kept], budget, seed)]
            if options.pack
            else kept[:, None].tolist()
        )
        patches = options.patches if sizes[:, 1].any() else 0
        merge = encoder.processor.config.vision.spatial_merge_size**2
        shapes = bucket_shapes(options.tokens, patches, options.shapes, (multiple, merge))
        return cls(records, encoder, options, sizes, packs, shapes, skipped, notices)

    def row(self, pack: Sequence[int]) -> tuple[Any, list[str]]:
        """The row of these records, each a document, and where they came from.

        A record whose image turns out to be damaged is left out, if that is the choice. A row of no records is one
        pad without a target.

        Raises:
            RecordError: an image is damaged.
        """
        parts, sources = [], []
        for index in pack:
            try:
                record = self.records[index]
                parts.append(self.encoder.row(record))
                sources.append(record.source)
            except RecordError as error:
                if self.options.broken == "stop":
                    raise
                self.skipped.add(index, error)
        row = self.encoder.module.Row
        if not parts:
            return row(np.array([self.encoder.processor.config.text.pad_token_id or 0])), sources
        return row(
            np.concatenate([part.input_ids for part in parts]),
            np.concatenate([part.labels for part in parts]),
            np.repeat(np.arange(len(parts)) + 1, [len(part.input_ids) for part in parts]),
            [media for part in parts for media in part.media],
        ), sources

    def fingerprint(self) -> str:
        """The same for two datasets that give the same stream, but for how far its rows are padded."""
        said = hashlib.sha256(repr(self.packs).encode())
        said.update(np.ascontiguousarray(self.sizes, np.int64).tobytes())
        return said.hexdigest()[:16]

    def describe(self) -> str:
        """One sentence, and one more about what was left out."""
        used, room = self.sizes[:, 0].sum(), len(self.packs) * self.options.tokens
        kept = int((self.sizes[:, 0] > 0).sum())
        shapes = ", ".join(f"{tokens:,} tokens and {patches:,} patches" for tokens, patches in self.shapes)
        text = (
            f"{kept:,} records of {used:,} tokens in {len(self.packs):,} rows, {used / room:.0%} full; "
            f"{len(self.shapes)} {'shapes' if len(self.shapes) > 1 else 'shape'} at most: {shapes}."
        )
        return f"{text} Left out: {self.skipped}." if self.skipped.counts else text


def measure(
    record: Record, encoder: Encoder, options: RecordsConfig, multiple: int, say: Callable[[str], None]
) -> tuple[int, int]:
    """Tokens (rounded up to the multiple) and patches of a record; see `Encoder.size` for `say`.

    Raises:
        RecordError: it is broken, or too long.
    """
    tokens, patches = encoder.size(record, say)
    tokens = -(-tokens // multiple) * multiple
    for size, limit, what in ((tokens, options.tokens, "tokens"), (patches, options.patches, "patches")):
        if size > limit:
            raise RecordError(
                "too long",
                f"{record.source} has {size:,} {what}, more than the {limit:,} of a row: raise --records.{what} or "
                "shorten it",
            )
    return tokens, patches
