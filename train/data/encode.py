"""From a record to the model's input: tokens, labels and media."""

from __future__ import annotations

import dataclasses
import inspect
import itertools
import os
import pathlib
from collections.abc import Sequence
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from cpjax.models import family, read_config
from cpjax.shard import IGNORE
from cpjax.train.data.images import image_size, load_image
from cpjax.train.data.records import ImagePart, Record, RecordError, VideoPart
from cpjax.train.data.template import ChatTemplate, Say, ignore


def read_tokenizer(folder: pathlib.Path) -> Tokenizer:
    """The tokenizer in tokenizer.json.

    Raises:
        ValueError: it is missing or damaged.
    """
    if not (folder / "tokenizer.json").is_file():
        raise ValueError(f"{folder} has no tokenizer.json: save it with transformers' fast tokenizer")
    try:
        return Tokenizer.from_file(str(folder / "tokenizer.json"))
    except Exception as error:  # the library raises Exception itself
        raise ValueError(f"{folder / 'tokenizer.json'} is damaged ({error}): copy or download it again") from None


@dataclasses.dataclass(frozen=True)
class Encoder:
    """The tokenizer, chat template and processor of a Hugging Face folder.

    Attributes:
        module: the model's family, see `cpjax.models.family`.
        processor: of images and videos.
        tokenizer: of text.
        template: of chats.
    """

    module: Any
    processor: Any
    tokenizer: Tokenizer
    template: ChatTemplate

    @classmethod
    def from_folder(cls, folder: str | os.PathLike[str]) -> Encoder:
        """Reads config.json, tokenizer.json, tokenizer_config.json, the chat template and the processors' files.

        Raises:
            ValueError: one of them is missing, damaged or unsupported.
        """
        path = pathlib.Path(folder)
        module = family(read_config(path).model_type)
        tokenizer = read_tokenizer(path)
        tokenizer.no_truncation()
        tokenizer.no_padding()
        tokenizer.post_processor = (
            None  # it adds nothing to chats, but may take spaces from a token's place in the text
        )
        processor = module.Processor.from_folder(path)
        if missing := [token for token in processor.placeholder_ids if tokenizer.id_to_token(token) is None]:
            raise ValueError(
                f"{path / 'tokenizer.json'} has no token {missing[0]}, which config.json names as a placeholder: use "
                "the tokenizer that belongs to the model"
            )
        special = [token.content for token in tokenizer.get_added_tokens_decoder().values() if token.special]
        return cls(module, processor, tokenizer, ChatTemplate.from_folder(path, special))

    @property
    def beyond(self) -> int:
        """How many tokens have no embedding."""
        return sum(token >= self.processor.config.text.vocab_size for token in self.tokenizer.get_vocab().values())

    def size(self, record: Record, say: Say = ignore) -> tuple[int, int]:
        """Number of tokens and of image patches; pictures are not decoded.

        Args:
            say: is told what of the record is not used or not learned.

        Raises:
            RecordError: the record is broken.
        """
        for name in record.unused:
            say(f"{name} is not used")
        plans, text = self._plans(record), self.template.render(record)
        ids, _, repeats = self._tokens(record, text, plans, self.template.spans(record, text, say))
        self.template.report(record, text, say)
        return len(ids) + sum(repeats) - len(repeats), sum(int(np.prod(plan.grid, axis=-1).sum()) for plan in plans)

    def row(self, record: Record) -> Any:
        """The family's `Row`, one document: labels are the learned answers' tokens, not yet shifted.

        See `ChatTemplate.spans` for where an answer begins; it ends with the stop token.

        Raises:
            RecordError: the record is broken.
        """
        text = self.template.render(record)
        return self._row(record, text, self.template.spans(record, text))

    def prompt(self, record: Record) -> Any:
        """The family's `Row`, without labels, that asks for the last turn of a record, an assistant's.

        Raises:
            RecordError: the record is broken.
        """
        row = self._row(record, self.template.prompt(record), [])
        return dataclasses.replace(row, labels=None)

    def _row(self, record: Record, text: str, spans: Sequence[tuple[int, int]]) -> Any:
        plans = self._plans(record)
        ids, trained, repeats = self._tokens(record, text, plans, spans)
        counts = np.ones(len(ids), int)
        counts[np.isin(ids, self.processor.placeholder_ids)] = repeats
        ids, trained = np.repeat(ids, counts), np.repeat(trained, counts)
        pictures = (
            [load_image(part if isinstance(part, ImagePart) else part.frames[frame], record.source)
             for frame in plan.frames]
            for part, plan in zip(record.media(), plans, strict=True)
        )  # fmt: skip
        media = [self.processor.media(plan, shown) for plan, shown in zip(plans, pictures, strict=True)]
        return self.module.Row(ids, np.where(trained, ids, IGNORE), None, media)

    def _plans(self, record: Record) -> list[Any]:
        """What each image and video of the record will be."""
        plans = []
        for part in record.media():
            frames = part.frames if isinstance(part, VideoPart) else (part,)
            height, width = image_size(frames[0], record.source)
            plan = self.processor.plan_video if isinstance(part, VideoPart) else self.processor.plan_image
            if unknown := part.limits.keys() - inspect.signature(plan).parameters.keys():
                raise RecordError(
                    "unfit image",
                    f"{record.source} has {min(unknown)} in an image or a video, for which the processor of this model "
                    "has no use: leave it out, and resize or choose frames yourself",
                )
            rate = (part.fps,) if isinstance(part, VideoPart) else ()
            try:
                plans.append(plan(*((len(frames),) if rate else ()), height, width, *rate, **part.limits))
            except ValueError as error:
                raise RecordError("unfit image", f"{record.source}: {error}") from None
            seen = plans[-1].frames if len(frames) > 1 else ()
            if other := {image_size(frames[number], record.source) for number in seen} - {(height, width)}:
                sizes = " and ".join(f"{height} x {width}" for height, width in [(height, width), min(other)])
                raise RecordError(
                    "unfit image", f"{record.source} has a video with frames of {sizes} pixels: make them equally large"
                )
        return plans

    def _tokens(
        self, record: Record, text: str, plans: Sequence[Any], spans: Sequence[tuple[int, int]]
    ) -> tuple[np.ndarray, np.ndarray, list[int]]:
        """Token ids with one placeholder per frame, whether each lies in a span, and how often each is repeated.

        No token lies on both sides of where a span begins: what asks for an answer ends there, so its tokens do too.
        """
        for token in self.processor.placeholder_ids:
            placeholder = str(self.tokenizer.id_to_token(token))
            if any(placeholder in f"{message.text}{message.reasoning}" for message in record.messages):
                raise RecordError(
                    "placeholder in text", f"{record.source} has {placeholder} in its text: it may stand for media only"
                )
        pieces, at = [], 0
        moved = [(0, 0)]  # from there on, text is moved by so much
        for plan in plans:
            mark, shown = self.processor.text(plan, self.tokenizer.id_to_token)
            found = text.find(mark, at)
            if found < 0:
                raise RecordError(
                    f"{plan.modality} not shown by the template",
                    f"{record.source} has {plan.modality}s, but the chat template does not show each of them, in its "
                    f"place, as {mark}: use the template of a model that sees {plan.modality}s, and put them into user "
                    "turns",
                )
            pieces += [text[at:found], shown]
            at = found + len(mark)
            moved.append((at, moved[-1][1] + len(shown) - len(mark)))
        text = "".join([*pieces, text[at:]])
        starts, shifts = np.array(moved).T
        bounds = np.array(spans, int).reshape(-1, 2)
        bounds += shifts[np.searchsorted(starts, bounds, side="right") - 1]
        ids, offsets = self._encode(text, bounds[:, 0])
        size = self.processor.config.text.vocab_size
        if len(beyond := ids[ids >= size]):
            raise RecordError(
                "token without embedding",
                f"{record.source} has the token {self.tokenizer.id_to_token(beyond[0])}, number {beyond[0]}, but the "
                f"model has embeddings for {size:,}: resize them to the tokenizer, or use the model's own tokenizer",
            )
        trained = np.zeros(len(ids), bool)
        firsts = np.searchsorted(offsets[:, 1], bounds[:, 0], side="right")
        for first, end in zip(firsts, np.searchsorted(offsets[:, 0], bounds[:, 1]), strict=True):
            trained[first:end] = True
        repeats = [count for plan in plans for count in self.processor.tokens(plan)]
        if np.isin(ids, self.processor.placeholder_ids).sum() != len(repeats):
            raise RecordError(
                "wrong image count", f"{record.source} has {len(repeats)} frames, but the chat template shows others"
            )
        return ids, trained, repeats

    def _encode(self, text: str, cuts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Ids and (start, end) of a text's tokens; where one would lie on both sides of a cut, the text is split."""

        def encode(begin: int, end: int) -> tuple[np.ndarray, np.ndarray]:
            encoding = self.tokenizer.encode(text[begin:end], add_special_tokens=False)
            return np.array(encoding.ids, int), np.array(encoding.offsets, int).reshape(-1, 2) + begin

        ids, offsets = encode(0, len(text))
        last = np.searchsorted(offsets[:, 0], cuts) - 1  # the token that begins before the cut
        if not (inside := cuts[(last >= 0) & (offsets[last, 1] > cuts)]).size:
            return ids, offsets
        pieces = [encode(*piece) for piece in itertools.pairwise([0, *inside.tolist(), len(text)])]
        ids, offsets = (np.concatenate(arrays) for arrays in zip(*pieces, strict=True))
        return ids, offsets
