"""The stream of batches: shuffled, read ahead, and continued where a checkpoint left it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import grain
import numpy as np

from cpjax.train.data.dataset import Dataset
from cpjax.train.data.packing import choose_bucket

_EPOCHS = 1_000_000
"""As good as endless; the length of grain's endless datasets overflows when they are batched."""


@dataclasses.dataclass(frozen=True)
class Batch:
    """The rows of a batch.

    Attributes:
        rows: of the family.
        tokens, patches: what every row is to be padded to; patches is None where no record has any.
        sources: "file:line" of the records of each row.
    """

    rows: Sequence[Any]
    tokens: int
    patches: int | None
    sources: Sequence[Sequence[str]]


class Stream:
    """Batches of a dataset, one after another.

    The rows of a batch depend on the dataset, the seed and the batch size alone. Every record comes once per epoch,
    each epoch in an order of its own; a batch may hold the last rows of an epoch and the first of the next.
    """

    def __init__(
        self,
        dataset: Dataset,
        *,
        batch_size: int,
        seed: int = 0,
        once: bool = False,
        collate: Callable[[Batch], Any] = lambda batch: batch,
    ):
        """Starts at the first batch.

        Args:
            dataset: its packs become rows.
            batch_size: rows of a batch.
            seed: of the order.
            once: one epoch in the dataset's order, its last batch filled up with empty rows; for evaluation.
            collate: what to make of each batch, ahead of its time, in threads.
        """
        self.dataset = dataset
        self._identity = f"{dataset.fingerprint()}-{seed}-{batch_size}-{once}"
        packs = grain.MapDataset.range(len(dataset.packs))
        if not once:
            packs = packs.seed(seed).shuffle().repeat(_EPOCHS)

        def load(numbers: list[int]) -> Any:
            chosen = [dataset.packs[number] for number in numbers] + [[]] * (batch_size - len(numbers))
            sizes = np.array([dataset.sizes[list(pack)].sum(axis=0) for pack in chosen])
            tokens, patches = choose_bucket(dataset.shapes, sizes)
            rows, sources = zip(*(dataset.row(pack) for pack in chosen), strict=True)
            return collate(Batch(rows, tokens, patches or None, sources))

        ahead = grain.ReadOptions(num_threads=dataset.options.workers, prefetch_buffer_size=2 * dataset.options.workers)
        self._iterator = iter(packs.batch(batch_size, batch_fn=list).map(load).to_iter_dataset(ahead))

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        return next(self._iterator)

    def state(self) -> dict[str, Any]:
        """Where the stream is, for JSON."""
        return {"stream": self._identity, **self._iterator.get_state()}

    def restore(self, state: dict[str, Any]) -> None:
        """Continues where `state` was taken.

        Raises:
            ValueError: it is of a stream with other records, packing, seed or batch size.
        """
        if state.get("stream") != self._identity:
            raise ValueError(
                "the data differ from those of the checkpoint: to resume, give the same records, limits, seed and "
                "batch size, and the packed layout only where it was packed, or start a new run"
            )
        self._iterator.set_state({name: value for name, value in state.items() if name != "stream"})
