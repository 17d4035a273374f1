"""Shows what a record becomes: its tokens and which are learned, its images and its positions."""

from __future__ import annotations

import itertools
import pathlib
from collections.abc import Iterator
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

from cpjax.shard import IGNORE
from cpjax.train.data.encode import Encoder
from cpjax.train.data.files import Records

_STYLES = {True: ("bold green", "bold black on green"), False: ("white", "dim white")}
"""Of learned and of other tokens; neighbours differ."""


def inspect(file: pathlib.Path, folder: pathlib.Path, number: int, console: Console) -> int:
    """Prints what the record becomes for the model in the folder.

    Args:
        file: of records.
        folder: a Hugging Face folder; its weights are not needed.
        number: of the record, from 1.

    Returns:
        0.

    Raises:
        ValueError: no such record, or it is broken.
    """
    records, encoder = Records([file]), Encoder.from_folder(folder)
    if not 1 <= number <= len(records):
        raise ValueError(f"--record is {number}: {file} has records 1 to {len(records)}")
    record = records[number - 1]
    said: dict[str, None] = {}
    encoder.size(record, said.setdefault)
    row = encoder.row(record)
    config = encoder.processor.config
    batch = encoder.module.prepare(config, [row])
    learned = np.asarray(row.labels) != IGNORE

    console.print(f"{record.source}, record {number} of {len(records):,}", style="bold", highlight=False)
    console.print(
        f"{len(row.input_ids):,} tokens, {(batch['labels'] != IGNORE).sum():,} of them targets; "
        f"{sum(len(media.patches) for media in row.media):,} patches in {len(row.media)} images and videos",
        highlight=False,
    )
    console.print(_tokens(encoder, row, learned))
    table = Table("", "kind", "grid (t, h, w)", "tokens", "first token", "values", title="images and videos")
    places = np.flatnonzero(np.isin(row.input_ids, encoder.processor.placeholder_ids)).tolist()
    merge = config.vision.spatial_merge_size**2
    for place, media in enumerate(row.media, start=1):
        first, places = places[0], places[len(media.patches) // merge :]
        span = f"{media.patches.min():.2f} to {media.patches.max():.2f}"
        tokens = str(len(media.patches) // merge)
        table.add_row(str(place), media.modality, str(media.grid), tokens, str(first), span)
    if row.media:
        console.print(table)
    table = Table("", "answer", "tokens", "learned text", title="labels")
    for place, (first, end) in enumerate(_runs(learned), start=1):
        text = encoder.tokenizer.decode(np.asarray(row.labels)[first:end].tolist(), skip_special_tokens=False)
        table.add_row(str(place), f"{first} to {end - 1}", str(end - first), Text(text))
    console.print(table)
    positions = batch["position_ids"].reshape(-1, batch["position_ids"].shape[-1])
    names = ("time", "height", "width") if len(positions) == 3 else ("",)
    spans = ", ".join(f"{name} 0 to {axis.max()}" for name, axis in zip(names, positions, strict=True))
    console.print(f"positions: {spans}", highlight=False)
    for notice in said:
        console.print(f"note: {notice}", style="yellow", highlight=False)
    return 0


def _tokens(encoder: Encoder, row: Any, learned: np.ndarray) -> Text:
    """All tokens, learned ones in green; a run of placeholders is shown as one."""
    text = Text()
    shades = itertools.cycle((0, 1))
    placeholders = encoder.processor.placeholder_ids
    for (token, answer), group in itertools.groupby(zip(np.asarray(row.input_ids).tolist(), learned, strict=True)):
        count = len(list(group))
        shown = encoder.tokenizer.decode([token], skip_special_tokens=False).replace("\n", "↵\n")
        times = [f"{shown} x {count} "] if token in placeholders else [shown] * count
        for piece in times:
            text.append(piece, _STYLES[bool(answer)][next(shades)])
    return text


def _runs(flags: np.ndarray) -> Iterator[tuple[int, int]]:
    """(start, end) of each run of True."""
    edges = np.flatnonzero(np.diff(flags.astype(int), prepend=0, append=0))
    yield from zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True)
