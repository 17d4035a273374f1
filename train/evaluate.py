"""Questions about held-out documents; `python -m cpjax.train.evaluate FOLDER` asks an export some of them."""

from __future__ import annotations

import argparse
import collections
import dataclasses
import functools
import math
import pathlib
import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
import yaml
from jax.sharding import Mesh

from cpjax.mesh import make_mesh
from cpjax.models import family, from_pretrained
from cpjax.shard import Layout, Sharder, layout_from_name
from cpjax.train import digits
from cpjax.train.config import DataConfig
from cpjax.train.devices import MAX_VIRTUAL, set_up_devices
from cpjax.train.errors import computing, run_command
from cpjax.train.metrics import metric_words
from cpjax.train.presets import media
from cpjax.train.step import Arrays, make_eval_step, place_batch, split_model
from cpjax.train.task import HostBatch, host_batch

HELD_OUT_SEED = 0
"""The held-out documents are the same in every run."""

Predict = Callable[[Arrays, Sharder], jax.Array]
"""(batch, sharder) -> the most likely next token at each position, int [B, T]."""

Counts = dict[str, np.ndarray]
"""[right, asked] by kind of question."""


def digits_batch(
    model_config: Any, data: DataConfig, documents: Sequence[digits.Document], layout: Layout, parts: int = 1
) -> HostBatch:
    """Documents as a padded host batch, see there; its shapes depend on the options alone: a step compiles once."""
    module = family(model_config.model_type)
    rows = [
        module.Row(document.input_ids, document.labels, media=[media(model_config, image) for image in document.images])
        for document in documents
    ]
    num_patches = data.images * len(rows[0].media[0].patches)
    return host_batch(model_config, rows, layout, digits.length(data), num_patches, parts)


@computing()
def ask(
    predict: Predict,
    model_config: Any,
    data: DataConfig,
    documents: Sequence[digits.Document],
    layout: Layout,
    mesh: Mesh,
) -> list[list[np.ndarray]]:
    """The model's answer, as token ids, to each question of each document.

    All answers come from one forward pass, each token of an answer given the right ones before it: an answer is right
    in every token exactly if the model would also have written it by itself.
    """
    batch, sharder = digits_batch(model_config, data, documents, layout, mesh.shape["dp"] * mesh.shape["fsdp"])
    predicted = np.asarray(predict(place_batch(batch, mesh), sharder))
    if sharder.places is not None:  # rows of several documents
        places = np.atleast_2d(sharder.places)
        predicted = np.take_along_axis(predicted, places, axis=1).reshape(len(documents), -1)
    return [
        [predicted[row, question.answer - 1] for question in document.questions]
        for row, document in enumerate(documents)
    ]


def count_right(documents: Sequence[digits.Document], answers: Sequence[Sequence[np.ndarray]]) -> Counts:
    """Right answers and questions, by kind; an answer is right if all of its tokens are."""
    counts: Counts = collections.defaultdict(lambda: np.zeros(2, int))
    for document, given in zip(documents, answers, strict=True):
        for question, answer in zip(document.questions, given, strict=True):
            counts[question.kind] += (is_right(document, question, answer), 1)
    return counts


def is_right(document: digits.Document, question: digits.Question, answer: np.ndarray) -> bool:
    """Whether every token of an answer is the one in the document."""
    return np.array_equal(answer, document.input_ids[question.answer])


def accuracies(counts: Counts) -> dict[str, float]:
    """Share of right answers, in all and by kind, named as in the metrics."""
    right, asked = sum(counts.values(), np.zeros(2, int))
    kinds = {f"held_out_accuracy/{kind}": float(counts[kind][0] / counts[kind][1]) for kind in sorted(counts)}
    return {"held_out_accuracy": float(right / asked), **kinds}


def held_out_documents(data: DataConfig, batches: int, batch_size: int) -> list[list[digits.Document]]:
    """Batches of held-out documents, the same in every run with these options.

    Raises:
        ValueError: the documents are too short to hold a question.
    """
    documents = [digits.documents(data, HELD_OUT_SEED, step, batch_size, "held_out") for step in range(batches)]
    if not any(document.questions for batch in documents for document in batch):
        raise ValueError(
            f"held-out documents of {data.tokens} tokens with {data.images} images hold no question: raise "
            "--data.tokens or lower --data.images"
        )
    return documents


def held_out_accuracies(
    predict: Predict, batches: Sequence[Sequence[digits.Document]], model_config: Any, data: DataConfig,
    layout: Layout, mesh: Mesh,
) -> dict[str, float]:  # fmt: skip
    """Accuracies over batches of documents."""
    counts: Counts = collections.defaultdict(lambda: np.zeros(2, int))
    for documents in batches:
        answers = ask(predict, model_config, data, documents, layout, mesh)
        for kind, count in count_right(documents, answers).items():
            counts[kind] += count
    return accuracies(counts)


def main() -> int:
    """The command line; returns its exit code."""
    parser = argparse.ArgumentParser(prog="python -m cpjax.train.evaluate", description=__doc__)
    parser.add_argument("folder", type=pathlib.Path, help="export of a run, for instance runs/digits/export")
    parser.add_argument("--documents", type=int, default=4, help="held-out documents to ask about (default: 4)")
    parser.add_argument("--show", type=int, default=6, help="questions to print, with their images (default: 6)")
    parser.add_argument("--cp", type=int, default=1, help="devices to split each document over (default: 1)")
    options = parser.parse_args()
    return run_command(lambda: try_export(options.folder, options.documents, options.show, options.cp))


def try_export(folder: pathlib.Path, count: int, show: int, cp: int) -> int:
    """Asks an export about `count` held-out documents, and prints the first `show` questions and the accuracy.

    Raises:
        ValueError: an option out of its range, or a folder that is no export of the default job.
    """
    for option, value, least, most in (
        ("documents", count, 1, math.inf), ("show", show, 0, math.inf), ("cp", cp, 1, MAX_VIRTUAL)
    ):  # fmt: skip
        if not least <= value <= most:
            raise ValueError(
                f"--{option} is {value}: it must be at least {least}" + f", at most {most}" * (most < math.inf)
            )
    set_up_devices(cp)
    mesh, layout = make_mesh(cp=cp), layout_from_name("zigzag", cp)
    data = read_data_config(folder / "README.md")
    model = from_pretrained(folder, mesh=mesh)
    graphdef, params, frozen = split_model(model)
    predict = functools.partial(make_eval_step(graphdef, mesh), params, frozen)
    counts: Counts = collections.defaultdict(lambda: np.zeros(2, int))
    for documents in held_out_documents(data, count, 1):
        answers = ask(predict, model.config, data, documents, layout, mesh)
        for question, answer in zip(documents[0].questions, answers[0], strict=True):
            if show > 0:
                print(draw_question(documents[0], question, answer))
                show -= 1
        for kind, pair in count_right(documents, answers).items():
            counts[kind] += pair
    for name, accuracy in accuracies(counts).items():
        print(f"{metric_words(name)} {accuracy:.4f}")
    return 0


def read_data_config(card: pathlib.Path) -> DataConfig:
    """The data options in the header of a model card.

    Raises:
        ValueError: no such file or header, or one of a model that was trained on records.
    """
    try:
        header = yaml.safe_load(card.read_text().split("---\n")[1] if card.is_file() else "")
        if "cpjax" in header["tags"] and "cpjax" not in header:
            raise ValueError(
                f"{card.parent} was trained on records of its own, and this command asks about the handwritten digits "
                "of the default job: to measure it, give a run --records.held_out and --records.answers"
            )
        data = DataConfig(**header["cpjax"]["data"])
        if not all(isinstance(value, int) for value in dataclasses.astuple(data)):
            raise TypeError
        return data
    except (yaml.YAMLError, TypeError, KeyError, IndexError, UnicodeDecodeError):
        raise ValueError(
            f"{card} does not say which documents the model was trained on: give the export of a cpjax run"
        ) from None


_SHADES = " .:-=+*#%@"


def draw_question(document: digits.Document, question: digits.Question, answer: np.ndarray) -> str:
    """The images that a question asks about, side by side, and what was asked and answered."""
    images = [document.images[index] for index in question.images]
    levels = [np.clip(image * len(_SHADES), 0, len(_SHADES) - 1).astype(int) for image in images]
    lines = [
        "   ".join("".join(2 * _SHADES[level] for level in row[i]) for row in levels) for i in range(len(levels[0]))
    ]
    ids = document.input_ids
    equals = [digits.VOCABULARY[ids[place - 1]] == "=" for place in question.answer]  # as in the document, before these
    said, wanted = (
        " ".join("= " * equal + digits.VOCABULARY[token] for token, equal in zip(tokens, equals, strict=True))
        for tokens in (answer, ids[question.answer])
    )
    verdict = "right" if is_right(document, question, answer) else f"wrong, it is {wanted}"
    return "\n".join([*lines, f"{question.text}: {said} ({verdict})", ""])


if __name__ == "__main__":
    sys.exit(main())
