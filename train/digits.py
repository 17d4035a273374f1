"""Long documents of handwritten digits: images on named shelves, then questions about what was seen far back.

A document reads like this, every image being a real scan::

    <bos> <image> c3 <image> b7 <image> f1 ... read c3 7 | copy b7 2 f1 0 c3 7 | sum c3 7 b7 2 = 0 9 | sort ...

The name follows its image, and a question names images; the model answers each name by the digit in the image, and
then, for `sum` and `sort`, says what the question asks for. Only answers have labels.
"""

from __future__ import annotations

import dataclasses
import functools
import pathlib
from typing import Literal

import numpy as np
from scipy.ndimage import affine_transform

from cpjax.shard import IGNORE
from cpjax.train.config import DataConfig

SOURCE = (
    "Optical Recognition of Handwritten Digits: 1,797 scans of 8 x 8 pixels; E. Alpaydin and C. Kaynak, UCI Machine "
    "Learning Repository, 1998, doi:10.24432/C50P49, CC BY 4.0."
)
LICENSE = "cc-by-4.0"

_SPECIAL = ("<pad>", "<bos>", "<vision_start>", "<vision_end>", "<image>", "<video>")
_NAMES = tuple(f"{letter}{number}" for letter in "abcdefgh" for number in range(1, 9))
VOCABULARY = (*_SPECIAL, *"0123456789", "read", "copy", "sum", "sort", "=", *_NAMES)
"""The word of each token id."""
ID = {word: token for token, word in enumerate(VOCABULARY)}

_ASKED = {"read": 1, "copy": 3, "sum": 2, "sort": 3}
"""Images that a question of each kind is about."""
_SHARE = {"read": 0.35, "copy": 0.2, "sum": 0.25, "sort": 0.2}
"""Share of each kind among the questions."""
_TOKENS = {"read": 3, "copy": 7, "sum": 8, "sort": 11}
_PER_IMAGE = 4  # <vision_start> <image> <vision_end> name


@dataclasses.dataclass(frozen=True)
class Question:
    """One question of a document.

    Attributes:
        kind: "read", "copy", "sum" or "sort".
        text: the question in words, without its answer.
        answer: int [n], positions of the answer's tokens in the document.
        images: numbers of the images that it is about.
    """

    kind: str
    text: str
    answer: np.ndarray
    images: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Document:
    """A document.

    Attributes:
        input_ids: [S].
        labels: [S], -100 = no target.
        images: [n, 8, 8] in 0 .. 1, in the order of their tokens.
        questions: those that count.
    """

    input_ids: np.ndarray
    labels: np.ndarray
    images: np.ndarray
    questions: tuple[Question, ...]

    def text(self) -> str:
        """The document in words."""
        return " ".join(VOCABULARY[token] for token in self.input_ids)


def describe(data: DataConfig) -> str:
    """One sentence about the documents."""
    return (
        f"Documents of {data.tokens:,} tokens with {data.images} scans of handwritten digits, and questions to read, "
        "copy, sum or sort what was seen."
    )


def length(data: DataConfig) -> int:
    """Tokens that every document is padded to."""
    return data.tokens


def documents(
    data: DataConfig, seed: int, step: int, count: int, split: Literal["train", "held_out"]
) -> list[Document]:
    """The documents of a step; each depends on its arguments alone, so a run resumes anywhere and on any mesh.

    Train and held-out documents share no image. A held-out document shows all its images first, and its questions are
    about images at least an eighth of its length back that were not asked about before; other questions fill it up.
    To learn from, half of the images are captioned by their digit and all are slightly turned, scaled and moved, and
    a document may come in sections (some images, questions about them, more images): all do in the first hundred
    steps, three in four after two hundred do not.

    Raises:
        ValueError: more images than names, or too few tokens for them and a question.
    """
    if not 3 <= data.images <= len(_NAMES):
        raise ValueError(f"--data.images is {data.images}: it must be 3 to {len(_NAMES)}, as each image has a name")
    needed = 8 * data.images + 16
    if data.tokens < needed:
        raise ValueError(f"--data.tokens is {data.tokens}: {data.images} images and questions need at least {needed}")
    return [
        _document(data, np.random.default_rng([seed, step, index, split == "train"]), split, step)
        for index in range(count)
    ]


@functools.cache
def _scans() -> tuple[np.ndarray, np.ndarray, dict[str, np.ndarray]]:
    """Images [n, 8, 8] in 0 .. 1, their digits [n], and the numbers of those of each split."""
    with np.load(pathlib.Path(__file__).parent / "data" / "optdigits.npz") as file:
        images, digits = file["images"].astype(np.float32) / 16, file["labels"].astype(int)
    held_out = np.arange(len(digits)) % 6 == 5
    return images, digits, {"train": np.flatnonzero(~held_out), "held_out": np.flatnonzero(held_out)}


def _document(data: DataConfig, rng: np.random.Generator, split: Literal["train", "held_out"], step: int) -> Document:
    train = split == "train"
    scans, digits, splits = _scans()
    picked = rng.choice(splits[split], data.images, replace=False)
    names = rng.permutation(len(_NAMES))[: data.images]
    images = np.stack([_moved(scan, rng) if train else scan for scan in scans[picked]])
    values = digits[picked]

    tokens, labels = [ID["<bos>"]], [IGNORE]

    def say(*words: str, answer: bool = False) -> None:
        ids = [ID[word] for word in words]
        tokens.extend(ids)
        labels.extend(ids if answer else [IGNORE] * len(ids))

    questions: list[Question] = []
    name_position = np.zeros(data.images, int)
    asked: set[int] = set()
    section = _section(data, rng, step) if train else data.images
    far = 0 if train else data.tokens // 8
    for first in range(0, data.images, section):
        shown = range(first, min(first + section, data.images))
        for image in shown:
            say("<vision_start>", "<image>", "<vision_end>", _NAMES[names[image]])
            name_position[image] = len(tokens) - 1
            if train and rng.random() < 0.5:
                say(str(values[image]), answer=True)
        # The tokens left when every image still to come is shown and captioned are shared out by number of images.
        rest = data.images - shown.stop
        free = data.tokens - len(tokens) - rest * (_PER_IMAGE + 1)
        end = len(tokens) + free * len(shown) // (len(shown) + rest)
        order = rng.permutation(shown)
        while end - len(tokens) >= min(_TOKENS.values()):
            fits = [kind for kind in _ASKED if _TOKENS[kind] <= end - len(tokens) and _ASKED[kind] <= len(shown)]
            share = np.array([_SHARE[kind] for kind in fits])
            kind = str(rng.choice(fits, p=share / share.sum()))
            new = [image for image in order if image not in asked and len(tokens) - name_position[image] > far]
            counts = len(new) >= _ASKED[kind]
            about = new[: _ASKED[kind]] if counts else rng.choice(shown, _ASKED[kind], replace=False)
            asked.update(about)
            start = len(tokens)
            say(kind)
            for image in about:
                say(_NAMES[names[image]])
                say(str(values[image]), answer=True)
            if kind in ("sum", "sort"):
                say("=")
                told = values[list(about)]
                say(*(f"{told.sum():02d}" if kind == "sum" else sorted(map(str, told))), answer=True)
            if counts:
                text = " ".join([kind, *(_NAMES[names[image]] for image in about)])
                answer = start + np.flatnonzero(np.array(labels[start:]) != IGNORE)
                questions.append(Question(kind, text, answer, tuple(map(int, about))))
    return Document(np.array(tokens), np.array(labels), images, tuple(questions))


def _section(data: DataConfig, rng: np.random.Generator, step: int) -> int:
    """Images per section: few to many at first, so that there are questions easy enough to learn from; then all."""
    whole = 0.7 * np.clip((step - 100) / 100, 0, 1)
    return data.images if rng.random() < whole else int(rng.choice([1, 2, 4, 8, 24, data.images]))


def _moved(image: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """The image turned by up to 12 degrees, scaled and sheared by up to an eighth, and moved by up to 0.7 pixels."""
    angle = np.deg2rad(rng.uniform(-12, 12))
    turn = np.array([[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]])
    stretch = np.array([[1, 0], [rng.uniform(-0.1, 0.1), 1]]) * np.exp(rng.uniform(-0.12, 0.12, (2, 1)))
    matrix = stretch @ turn
    center = np.array([3.5, 3.5])
    offset = center - matrix @ center + rng.uniform(-0.7, 0.7, 2)
    return affine_transform(image, matrix, offset, order=1)
