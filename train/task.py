"""What a run trains on, as the loop sees it: batches, a position to save, an evaluation, a model card."""

from __future__ import annotations

import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from flax import nnx
from jax.sharding import Mesh

from cpjax.models import family, read_config
from cpjax.shard import Layout, Packed, Sharder, make_batch
from cpjax.train import presets
from cpjax.train.config import Config
from cpjax.train.step import Arrays

HostBatch = tuple[dict[str, np.ndarray], Sharder]
"""A batch of full length on the host, and how its tokens are split."""

Evaluate = Callable[[Arrays, Arrays], dict[str, float]]
"""(params, frozen) -> metrics by name, each of which begins with "held_out_"."""


class Task(Protocol):
    """What a run trains on.

    Attributes:
        model_config: configuration of the model that is trained.
        ask: module whose command asks an export some questions; empty if there is none.
    """

    model_config: Any
    ask: str

    def describe(self) -> list[str]:
        """Lines about the data; the first one also stands over the picture of the run."""

    def next_batch(self) -> HostBatch:
        """The next batch to train on, of one of a few shapes: the step is compiled once for each."""

    def state(self) -> dict[str, Any]:
        """Where the batches are, for JSON."""

    def restore(self, state: Mapping[str, Any]) -> None:
        """Goes on behind the batch after which `state` was taken, on this or another mesh.

        Raises:
            ValueError: it belongs to other data.
        """

    def measures(self) -> list[str]:
        """Names of the metrics that an evaluation gives."""

    def make_evaluation(self, graphdef: nnx.GraphDef, mesh: Mesh, **forward: Any) -> Evaluate:
        """The evaluation of a model of this structure; `forward` as for `make_train_step`."""

    def left_out(self) -> str:
        """What could not be used so far, in words; empty if nothing."""

    def write_card(self, folder: pathlib.Path, result: Mapping[str, Any], model_class: str) -> None:
        """Writes the model card into an export.

        Args:
            result: metrics of the step that is exported, its number among them.
            model_class: class in transformers.
        """


def open_task(config: Config, layout: Layout) -> Task:
    """The task that the options ask for: records where some are named, otherwise the digits.

    Raises:
        ValueError: options or data that cannot be used.
    """
    if config.records.files:
        from cpjax.train.records_task import RecordsTask

        return RecordsTask(config, layout)
    from cpjax.train.digits_task import DigitsTask

    return DigitsTask(config, layout)


def read_model_config(config: Config) -> Any:
    """The configuration of the model that is trained: that of its folder, or a small one of its family.

    Raises:
        ValueError: no configuration of a known family is there, or sizes that do not fit each other or the family.
    """
    if not config.model.path:
        return presets.model_config(config.model)
    return read_config(config.model.path)


def host_batch(
    model_config: Any, rows: Sequence[Any], layout: Layout, length: int, num_patches: int | None, parts: int = 1
) -> HostBatch:
    """Rows as a padded host batch, whose shapes depend on their number, `length`, `num_patches` and `parts` alone.

    Args:
        parts: devices and microbatches that share the rows; under `Packed` each gets one row, of all its documents.
    """
    module = family(model_config.model_type)
    batch = module.prepare(model_config, rows, length=length, num_patches=num_patches)
    if not isinstance(layout, Packed):
        return make_batch(batch, layout, streams=module.STREAMS, padded_length=layout.pad_length(length))
    padded_length = layout.pad_length(length) * (len(rows) // parts)
    return make_batch(batch, layout, streams=module.STREAMS, padded_length=padded_length, packed_rows=parts)
