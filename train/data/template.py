"""The chat template of a Hugging Face folder: from messages to text, and which of that text the assistant says."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import pathlib
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jinja2
import jinja2.ext
import numpy as np
from jinja2.sandbox import ImmutableSandboxedEnvironment

from cpjax.models.common.checkpoint import read_json
from cpjax.train.data.records import REASONING, Message, Part, Record, RecordError, TextPart, VideoPart

_PROBE = "\ue000answer\ue001"
"""A text that no template holds: private-use characters at its ends."""

Say = Callable[[str], None]
"""Is told something that the user should know of a record, in words that are the same for all such records."""

_Place = tuple[int, bool]
"""A text of a record: the number of its turn, and whether it is that turn's thoughts."""


def ignore(notice: str) -> None:
    """Does nothing with it."""


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
        self._opens = self._has_prompt()

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
            text = self._render(record)
            text.encode()
        except jinja2.TemplateError as error:
            raise RecordError(
                "refused by the template", f"{record.source} is refused by the chat template ({error}): mend its turns"
            ) from None
        except UnicodeEncodeError:
            raise RecordError("bad text", f"{record.source} has text that is not valid Unicode: mend it") from None
        return text

    def prompt(self, record: Record) -> str:
        """The text with which the last turn of a record, an assistant's, is asked for: that of a generation prompt.

        Where the template has none, the record's own text up to that answer.

        Raises:
            RecordError: see `render` and `spans`.
        """
        if self._opens and len(record.messages) > 1:
            with contextlib.suppress(jinja2.TemplateError):
                return self._render(_until(record, len(record.messages) - 1), opened=True)
        text = self.render(record)
        return text[: self.spans(record, text)[-1][0]]

    def spans(self, record: Record, text: str, say: Say = ignore) -> list[tuple[int, int]]:
        """Which text each learned answer is, with its stop token: (start, end) in the text of the record.

        An answer begins where the text leaves the prompt that asks for it (`add_generation_prompt`), so that what a
        model is trained to write is all that it has to: with its thoughts, or with the end of empty ones. Where the
        text never is such a prompt (a template that shows the thoughts of the last answer alone), it begins with what
        both share, and at the latest with the answer's own text.

        Time is linear in the number of turns. All answers are found by one rendering with marks around their texts,
        which without the marks must be the text itself; where it is not, each by itself, by what differs if another
        answer is in its place. Prompts of answers after turns of one kind are compared at the 1st, 2nd, 3rd, 5th, 9th
        ... and the last, and each is made where these differ.

        Args:
            say: is told what of an answer is not learned, and why.

        Raises:
            RecordError: the template does something to an answer that leaves it unclear where it is.
        """
        return _Answers(self, record, text).spans(say)

    def report(self, record: Record, text: str, say: Say) -> None:
        """Tells `say` which values beside the turns' texts the template does not use."""
        last = max(number for number, message in enumerate(record.messages) if message.role == "assistant")
        asked = _until(record, last)
        without = {
            "tools": dataclasses.replace(record, tools=None),
            "chat_template_kwargs": dataclasses.replace(record, template_kwargs={}),
            "a turn's name": dataclasses.replace(
                record, messages=tuple(dataclasses.replace(message, name=None) for message in record.messages)
            ),
        }
        for name, other in without.items():
            with contextlib.suppress(jinja2.TemplateError):
                if (
                    other != record
                    and self._render(other) == text
                    and self._render(_until(other, last), opened=True) == self._render(asked, opened=True)
                ):
                    say(f"the chat template does not use {name}")

    def _render(self, record: Record, marks: _Marks | None = None, *, opened: bool = False) -> str:
        """The text of a record, of which marks may be around some texts; with a prompt for an answer at its end."""
        turns = []
        for number, message in enumerate(record.messages):
            turn: dict[str, Any] = {"role": message.role}
            turn["content"] = self._content(marks.around(message, number) if marks else message)
            if message.name is not None:
                turn["name"] = message.name
            if message.reasoning is not None:
                thoughts = marks.around_thoughts(message.reasoning, number) if marks else message.reasoning
                turn |= dict.fromkeys(REASONING, thoughts)  # which of them it reads is the template's choice
            turns.append(turn)
        given = {"messages": turns, "tools": record.tools, "documents": None, "add_generation_prompt": opened}
        try:
            return self._template.render(**self._variables | given | dict(record.template_kwargs))
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
            shown = self._render(_chat(_PROBE, _PROBE))
        except jinja2.TemplateError:
            return False
        return shown.count(_PROBE) > 1

    def _has_prompt(self) -> bool:
        """Whether the template says how an answer is asked for."""
        question = _until(_chat("question", "answer"), 1)
        try:
            return self._render(question, opened=True) != self._render(question)
        except jinja2.TemplateError:
            return False

    def _find_stop(self, special: Sequence[str]) -> str:
        try:
            pieces = self._render(_chat("question", _PROBE, "question", _PROBE)).split(_PROBE)
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


class _Answers:
    """Finds the answers of one record in its text."""

    def __init__(self, template: ChatTemplate, record: Record, text: str):
        self.template, self.record, self.text = template, record, text
        self.learned = [
            number for number, message in enumerate(record.messages) if message.role == "assistant" and message.learned
        ]
        texts = [text, *(f"{message.text}{message.reasoning}" for message in record.messages)]
        unused = (chr(code) for code in range(0xE000, 0xF900) if not any(chr(code) in text for text in texts))
        self.signs = (next(unused), next(unused), next(unused))
        self.closings: dict[str, int] = {}
        self.found = self._locate({place: None for number in self.learned for place in self._places(number)})
        self.prompts = self._prompts()
        self._locate_remains()

    def spans(self, say: Say) -> list[tuple[int, int]]:
        """See `ChatTemplate.spans`."""
        out = []
        for number in self.learned:
            message, anchor, prompt = self.record.messages[number], self._anchor(number), self.prompts[number]
            start, end = self._answer(number)
            begin = self._begin(number, min(start, self._found(number, thoughts=True)[0] or start), end)
            out.append((begin, self._stop(number, end)))
            shown = squeeze(self.text[begin if anchor is None else anchor : end])
            if squeeze(message.text) not in shown:
                say("the chat template drops a part of an answer, which is not learned")
            if message.reasoning is not None and squeeze(message.reasoning) not in shown:
                say("the chat template drops the reasoning of an answer, which is not learned")
            is_last = number == len(self.record.messages) - 1
            if is_last and prompt is not None and self._asked(number) is None:
                words = repr(prompt[self._closing(number, prompt) :])
                say(f"the chat template asks for an answer with {words}, but does not show it before the last answer")
        return out

    def _found(self, number: int, *, thoughts: bool = False) -> tuple[int | None, int | None]:
        """(start, end) of a turn's text or thoughts, None where that was not found."""
        return self.found.get((number, thoughts), (None, None))

    def _places(self, number: int) -> list[_Place]:
        """What must be found for an answer: the end of the turn before it, its text, and its thoughts."""
        thoughts = [(number, True)] if self.record.messages[number].reasoning is not None else []
        return [(before, False) for before in (number - 1, number) if before >= 0] + thoughts

    def _anchor(self, number: int) -> int | None:
        """Where the text of the turn before ends."""
        return self._found(number - 1)[1] if number else 0

    def _asked(self, number: int) -> int | None:
        """Where the prompt of an answer ends in the text; None if the text does not have that prompt before it."""
        prompt, anchor = self.prompts[number], self._anchor(number) or 0
        return anchor + len(prompt) if prompt is not None and self.text.startswith(prompt, anchor) else None

    def _locate(self, cuts: Mapping[_Place, int | None]) -> dict[_Place, tuple[int | None, int | None]]:
        """(start, end) of texts: of all by one rendering, or where marks change what is shown, of halves of them.

        A mark that is not shown is None, and so is one that is shown twice.

        Args:
            cuts: which texts; how much of each is before its first mark, None: its blanks.
        """
        marks = _Marks(self.signs, cuts)
        with contextlib.suppress(jinja2.TemplateError):
            shown, found = marks.remove(self.template._render(self.record, marks))
            if shown == self.text:
                return found
        pairs = list(cuts.items())
        halves = (pairs[: len(pairs) // 2], pairs[len(pairs) // 2 :]) if len(pairs) > 1 else ()
        return {place: pair for half in halves for place, pair in self._locate(dict(half)).items()}

    def _locate_remains(self) -> None:
        """The starts of answers of which the template shows the end alone, what comes after their thoughts.

        And where no prompt says where an answer begins, those of answers with blanks before them.
        """
        starts: dict[_Place, int] = {}
        cuts: dict[_Place, int | None] = {}
        for number in self.learned:
            message, asked, (start, end) = self.record.messages[number], self._asked(number), self._found(number)
            if end is None or len(message.parts) != 1:
                continue
            if start is not None:
                blanks = len(message.text) - len(message.text.lstrip())
                if blanks and self.prompts[number] is None and self.text.endswith(message.text[:blanks], 0, start):
                    starts[number, False], cuts[number, False] = start - blanks, 0
            elif asked is not None and self._ends_with(number, asked, end):
                self.found[number, False] = (asked, end)
            else:
                starts[number, False], cuts[number, False] = _common_end(self.text, end, message.text)
        for place, pair in (self._locate(cuts) if cuts else {}).items():
            if pair == (starts[place], self.found[place][1]):
                self.found[place] = pair

    def _ends_with(self, number: int, start: int, end: int) -> bool:
        """Whether an answer ends with that text, blanks aside; an answer that is not empty, with some."""
        said, wanted = squeeze(self.text[start:end]), squeeze(self.record.messages[number].text)
        return wanted.endswith(said) and bool(said or not wanted)

    def _answer(self, number: int) -> tuple[int, int]:
        """(start, end) of an answer's text; of one with its thoughts, a template may show the end alone."""
        start, end = self._found(number)
        if start is None or end is None:
            turns = [*self.record.messages]
            probe = (TextPart(f"{self.signs[0]}answer{self.signs[1]}"),)
            turns[number] = dataclasses.replace(turns[number], parts=probe)
            try:
                other = self.template._render(dataclasses.replace(self.record, messages=tuple(turns)))
            except jinja2.TemplateError:
                raise self._unclear(number) from None
            start, end = _difference(self.text, other)
        if not self._ends_with(number, start, end):
            raise self._unclear(number)
        return start, end

    def _stop(self, number: int, end: int) -> int:
        """Where the stop token ends that comes after an answer and blanks."""
        while not self.text.startswith(self.template.stop, end):
            if not self.text[end : end + 1].isspace():
                raise self._unclear(number)
            end += 1
        return end + len(self.template.stop)

    def _unclear(self, number: int) -> RecordError:
        return RecordError(
            "unclear answer",
            f"{self.record.source} has an answer in turn {number + 1} that the chat template changes beyond "
            "recognition: remove markup of other templates from it",
        )

    def _prompts(self) -> dict[int, str | None]:
        """What asks for each answer, from the end of the text before it; see `_prompt`."""
        if not self.template._opens:
            return dict.fromkeys(self.learned)
        kinds: dict[Any, list[int]] = {}
        for number in self.learned:
            before = self.record.messages[number - 1] if number else None
            kind = number if self._anchor(number) is None else before and _ending(before)
            kinds.setdefault(kind, []).append(number)
        out: dict[int, str | None] = {}
        for numbers in kinds.values():
            some = {numbers[0], numbers[-1], *(numbers[1 << i] for i in range((len(numbers) - 1).bit_length()))}
            made = {number: self._prompt(number) for number in sorted(some)}
            same = len({*made.values()}) == 1
            out |= {n: made[numbers[0]] if same else made[n] if n in made else self._prompt(n) for n in numbers}
        return out

    def _prompt(self, number: int, *, opened: bool = True) -> str | None:
        """The text of the turns before an answer with a prompt for it, from where their last text ends, if found.

        None: the template refuses those turns, or does not say where that text ends.
        """
        before, anchor = _until(self.record, number), self._anchor(number)
        try:
            prompt = self.template._render(before, opened=opened)
            if prompt.startswith(self.text[: anchor or 0]):
                return prompt[anchor or 0 :]
            # Earlier turns are shown otherwise without the later ones, thoughts for instance.
            marks = _Marks(self.signs, {(number - 1, False): None})
            shown, found = marks.remove(self.template._render(before, marks, opened=opened))
        except jinja2.TemplateError:
            return None
        end = found.get((number - 1, False), (None, None))[1]
        return prompt[end:] if shown == prompt and end is not None else None

    def _begin(self, number: int, first: int, end: int) -> int:
        """Where an answer begins of which `first` to `end` are thoughts and text."""
        prompt, anchor, asked = self.prompts[number], self._anchor(number), self._asked(number)
        if asked is not None:
            return min(asked, end)
        if prompt is None or anchor is None:
            return first
        shared, _ = _difference(prompt, self.text[anchor : anchor + len(prompt)])
        return min(anchor + shared, first) if shared >= self._closing(number, prompt) else first

    def _closing(self, number: int, prompt: str) -> int:
        """How much of what asks for an answer belongs to the turn before it; all of it where that is not known."""
        if prompt not in self.closings:
            closing = self._prompt(number, opened=False)
            self.closings[prompt] = len(prompt if closing is None or not prompt.startswith(closing) else closing)
        return self.closings[prompt]


class _Marks:
    """Puts marks around texts of a record, and finds them in its rendering.

    They stand within the blanks at the ends of a text, as templates strip these. A mark is the number of its place
    between two of three signs, characters that occur nowhere else.
    """

    def __init__(self, signs: tuple[str, str, str], cuts: Mapping[_Place, int | None]):
        """Args:
        cuts: which texts; how much of each is before its first mark, None: its blanks.
        """
        self.cuts, (self.start, self.end, self.last) = cuts, signs

    def around(self, message: Message, number: int) -> Message:
        """The turn with marks around its text."""
        if (number, False) not in self.cuts:
            return message
        parts: list[Part] = [*message.parts]
        texts = {at: part.text for at, part in enumerate(parts) if isinstance(part, TextPart)}
        if not texts:
            texts, parts = {len(parts): ""}, [*parts, TextPart("")]
        first, last = min(texts), max(texts)
        for at in {first, last}:
            parts[at] = TextPart(self._mark(texts[at], (number, False), start=at == first, end=at == last))
        return dataclasses.replace(message, parts=tuple(parts))

    def around_thoughts(self, text: str, number: int) -> str:
        """A turn's thoughts with marks around them."""
        return self._mark(text, (number, True)) if (number, True) in self.cuts else text

    def remove(self, shown: str) -> tuple[str, dict[_Place, tuple[int | None, int | None]]]:
        """A rendering without marks, and where they were: (start, end) of each text, None for a mark not there once."""
        found: dict[tuple[str, _Place], list[int]] = {}
        pieces, at, size = [], 0, 0
        for mark in re.finditer(f"([{self.start}{self.end}])([0-9]+){self.last}", shown):
            pieces.append(shown[at : mark.start()])
            at, size = mark.end(), size + mark.start() - at
            number, thoughts = divmod(int(mark[2]), 2)
            found.setdefault((mark[1], (number, bool(thoughts))), []).append(size)
        once = {key: places[0] for key, places in found.items() if len(places) == 1}
        return "".join([*pieces, shown[at:]]), {
            place: (once.get((self.start, place)), once.get((self.end, place))) for place in self.cuts
        }

    def _mark(self, text: str, place: _Place, *, start: bool = True, end: bool = True) -> str:
        cut = self.cuts[place]
        first = len(text) - len(text.lstrip()) if cut is None else cut
        last = max(first, len(text.rstrip()))
        name = f"{2 * place[0] + place[1]}{self.last}"
        marks = (f"{self.start}{name}" if start else "", f"{self.end}{name}" if end else "")
        return f"{text[:first]}{marks[0]}{text[first:last]}{marks[1]}{text[last:]}"


def squeeze(text: str) -> str:
    """Without blanks, which templates change."""
    return "".join(text.split())


def _chat(*texts: str) -> Record:
    """A record of a question, an answer, a question ..."""
    roles = ("user", "assistant")
    return Record(tuple(Message(roles[number % 2], (TextPart(text),)) for number, text in enumerate(texts)), "")


def _until(record: Record, number: int) -> Record:
    """Its turns before this one."""
    return dataclasses.replace(record, messages=record.messages[:number])


def _ending(message: Message) -> tuple[Any, ...]:
    """What decides how a template ends a turn, and what it puts behind its last text."""
    behind: list[Any] = []
    for part in message.parts:
        behind = [part.text[len(part.text.rstrip()) :]] if isinstance(part, TextPart) else [*behind, type(part)]
    return message.role, message.name, *behind


def _common_end(text: str, end: int, content: str) -> tuple[int, int]:
    """Where the longest end of `content` begins that `text` has before `end`, in text and content, blanks aside."""
    at, cut = end, len(content.rstrip())
    i, j = at, cut
    while True:
        while i and text[i - 1].isspace():
            i -= 1
        while j and content[j - 1].isspace():
            j -= 1
        if not i or not j or text[i - 1] != content[j - 1]:
            return at, cut
        at, cut = i, j = i - 1, j - 1


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
