"""Chat records in their one normal form, and how the formats that people have become it."""

from __future__ import annotations

import base64
import binascii
import contextlib
import dataclasses
import pathlib
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from cpjax.train.errors import InputError

ROLES = {
    "system": "system", "user": "user", "assistant": "assistant",
    "human": "user", "gpt": "assistant",
}  # fmt: skip
"""What each name of a role means."""


class RecordError(InputError):
    """A record that cannot be used, named with its file and line.

    Attributes:
        reason: a few words, the same for all records broken in this way.
    """

    def __init__(self, reason: str, message: str):
        super().__init__(message)
        self.reason = reason


@dataclasses.dataclass(frozen=True)
class TextPart:
    """Text, verbatim."""

    text: str


@dataclasses.dataclass(frozen=True)
class ImagePart:
    """An image in a file, or in `data`: the bytes of such a file."""

    path: pathlib.Path | None = None
    data: bytes | None = None


@dataclasses.dataclass(frozen=True)
class VideoPart:
    """The frames of a video, `fps` of them a second."""

    frames: tuple[ImagePart, ...]
    fps: float


Part = TextPart | ImagePart | VideoPart


@dataclasses.dataclass(frozen=True)
class Message:
    """One turn; `role` is "system", "user" or "assistant"."""

    role: str
    parts: tuple[Part, ...]

    @property
    def text(self) -> str:
        """All its text."""
        return "".join(part.text for part in self.parts if isinstance(part, TextPart))


@dataclasses.dataclass(frozen=True)
class Record:
    """A conversation, and where it came from: "file:line"."""

    messages: tuple[Message, ...]
    source: str

    def media(self) -> list[ImagePart | VideoPart]:
        """Images and videos in their order."""
        return [part for message in self.messages for part in message.parts if not isinstance(part, TextPart)]


def parse_record(value: Any, source: str, folder: pathlib.Path) -> Record:
    """The normal form of a record as its file holds it; null values count as absent.

    Known are `messages` (text, or parts of type text, image, image_url, video), `conversations` (LLaVA, ShareGPT; turns
    of `from` and `value`) and `prompt` with `completion` (texts or messages). Images without a value of their own, and
    the marks <image> and <video> in text, take theirs in order from the record's `image`, `images`, `video`, `videos`.

    Args:
        value: the record.
        source: where it is, "file:line".
        folder: paths of images are relative to it.

    Raises:
        RecordError: it has none of these forms, or lacks something.
    """
    if not isinstance(value, Mapping):
        raise RecordError("bad format", f"{source} holds {type(value).__name__}: a record is an object with names")
    return _Reader(value, source, folder).read()


_MARK = re.compile("(<image>|<video>)")
_URL = re.compile("(?!file:)[a-z][a-z0-9+.-]*://", re.IGNORECASE)
_BYTES, _PLACES = ("bytes", "base64"), ("image", "image_url", "path", "url")
"""Names under which parts and objects hold an image, and under which they say where it is."""


def short(value: object, limit: int = 80) -> str:
    """A value for a message, at most so long, since a text may be a whole image; of lists and objects the type."""
    text = str(value) if isinstance(value, str | pathlib.Path | int | float | None) else type(value).__name__
    return text if len(text) <= limit else f"{text[: limit - 33]}...{text[-30:]}"


class _Reader:
    """Reads one record; holds the media that are still to be placed."""

    def __init__(self, value: Mapping[str, Any], source: str, folder: pathlib.Path):
        self.value, self.source, self.folder = value, source, folder
        self.own = {kind: self._own(kind) for kind in ("image", "video")}
        self.given = {kind: len(media) for kind, media in self.own.items()}
        self.used = {"image": 0, "video": 0}

    def read(self) -> Record:
        value = self.value
        if value.get("messages") is not None:
            messages = [self._message(turn, "role", "content") for turn in self._list(value["messages"], "messages")]
        elif value.get("conversations") is not None:
            turns = self._list(value["conversations"], "conversations")
            messages = [
                self._message(turn, *(("from", "value") if "from" in turn else ("role", "content"))) for turn in turns
            ]
        elif value.get("prompt") is not None and value.get("completion") is not None:
            messages = [*self._side(value["prompt"], "user"), *self._side(value["completion"], "assistant")]
        else:
            names = short(", ".join(sorted(map(str, value))), 240)
            raise self.error(
                "bad format",
                f"has the names {names}: a record needs messages, conversations, or prompt and completion",
            )
        for kind, count in self.used.items():
            if count != self.given[kind]:
                raise self.error(
                    f"wrong {kind} count",
                    f"gives {self._gives(kind)} but has places for {count}: make them equal",
                )
        answers = [message for message in messages if message.role == "assistant"]
        if not answers:
            raise self.error("no assistant turn", "has no assistant turn: there is nothing to learn from it")
        if any(not isinstance(part, TextPart) for message in answers for part in message.parts):
            raise self.error("bad format", "shows an image in an assistant turn: a model of this kind answers in text")
        return Record(tuple(messages), self.source)

    def error(self, reason: str, text: str) -> RecordError:
        return RecordError(reason, f"{self.source} {text}")

    def _gives(self, kind: str) -> str:
        return f"{self.given[kind]} {kind}{'' if self.given[kind] == 1 else 's'}"

    def _list(self, value: Any, name: str) -> Sequence[Any]:
        if not isinstance(value, list) or not value or not all(isinstance(turn, Mapping) for turn in value):
            raise self.error("bad format", f"needs a list of turns in {name}, with at least one")
        return value

    def _side(self, value: Any, role: str) -> list[Message]:
        """Prompt or completion: a text, or messages."""
        if isinstance(value, str):
            return [Message(role, tuple(self._marked(value)))]
        name = "prompt" if role == "user" else "completion"
        return [self._message(turn, "role", "content") for turn in self._list(value, name)]

    def _message(self, turn: Mapping[str, Any], role_name: str, content_name: str) -> Message:
        for name in ("tool_calls", "function_call", "reasoning_content", "thinking"):
            if turn.get(name):
                raise self.error("bad format", f"has {name} in a turn, which is not supported: write it into the text")
        role, content = turn.get(role_name), turn.get(content_name)
        if not isinstance(role, str) or role not in ROLES:
            raise self.error("unknown role", f"has the role {short(role)}: it must be one of {', '.join(ROLES)}")
        if isinstance(content, str):
            return Message(ROLES[role], tuple(self._marked(content)))
        if not isinstance(content, list) or not all(isinstance(part, Mapping) for part in content):
            raise self.error(
                "bad format", f"has {content_name} of type {type(content).__name__}: it must be text or a list of parts"
            )
        return Message(ROLES[role], tuple(self._part(part) for part in content))

    def _marked(self, text: str) -> Iterator[Part]:
        """Text with the record's media in place of its marks; without such media, and outside LLaVA's form, text."""
        marks = _MARK if self.given["image"] or self.given["video"] or "conversations" in self.value else None
        for piece in marks.split(text) if marks else [text]:
            if marks and marks.fullmatch(piece):
                yield self._next(piece[1:-1])
            elif piece:
                yield TextPart(piece)

    def _next(self, kind: str) -> Part:
        self.used[kind] += 1
        if not self.own[kind]:
            raise self.error(f"wrong {kind} count", f"gives {self._gives(kind)} but has places for more")
        return self.own[kind].pop(0)

    def _part(self, part: Mapping[str, Any]) -> Part:
        kind = part.get("type")
        if kind == "text" and isinstance(part.get("text"), str):
            return TextPart(part["text"])
        if kind in ("image", "image_url"):
            given = any(part.get(name) is not None for name in _BYTES + _PLACES)
            return self._image(part) if given else self._next("image")
        if kind == "video":
            return self._video(part) if part.get("video") is not None else self._next("video")
        raise self.error(
            "bad format",
            f"has a part of type {short(kind)}: parts are text, image, image_url or video, with their value",
        )

    def _own(self, kind: str) -> list[Any]:
        """The record's own images or videos, beside its turns."""
        found = [self.value[name] for name in (kind, f"{kind}s") if self.value.get(name) is not None]
        if len(found) > 1:
            raise self.error("bad format", f"has both {kind} and {kind}s: give one of them")
        if kind == "image":
            listed = found[0] if found and isinstance(found[0], list) else found
            return [self._image(value) for value in listed]
        return [self._video(video) for video in (found[0] if found and "videos" in self.value else found)]

    def _image(self, value: Any) -> ImagePart:
        """An image by path, bytes, base64 or data URI, itself or in an object that names it."""
        while isinstance(value, Mapping):
            for name in _BYTES:
                if (data := value.get(name)) is not None:
                    return ImagePart(data=data) if isinstance(data, bytes) else self._base64(data)
            value = next((value[name] for name in _PLACES if value.get(name) is not None), None)
        if not isinstance(value, str) or not value:
            raise self.error("bad format", "has an image that is neither a path, bytes, nor a base64 data URI")
        if _URL.match(value):
            raise self.error("image by URL", f"has an image at {short(value)}: download it and give its path")
        if value[:5].lower() == "data:":
            return self._base64(value)
        return ImagePart(path=self.folder / re.sub("^file://", "", value, flags=re.IGNORECASE))

    def _base64(self, text: Any) -> ImagePart:
        """An image in base64, alone or in a data URI."""
        try:
            text = text.partition(",")[2] if isinstance(text, str) and text[:5].lower() == "data:" else text
            return ImagePart(data=base64.b64decode("".join(text.split()), validate=True))  # it may be wrapped
        except (binascii.Error, AttributeError, ValueError):
            raise self.error("unreadable image", "has an image whose base64 text is damaged") from None

    def _video(self, value: Any) -> VideoPart:
        """Frames with their rate: {"video" or "frames": [...], "fps": number}; or a list, with the record's fps."""
        named = isinstance(value, Mapping)
        frames = (value.get("frames") or value.get("video")) if named else value
        fps = (value.get("fps") if named else None) or self.value.get("fps")
        if not isinstance(frames, list) or not frames:
            raise self.error(
                "bad format", "has a video that is not a list of images: take its frames out of the file, and give them"
            )
        if fps is None:
            raise self.error("bad format", "has a video without fps: say how many of its frames are in a second")
        with contextlib.suppress(ValueError):
            fps = float(fps) if isinstance(fps, str) else fps
        if isinstance(fps, bool) or not isinstance(fps, int | float) or not 1e-6 <= fps <= 1e6:
            raise self.error(
                "bad format",
                f"has a video with fps {short(fps)}: it must be a number, how many of its frames are in a second",
            )
        return VideoPart(tuple(self._image(frame) for frame in frames), float(fps))
