"""The default job: documents of handwritten digits, a function of the seed and the step."""

from __future__ import annotations

import functools
import pathlib
from collections.abc import Mapping
from typing import Any

import numpy as np
from flax import nnx
from jax.sharding import Mesh

from cpjax.shard import Layout
from cpjax.train import digits
from cpjax.train.config import Config
from cpjax.train.evaluate import accuracies, digits_batch, held_out_accuracies, held_out_documents
from cpjax.train.report import write_card
from cpjax.train.step import Arrays, make_eval_step
from cpjax.train.task import Evaluate, HostBatch, read_model_config


class DigitsTask:
    """See `cpjax.train.task.Task`."""

    ask = "cpjax.train.evaluate"

    def __init__(self, config: Config, layout: Layout):
        self._config, self._layout, self._step = config, layout, 0
        self.model_config = read_model_config(config)
        text, path = self.model_config.text, config.model.path
        if path and (text.vocab_size, self.model_config.image_token_id) != (
            len(digits.VOCABULARY),
            digits.ID["<image>"],
        ):
            raise ValueError(
                f"--model.path {path} has a vocabulary of its own, not the words of the default job's documents: give "
                "--records.files, the records to train it on"
            )
        self._held_out = held_out_documents(config.data, config.run.eval_batches, config.run.batch_size)

    def describe(self) -> list[str]:
        return [digits.describe(self._config.data)]

    def next_batch(self) -> HostBatch:
        data, run = self._config.data, self._config.run
        documents = digits.documents(data, run.seed, self._step, run.batch_size, "train")
        self._step += 1
        return digits_batch(self.model_config, data, documents, self._layout, self._config.parts)

    def state(self) -> dict[str, Any]:
        return {"step": self._step}

    def restore(self, state: Mapping[str, Any]) -> None:
        self._step = state["step"]

    def measures(self) -> list[str]:
        asked = [question.kind for batch in self._held_out for document in batch for question in document.questions]
        return list(accuracies({kind: np.ones(2) for kind in asked}))

    def make_evaluation(self, graphdef: nnx.GraphDef, mesh: Mesh, **forward: Any) -> Evaluate:
        step = make_eval_step(graphdef, mesh, **forward)

        def evaluate(params: Arrays, frozen: Arrays) -> dict[str, float]:
            predict = functools.partial(step, params, frozen)
            data = self._config.data
            return held_out_accuracies(predict, self._held_out, self.model_config, data, self._layout, mesh)

        return evaluate

    def left_out(self) -> str:
        return ""

    def write_card(self, folder: pathlib.Path, result: Mapping[str, Any], model_class: str) -> None:
        write_card(folder, self._config, result, model_class)
