"""Chat records in their one normal form, and how the formats that people have become it."""

from __future__ import annotations

import base64
import binascii
import contextlib
import dataclasses
import json
import math
import pathlib
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from cpjax.train.data.names import (
    BYTES,
    FLAGS,
    GOOD,
    IMAGE_LIMITS,
    LEARNED,
    MEDIUM,
    PLACES,
    REASONING,
    RECORD,
    TEXT,
    TURN,
    VIDEO_LIMITS,
)  # fmt: skip
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
    """An image in a file, or in `data`: the bytes of such a file; `limits` are those of `names.IMAGE_LIMITS`."""

    path: pathlib.Path | None = None
    data: bytes | None = None
    limits: Mapping[str, float] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class VideoPart:
    """The frames of a video, `fps` of them a second; `limits` are those of `names.VIDEO_LIMITS`."""

    frames: tuple[ImagePart, ...]
    fps: float
    limits: Mapping[str, float] = dataclasses.field(default_factory=dict)


Part = TextPart | ImagePart | VideoPart


@dataclasses.dataclass(frozen=True)
class Message:
    """One turn; `role` is "system", "user" or "assistant".

    Attributes:
        reasoning: an assistant's thoughts before it.
        name: of who says it.
        learned: whether it is to be learned, if it is an assistant's.
    """

    role: str
    parts: tuple[Part, ...]
    reasoning: str | None = None
    name: str | None = None
    learned: bool = True

    @property
    def text(self) -> str:
        """All its text."""
        return "".join(part.text for part in self.parts if isinstance(part, TextPart))


@dataclasses.dataclass(frozen=True)
class Record:
    """A conversation, and where it came from: "file:line".

    Attributes:
        tools: definitions for the chat template.
        template_kwargs: further values for it.
        unused: names in the record that change nothing.
    """

    messages: tuple[Message, ...]
    source: str
    tools: Any = None
    template_kwargs: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    unused: tuple[str, ...] = ()

    def media(self) -> list[ImagePart | VideoPart]:
        """Images and videos in their order."""
        return [part for message in self.messages for part in message.parts if not isinstance(part, TextPart)]


def parse_record(value: Any, source: str, folder: pathlib.Path) -> Record:
    """The normal form of a record as its file holds it; null values count as absent.

    Known are `messages` (text, or parts of type text, image, image_url, video), `conversations` (LLaVA, ShareGPT; turns
    of `from` and `value`) and `prompt` with `completion` (texts or messages; what is in the prompt is not learned).
    Images without a value of their own, and the marks <image> and <video> in text, take theirs in order from the
    record's `image`, `images`, `video`, `videos`. Beside the turns, `system` is a first turn, and `tools` and
    `chat_template_kwargs` are for the chat template. See `names` for the rest.

    Args:
        value: the record.
        source: where it is, "file:line".
        folder: paths of images are relative to it.

    Raises:
        RecordError: it has none of these forms, lacks something, or has a name that cannot be obeyed.
    """
    if not isinstance(value, Mapping):
        raise RecordError("bad format", f"{source} holds {type(value).__name__}: a record is an object with names")
    return _Reader(value, source, folder).read()


_MARK = re.compile("(<image>|<video>)")
_ANY_MARK = re.compile("<image>|<video>|<audio>|<img>(?=.*?</img>)", re.DOTALL)
_URL = re.compile("(?!file:)[a-z][a-z0-9+.-]*://", re.IGNORECASE)


def short(value: object, limit: int = 80) -> str:
    """A value for a message, at most so long, since a text may be a whole image; of lists and objects the type."""
    text = str(value) if isinstance(value, str | pathlib.Path | int | float | None) else type(value).__name__
    return text if len(text) <= limit else f"{text[: limit - 33]}...{text[-30:]}"


_BESIDE = ("system", "tools", "chat_template_kwargs", "image", "images", "video", "videos")
"""Names that are obeyed beside the turns, whatever form these have."""
_RESERVED = ("messages", "tools", "add_generation_prompt")
"""What a chat template is given that a record may not give by `chat_template_kwargs`."""


class _Reader:
    """Reads one record; holds the media that are still to be placed, and the names that were not used."""

    def __init__(self, value: Mapping[str, Any], source: str, folder: pathlib.Path):
        self.value, self.source, self.folder = value, source, folder
        self.unused: set[str] = set()
        self.rate_used = False
        self.own = {kind: self._own(kind) for kind in ("image", "video")}
        self.given = {kind: len(media) for kind, media in self.own.items()}
        self.used = {"image": 0, "video": 0}

    def read(self) -> Record:
        value = self.value
        form = next((name for name in ("messages", "conversations") if value.get(name) is not None), None)
        if form:
            turns = self._list(value[form], form)
        elif value.get("prompt") is not None and value.get("completion") is not None:
            turns = []
        else:
            self._names(value, value, RECORD, "")
            names = short(", ".join(sorted(map(str, value))), 240)
            raise self.error(
                "bad format",
                f"has the names {names}: a record needs messages, conversations, or prompt and completion",
            )
        good = self._good(value, numbers=() if form else GOOD)
        if not self._is_learned(value, "a record", default=True) or not all(good.values()):
            raise self.error("nothing to learn", "says of itself that it is not to be learned: leave it out")
        messages = self._system()
        if form:
            messages += [self._message(turn) for turn in turns]
        else:
            asked = self._side(value["prompt"], "user")
            messages += [dataclasses.replace(turn, learned=turn.role != "assistant") for turn in asked]
            messages += self._side(value["completion"], "assistant")
        forms = (form,) if form else ("prompt", "completion")
        self._names(value, (*forms, *_BESIDE, *LEARNED, *good, *(("fps",) if self.rate_used else ())), RECORD, "")
        if sum(message.role == "system" for message in messages) > 1 and value.get("system"):
            raise self.error("bad format", "has system beside its turns and a system turn among them: give one of them")
        for kind, count in self.used.items():
            if count != self.given[kind]:
                raise self.error(
                    f"wrong {kind} count",
                    f"gives {self._gives(kind)} but has places for {count}: make them equal",
                )
        answers = [message for message in messages if message.role == "assistant"]
        if not answers:
            raise self.error("no assistant turn", "has no assistant turn: there is nothing to learn from it")
        if not any(message.learned for message in answers):
            raise self.error("nothing to learn", "has no assistant turn that is to be learned: leave it out")
        if any(not isinstance(part, TextPart) for message in answers for part in message.parts):
            raise self.error("bad format", "shows an image in an assistant turn: a model of this kind answers in text")
        return Record(tuple(messages), self.source, self._tools(), self._kwargs(), tuple(sorted(self.unused)))

    def _names(self, value: Mapping[str, Any], used: Collection[str], refused: Mapping[str, str], where: str) -> None:
        """Refuses names that cannot be obeyed, and notes others that are not used; `where` says whose they are."""
        for name, given in value.items():
            says = given not in (None, "", [], {}) and (given is not False or name in FLAGS)
            if says and name in refused:
                raise self.error("bad format", f"has {short(name)}{where}, which is not supported: {refused[name]}")
            if name not in used and name not in refused and given is not None:
                self.unused.add(f"{short(name)}{where}")

    def _is_learned(self, value: Mapping[str, Any], what: str, *, default: bool) -> bool:
        """What the names say of whether something is learned."""
        said = {name: value[name] for name in LEARNED if value.get(name) is not None}
        for name, given in said.items():
            if not isinstance(given, bool | int | float) or given not in (0, 1):
                raise self.error("bad format", f"has {name} {short(given)} in {what}: it must be 0 or 1, false or true")
        if len(weights := {bool(given) for given in said.values()}) > 1:
            raise self.error("bad format", f"has {' and '.join(said)} in {what}, which contradict each other: give one")
        return weights.pop() if weights else default

    def _good(self, value: Mapping[str, Any], numbers: Collection[str] = ()) -> dict[str, bool]:
        """What each name says of whether answers are good; of `numbers`, and of all but labels, 0 and 1 do, too."""
        said = {}
        for name in GOOD:
            given = value.get(name)
            given = given.lower() if isinstance(given, str) else given
            if isinstance(given, bool) or (given in (0, 1) and (name != "label" or name in numbers)):
                said[name] = bool(given)
            elif given in ("true", "false"):
                said[name] = given == "true"
        return said

    def _system(self) -> list[Message]:
        system = self.value.get("system")
        if system is not None and not isinstance(system, str):
            raise self.error("bad format", f"has system of type {type(system).__name__}: it must be text")
        return [Message("system", tuple(self._marked(system)))] if system else []

    def _tools(self) -> Any:
        """A list, or the same as JSON text."""
        tools = self._json("tools")
        if not isinstance(tools, list | None) or not all(isinstance(tool, Mapping) for tool in tools or []):
            raise self.error("bad format", f"has tools of type {type(tools).__name__}: give a list of definitions")
        return without_null(tools) or None

    def _kwargs(self) -> Mapping[str, Any]:
        given = self._json("chat_template_kwargs")
        if not isinstance(given, Mapping | None):
            raise self.error("bad format", f"has chat_template_kwargs of type {type(given).__name__}: give an object")
        if taken := set(_RESERVED) & set(given or {}):
            raise self.error("bad format", f"has {min(taken)} in chat_template_kwargs: give it beside them, if at all")
        return without_null(given or {})

    def _json(self, name: str) -> Any:
        value = self.value.get(name)
        try:
            return json.loads(value) if isinstance(value, str) and value else value or None
        except (ValueError, RecursionError) as error:
            raise self.error("bad format", f"has {name} that is not valid JSON ({error}): mend it") from None

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
        return [self._message(turn) for turn in self._list(value, name)]

    def _message(self, turn: Mapping[str, Any]) -> Message:
        names = ("from", "value") if turn.get("from") and not turn.get("role") else ("role", "content")
        role_name, content_name = names
        good = self._good(turn)
        self._names(turn, (*names, "name", *LEARNED, *good, *REASONING), TURN, " in a turn")
        role, content = turn.get(role_name), turn.get(content_name)
        if not isinstance(role, str) or role not in ROLES:
            raise self.error("unknown role", f"has the role {short(role)}: it must be one of {', '.join(ROLES)}")
        role, name = ROLES[role], turn.get("name") or None
        if not isinstance(name, str | None):
            raise self.error("bad format", f"has name of type {type(name).__name__} in a turn: it must be text")
        answers = role == "assistant"
        learned = self._is_learned(turn, f"a turn of the {role}", default=answers)
        if learned and not answers:
            raise self.error(
                "bad format", f"wants a turn of the {role} to be learned: only those of the assistant can be"
            )
        if isinstance(content, str):
            parts = tuple(self._marked(content))
        elif isinstance(content, list) and all(isinstance(part, Mapping) for part in content):
            parts = tuple(self._part(part) for part in content)
        else:
            raise self.error(
                "bad format", f"has {content_name} of type {type(content).__name__}: it must be text or a list of parts"
            )
        learned = (learned and all(good.values())) or not answers
        return Message(role, parts, self._reasoning(turn, role), name, learned)

    def _reasoning(self, turn: Mapping[str, Any], role: str) -> str | None:
        said = {name: turn[name] for name in REASONING if turn.get(name)}
        for name, thoughts in said.items():
            if role != "assistant" or not isinstance(thoughts, str):
                raise self.error("bad format", f"has {name} that is no text of an assistant turn: give it as such")
        if len(set(said.values())) > 1:
            raise self.error("bad format", f"has {' and '.join(said)} in a turn, which differ: give one of them")
        return next(iter(said.values()), None)

    def _marked(self, text: str) -> Iterator[Part]:
        """Text with the record's media in place of its marks; without such media, and outside LLaVA's form, text."""
        marks = _MARK if self.given["image"] or self.given["video"] or "conversations" in self.value else None
        for piece in marks.split(text) if marks else [text]:
            if marks and marks.fullmatch(piece):
                yield self._next(piece[1:-1])
            elif piece:
                yield self._text(piece)

    def _text(self, text: str) -> TextPart:
        """Notes marks of media that stay text."""
        self.unused |= {f"the mark {mark} in a text" for mark in _ANY_MARK.findall(text)}
        return TextPart(text)

    def _next(self, kind: str, part: Mapping[str, Any] | None = None) -> Part:
        """The record's next image or video, for which a part may have limits."""
        self.used[kind] += 1
        if not self.own[kind]:
            raise self.error(f"wrong {kind} count", f"gives {self._gives(kind)} but has places for more")
        medium, names = self.own[kind].pop(0), IMAGE_LIMITS if kind == "image" else VIDEO_LIMITS
        self._names(part or {}, ("type", *names), MEDIUM, f" in a part of type {kind}")
        return dataclasses.replace(medium, limits=medium.limits | self._limits(part or {}, names))

    def _part(self, part: Mapping[str, Any]) -> Part:
        kind = part.get("type")
        if kind == "text" and isinstance(part.get("text"), str):
            self._names(part, ("type", "text"), TEXT, " in a part of type text")
            return self._text(part["text"])
        if kind in ("image", "image_url"):
            given = any(part.get(name) is not None for name in BYTES + PLACES)
            return self._image(part) if given else self._next("image", part)
        if kind == "video":
            given = any(part.get(name) is not None for name in ("video", "frames"))
            return self._video(part) if given else self._next("video", part)
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
        """An image by path, bytes, base64 or data URI, itself or in an object that names it and may limit it."""
        limits: dict[str, float] = {}
        while isinstance(value, Mapping):
            name = next((name for name in BYTES + PLACES if value.get(name) is not None), None)
            kept = ("path",) if name in BYTES else ()  # the datasets library has a path beside the bytes
            plain = ("detail",) if value.get("detail") == "auto" else ()
            refused = {key: why for key, why in MEDIUM.items() if key not in plain}
            self._names(value, ("type", name or "", *IMAGE_LIMITS, *kept, *plain), refused, " in an image")
            limits |= self._limits(value, IMAGE_LIMITS)
            value = value[name] if name else None
            if name in BYTES:
                return ImagePart(data=value if isinstance(value, bytes) else self._base64(value), limits=limits)
        if not isinstance(value, str) or not value:
            raise self.error("bad format", "has an image that is neither a path, bytes, nor a base64 data URI")
        if _URL.match(value):
            raise self.error("image by URL", f"has an image at {short(value)}: download it and give its path")
        if value[:5].lower() == "data:":
            return ImagePart(data=self._base64(value), limits=limits)
        return ImagePart(path=self.folder / re.sub("^file://", "", value, flags=re.IGNORECASE), limits=limits)

    def _base64(self, text: Any) -> bytes:
        """Of an image in base64, alone or in a data URI."""
        try:
            text = text.partition(",")[2] if isinstance(text, str) and text[:5].lower() == "data:" else text
            return base64.b64decode("".join(text.split()), validate=True)  # it may be wrapped
        except (binascii.Error, AttributeError, ValueError):
            raise self.error("unreadable image", "has an image whose base64 text is damaged") from None

    def _video(self, value: Any) -> VideoPart:
        """Frames with their rate: {"video" or "frames": [...], "fps": number}; or a list, with the record's fps."""
        named: Mapping[str, Any] = value if isinstance(value, Mapping) else {}
        name = next((name for name in ("frames", "video") if named.get(name)), "frames")
        frames = named.get(name) if isinstance(value, Mapping) else value
        rate = next((name for name in ("fps", "sample_fps") if named.get(name)), None)
        fps = named[rate] if rate else self.value.get("fps")
        self.rate_used |= rate is None
        self._names(named, ("type", name, rate or "", *VIDEO_LIMITS), MEDIUM, " in a video")
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
        shown = tuple(self._image(frame) for frame in frames)
        if any(frame.limits for frame in shown):
            raise self.error("bad format", "has limits in a frame of a video: give them in the video")
        return VideoPart(shown, float(fps), self._limits(named, VIDEO_LIMITS))

    def _limits(self, value: Mapping[str, Any], names: Sequence[str]) -> dict[str, float]:
        """What an image or a video says of how it is to be shown."""
        limits = {name: value[name] for name in names if value.get(name) is not None}
        for name, given in limits.items():
            least = 0 if name == "video_start" else 1e-6
            if not isinstance(given, int | float) or isinstance(given, bool) or not least <= given < math.inf:
                raise self.error("bad format", f"has {name} {short(given)}: it must be a number above 0")
        return limits


def without_null(value: Any) -> Any:
    """The value without the null entries of its objects, with which tables fill them up."""
    if isinstance(value, Mapping):
        return {name: without_null(inner) for name, inner in value.items() if inner is not None}
    return [without_null(inner) for inner in value] if isinstance(value, list) else value
