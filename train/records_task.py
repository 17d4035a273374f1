"""One's own chat records: packed rows to train on, held-out loss, and answers that the model writes itself."""

from __future__ import annotations

import dataclasses
import math
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import yaml
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from cpjax.loss import cross_entropy
from cpjax.models.generate import generate
from cpjax.shard import IGNORE, Layout, Sharder
from cpjax.train.answers import count_exact
from cpjax.train.config import Config
from cpjax.train.data import Batch, Dataset, Encoder, Record, RecordError, Stream
from cpjax.train.metrics import metric_words
from cpjax.train.step import Arrays, merge_model, place_batch, run_model
from cpjax.train.task import Evaluate, HostBatch, host_batch

UNIT = 16
"""What each record's tokens are rounded up to under the packed layout. It suits every cp up to 8, so that a run may
resume with another one: rows must not change."""


class RecordsTask:
    """See `cpjax.train.task.Task`."""

    ask = ""

    def __init__(self, config: Config, layout: Layout):
        """Opens all files and looks at all records.

        Raises:
            ValueError: a file or folder cannot be used, or a record is broken and `records.broken` is "stop".
        """
        options, run = config.records, config.run
        self._config, self._layout = config, layout
        self._encoder = Encoder.from_folder(config.model.path)
        self.model_config = self._encoder.processor.config
        multiple = math.lcm(UNIT, layout.divisor) if config.mesh.layout == "packed" else 1
        self._dataset = Dataset.open(options, self._encoder, seed=run.seed, multiple=multiple)
        self._stream = Stream(self._dataset, batch_size=run.batch_size, seed=run.seed, collate=self._collate)
        self._held_out = {
            name: Dataset.open(
                dataclasses.replace(options, files=[file], held_out=[], answers=0), self._encoder, multiple=multiple
            )
            for name, file in options.held_out_sets.items()
        }
        self._questions = {name: ask(dataset, options.answers) for name, dataset in self._held_out.items()}

    def describe(self) -> list[str]:
        lines = [
            f"Chat records of {', '.join(self._config.records.files)}",
            f"{self._dataset.describe()} The training step is compiled once for each shape.",
        ]
        for name, dataset in self._held_out.items():
            kept, asked = np.count_nonzero(dataset.sizes[:, 0]), len(self._questions[name])
            left_out = f" Left out: {dataset.skipped}." if dataset.skipped.counts else ""
            rows = f"{kept:,} records in {len(dataset.packs):,} rows"
            lines.append(f"held out, {name}: {rows}; {asked} of them are asked.{left_out}")
        if (beyond := self._encoder.beyond) > 0:
            lines.append(
                f"{beyond:,} tokens of the tokenizer have no embedding: records that use them count as broken."
            )
        datasets = (self._dataset, *self._held_out.values())
        lines += [f"note: {notice}" for dataset in datasets for notice in dataset.notices.lines()]
        return lines + [f"left out: {first}" for dataset in datasets for first in dataset.skipped.first.values()]

    def next_batch(self) -> HostBatch:
        return next(self._stream)

    def state(self) -> dict[str, Any]:
        return self._stream.state()

    def restore(self, state: Mapping[str, Any]) -> None:
        self._stream.restore(dict(state))

    def _collate(self, batch: Batch) -> HostBatch:
        return host_batch(self.model_config, batch.rows, self._layout, batch.tokens, batch.patches, self._config.parts)

    def measures(self) -> list[str]:
        none = dict.fromkeys(self._held_out, np.zeros(2))
        exact = by_set("held_out_exact", none) if self._config.records.answers else {}
        return [*by_set("held_out_loss", none), *exact]

    def make_evaluation(self, graphdef: nnx.GraphDef, mesh: Mesh, **forward: Any) -> Evaluate:
        loss_step = make_loss_step(graphdef, mesh, **forward)
        options, encoder, rows = self._config.records, self._encoder, self._config.run.batch_size
        stop = encoder.tokenizer.encode(encoder.template.stop, add_special_tokens=False).ids[-1]

        def evaluate(params: Arrays, frozen: Arrays) -> dict[str, float]:
            losses: dict[str, np.ndarray] = {}
            exact: dict[str, np.ndarray] = {}
            for name, dataset in self._held_out.items():
                batches = Stream(dataset, batch_size=rows, once=True, collate=self._collate)
                losses[name] = np.zeros(2)
                for batch, sharder in batches:
                    losses[name] += np.asarray(loss_step(params, frozen, place_batch(batch, mesh), sharder))
            if options.answers:
                model = merge_model(graphdef, params, frozen)
                texts = generate(
                    model,
                    [question.prompt for asked in self._questions.values() for question in asked],
                    options.max_new_tokens,
                    stop_tokens=[stop],
                    batch_size=-(-8 // mesh.size) * mesh.size,
                    mesh=mesh,
                    dtype=forward["dtype"],
                )
                answers = map(encoder.tokenizer.decode, texts)
                for name, asked in self._questions.items():
                    references = [question.answer for question in asked]
                    exact[name] = count_exact([next(answers) for _ in asked], references)
            return by_set("held_out_loss", losses) | by_set("held_out_exact", exact)

        return evaluate

    def left_out(self) -> str:
        sets = {"": self._dataset} | {f"of held-out {name}: ": dataset for name, dataset in self._held_out.items()}
        return "; ".join(f"{name}{dataset.skipped}" for name, dataset in sets.items() if dataset.skipped.counts)

    def write_card(self, folder: pathlib.Path, result: Mapping[str, Any], model_class: str) -> None:
        config = self._config
        header = {
            "library_name": "transformers",
            "pipeline_tag": "image-text-to-text",
            "base_model": config.model.path,
            "tags": ["vision-language", "context-parallel", "cpjax"],
        }
        how = f"LoRA of rank {config.lora.rank}" if config.lora.rank else "training its parameters"
        held_out = {name: value for name, value in result.items() if name.startswith("held_out_")}
        measured = "".join(f"- {metric_words(name)}: {value:.4f}\n" for name, value in held_out.items())
        (folder / "README.md").write_text(f"""---
{yaml.safe_dump(header, sort_keys=False)}---

# {model_class}, fine-tuned from {config.model.path}

Made by cpjax with {how}: {config.run.steps} steps of {config.run.batch_size} rows (seed {config.run.seed}), every row
split over {config.mesh.cp} device(s), {config.mesh.layout} layout. The weights are those of step {result["step"]}.

## Data

{chr(10).join(f"- {line}" for line in self.describe())}

## Evaluation

{measured or "Nothing was measured at this step." + chr(10)}""")


@dataclasses.dataclass(frozen=True)
class Question:
    """What a model is asked: a row of the family, which ends with the generation prompt, and what is to follow it."""

    prompt: Any
    answer: str


def ask(dataset: Dataset, count: int) -> list[Question]:
    """The first `count` records whose last answers the model is to write; a damaged one is left out, or stops it.

    Raises:
        RecordError: an image is damaged, and that stops a run.
    """
    questions = []
    for index in np.flatnonzero(dataset.sizes[:, 0])[:count].tolist():
        try:
            questions.append(last_answer(dataset.encoder, dataset.records[index]))
        except RecordError as error:
            if dataset.options.broken == "stop":
                raise
            dataset.skipped.add(index, error)
    return questions


def last_answer(encoder: Encoder, record: Record) -> Question:
    """The last learned answer of a record, and what asks for it: the turns before it with a generation prompt.

    The answer is what training would have the model write after that prompt, the end of its thoughts included.

    Raises:
        RecordError: the record is broken.
    """
    last = max(n for n, message in enumerate(record.messages) if message.role == "assistant" and message.learned)
    before = (dataclasses.replace(message, learned=False) for message in record.messages[:last])
    record = dataclasses.replace(record, messages=(*before, record.messages[last]))
    labels = np.asarray(encoder.row(record).labels)
    return Question(encoder.prompt(record), encoder.tokenizer.decode(labels[labels != IGNORE].tolist()))


def by_set(name: str, counts: Mapping[str, np.ndarray]) -> dict[str, float]:
    """The ratio of the sums of [part, whole] over all sets, and where there are several that of each."""
    if not counts:
        return {}
    part, whole = sum(counts.values(), np.zeros(2))
    several = counts if len(counts) > 1 else {}
    return {name: float(part / max(whole, 1))} | {
        f"{name}/{own}": float(part / max(whole, 1)) for own, (part, whole) in several.items()
    }


def make_loss_step(
    graphdef: nnx.GraphDef, mesh: Mesh, **forward: Any
) -> Callable[[Arrays, Arrays, Arrays, Sharder], jax.Array]:
    """The compiled `(params, frozen, batch, sharder) -> [2]`: sum of the losses of all tokens that count, their number.

    Args:
        forward: as for `make_train_step`.
    """

    def loss_step(params: Arrays, frozen: Arrays, batch: Arrays, sharder: Sharder) -> jax.Array:
        def total(model: Any, batch: Arrays) -> jax.Array:
            hidden = model(batch, sharder, **forward)
            labels = sharder.take_local(batch["labels"])
            head, softcap = model.head().astype(hidden.dtype), getattr(model, "logit_softcap", None)
            loss, _ = cross_entropy(hidden, head, labels, valid_tokens=1, softcap=softcap)
            return loss[None]

        loss = run_model(total, graphdef, mesh, params, frozen, batch, out_specs=P("cp")).sum()
        valid = jnp.sum(batch["labels"] != IGNORE)  # before anything is sharded
        return jnp.stack([loss, valid])

    return jax.jit(loss_step, out_shardings=NamedSharding(mesh, P()))
