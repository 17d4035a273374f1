"""The chat template of a Hugging Face folder: from messages to text, and which of that text the assistant says."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
import jinja2.ext
import numpy as np
from jinja2.sandbox import ImmutableSandboxedEnvironment

from cpjax.models.common.checkpoint import read_json
from cpjax.train.data.records import Message, Record, RecordError, TextPart, VideoPart

_PROBE = "\ue000answer\ue001"
"""A text that no template holds: private-use characters at its ends."""


class ChatTemplate:
    """A chat template that is known to end assistant turns with a special token.

    Attributes:
        stop: what follows an assistant's text up to and including that token, "<|im_end|>" for instance.
    """

    def __init__(self, source: str, variables: Mapping[str, Any], special: Sequence[str]):
        """Compiles the template, and finds out how it ends a turn.

        Args:
            source: Jinja, as in chat_template.jinja.
            variables: what it may read beside the messages, bos_token for instance.
            special: the texts of the tokenizer's special tokens.

        Raises:
            ValueError: it is not Jinja, or it does not show which text is the assistant's and where it stops.
        """
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
        )
        # No strftime_now: with the day in it, a resumed run would see other tokens than the first one.
        environment.globals["raise_exception"] = _raise
        environment.filters["tojson"] = _to_json
        self._variables = dict(variables)
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise ValueError(f"the chat template is not valid Jinja ({error}): copy or download it again") from None
        self._takes_text = self._shows(as_text=True) or not self._shows(as_text=False)
        self.stop = self._find_stop(special)

    @classmethod
    def from_folder(cls, folder: pathlib.Path, special: Sequence[str]) -> ChatTemplate:
        """The template in chat_template.jinja, chat_template.json or tokenizer_config.json.

        Raises:
            ValueError: there is none, or see the constructor.
        """
        config = read_json(folder / "tokenizer_config.json")
        variables = {
            name: token["content"] if isinstance(token, dict) else token
            for name, token in config.items()
            if name.endswith("_token") and isinstance(token, str | dict)
        }
        source = config.get("chat_template")
        if (folder / "chat_template.jinja").is_file():
            source = (folder / "chat_template.jinja").read_text()
        elif (folder / "chat_template.json").is_file():
            source = read_json(folder / "chat_template.json").get("chat_template")
        if isinstance(source, list):
            source = {entry["name"]: entry["template"] for entry in source}.get("default")
        if not isinstance(source, str):
            raise ValueError(
                f"{folder} has no chat template: put one into chat_template.jinja, or train from an instruct checkpoint"
            )
        return cls(source, variables, [*special, *([variables["eos_token"]] if "eos_token" in variables else [])])

    def render(self, record: Record) -> str:
        """The text of a record.

        Raises:
            RecordError: the template refuses it, or its text is not valid Unicode.
        """
        try:
            text = self._render(record.messages)
            text.encode()
        except jinja2.TemplateError as error:
            raise RecordError(
                "refused by the template", f"{record.source} is refused by the chat template ({error}): mend its turns"
            ) from None
        except UnicodeEncodeError:
            raise RecordError("bad text", f"{record.source} has text that is not valid Unicode: mend it") from None
        return text

    def spans(self, record: Record, text: str) -> list[tuple[int, int]]:
        """Where each assistant turn, with its stop token, is in the text of the record: (start, end).

        The text is compared with that of the record with another answer in the turn: what differs is the answer.

        Raises:
            RecordError: the template does something to the answer that leaves it unclear where it is.
        """
        out = []
        for number, message in enumerate(record.messages):
            if message.role != "assistant":
                continue
            unused = (chr(n) for n in range(0xE000, 0xF900) if chr(n) not in message.text)  # its ends must differ
            probe = Message("assistant", (TextPart(f"{next(unused)}answer{next(unused)}"),))
            other = self._render([*record.messages[:number], probe, *record.messages[number + 1 :]])
            start, end = _difference(text, other)
            # Of an answer with its thinking, a template may show the end alone, and put spaces otherwise.
            said, wanted = ("".join(part.split()) for part in (text[start:end], message.text))
            if not wanted.endswith(said) or not (said or not wanted) or not text.startswith(self.stop, end):
                raise RecordError(
                    "unclear answer",
                    f"{record.source} has an answer in turn {number + 1} that the chat template changes beyond "
                    "recognition: remove markup of other templates from it",
                )
            out.append((start, end + len(self.stop)))
        return out

    def _render(self, messages: Sequence[Message]) -> str:
        turns = [{"role": message.role, "content": self._content(message)} for message in messages]
        given = {"messages": turns, "tools": None, "documents": None, "add_generation_prompt": False}
        try:
            return self._template.render(**self._variables, **given)
        except Exception as error:  # of Python too, where a template does to a value what it cannot
            raise jinja2.TemplateError(" ".join(str(error).split())) from None

    def _content(self, message: Message) -> str | list[dict[str, str]]:
        if self._takes_text and all(isinstance(part, TextPart) for part in message.parts):
            return message.text
        return [
            {"type": "text", "text": part.text}
            if isinstance(part, TextPart)
            else {"type": "video" if isinstance(part, VideoPart) else "image"}
            for part in message.parts
        ]

    def _shows(self, as_text: bool) -> bool:
        """Whether a question and an answer appear, given as texts or else as lists of parts."""
        self._takes_text = as_text
        try:
            shown = self._render([Message(role, (TextPart(_PROBE),)) for role in ("user", "assistant")])
        except jinja2.TemplateError:
            return False
        return shown.count(_PROBE) > 1

    def _find_stop(self, special: Sequence[str]) -> str:
        turns = [Message("user", (TextPart("question"),)), Message("assistant", (TextPart(_PROBE),))]
        try:
            pieces = self._render(turns * 2).split(_PROBE)
        except jinja2.TemplateError as error:
            raise ValueError(f"the chat template refuses a question and an answer ({error}): give another") from None
        if len(pieces) != 3:
            raise ValueError(
                f"the chat template shows two answers {len(pieces) - 1} times: which text is the assistant's cannot be "
                "told, so give a template that shows each once, as it is"
            )
        found = [(at, -len(token), token) for token in special if token and (at := pieces[2].find(token)) >= 0]
        stop = pieces[2][: min(found)[0] + len(min(found)[2])] if found else ""
        if not found or pieces[2][: min(found)[0]].strip() or not pieces[1].startswith(stop):
            raise ValueError(
                "the chat template does not end every assistant turn with a special token: a model could not learn "
                "when to stop, so add eos_token after the answer"
            )
        return stop


def _difference(text: str, other: str) -> tuple[int, int]:
    """The part of `text` between what begins both and what ends both; `other` has its part between unique marks."""
    a, b = (np.frombuffer(t.encode("utf-32-le"), np.uint32) for t in (text, other))
    size = min(len(a), len(b))
    start, tail = (
        int(np.argmin(np.append(x == y, False))) for x, y in ((a[:size], b[:size]), (a[::-1][:size], b[::-1][:size]))
    )
    return start, max(start, len(a) - tail)


class _Generation(jinja2.ext.Extension):
    """`{% generation %}` blocks, with which some templates mark answers; their content is shown as it is."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Any) -> Any:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)


def _to_json(value: Any, **options: Any) -> str:
    return json.dumps(value, **{"ensure_ascii": False} | options)
