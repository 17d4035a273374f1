"""Where answers begin and end in the text of any chat template, in time that is linear in the number of turns."""

import dataclasses
import json
import re
import types

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer

from cpjax.shard import IGNORE
from cpjax.train.data import Encoder, RecordError, TextPart
from cpjax.train.data.records import parse_record
from cpjax.train.data.template import ChatTemplate
from cpjax.train.records_task import last_answer
from tests.data.common import LLAMA_LIKE, PLAIN, QWEN_LIKE, SPECIAL, STRIPPING, THINKING, chat, make_folder

SOURCES = {"qwen": QWEN_LIKE, "llama": LLAMA_LIKE, "thinking": THINKING, "stripping": STRIPPING, "plain": PLAIN}
TEMPLATES = {
    name: ChatTemplate(source, {"bos_token": "<|begin|>"}, [*SPECIAL, "<|over|>"]) for name, source in SOURCES.items()
}


def record_of(*turns, reasoning=None, **more):
    record = chat(*turns, **more)
    for number, thoughts in (reasoning or {}).items():
        record["messages"][number]["reasoning_content"] = thoughts
    return parse_record(record, "a.jsonl:1", None)


def learned(template, record, say=lambda notice: None):
    text = template.render(record)
    return [text[start:end] for start, end in template.spans(record, text, say)]


ANSWERS = {
    # The prompt opens thoughts, which the model is to close; earlier answers are shown without any.
    "thinking": ["a cat<|im_end|>", "\n</think>\n\n<b>yes<|im_end|>"],
    "qwen": ["a cat<|im_end|>", "\n</think>\n\n<b>yes<|im_end|>"],
    # An answer that goes on as the prompt does ("<") is learned from its start.
    "stripping": ["a cat<|eot|>", "<b>yes<|eot|>"],
    "llama": ["a cat<|eot|>", "<b>yes<|eot|>"],
    "plain": ["a cat<|eot|>", "<b>yes<|eot|>"],
}


@pytest.mark.quick
@pytest.mark.parametrize("name", SOURCES)
def test_answers_begin_where_the_text_leaves_the_prompt(name):
    assert learned(TEMPLATES[name], record_of("what?", "a cat", "and?", "<b>yes")) == ANSWERS[name]


def test_thoughts_are_learned_where_the_template_shows_them():
    turns, thoughts = ("what?", "a cat", "and?", "yes"), {1: "hm", 3: "well,\nwell"}
    found = {name: learned(template, record_of(*turns, reasoning=thoughts)) for name, template in TEMPLATES.items()}
    assert found["thinking"] == ["a cat<|im_end|>", "well,\nwell\n</think>\n\nyes<|im_end|>"]
    assert found["stripping"] == ["a cat<|eot|>", "yes<|eot|>"]
    assert found["plain"] == ["hm) a cat<|eot|>", "well,\nwell) yes<|eot|>"]
    record = record_of(*turns, reasoning=thoughts, chat_template_kwargs={"enable_thinking": True})
    assert learned(TEMPLATES["stripping"], record) == [
        "<think>hm</think>a cat<|eot|>",
        "<think>well,\nwell</think>yes<|eot|>",
    ]


def test_what_asks_for_an_answer_follows_the_records_own_values():
    off = {"chat_template_kwargs": {"enable_thinking": False}}
    plain, told = record_of("what?", "a cat"), record_of("what?", "a cat", **off)
    assert learned(TEMPLATES["thinking"], plain) == ["\n</think>\n\na cat<|im_end|>"]
    assert learned(TEMPLATES["thinking"], told) == ["a cat<|im_end|>"]
    assert TEMPLATES["thinking"].prompt(plain).endswith("<|im_start|>assistant\n<think>\n")
    assert TEMPLATES["thinking"].prompt(told).endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")
    assert TEMPLATES["plain"].prompt(plain) == "user: what?<|eot|>\nassistant: "  # of a template without a prompt


DROPPED = {
    "a part of an answer": (
        "thinking",
        {},
        "<think>hm</think>a cat",
        "drops a part of an answer, which is not learned",
    ),
    "thoughts in text": ("stripping", {}, "<think>hm</think>a cat", "drops a part of an answer, which is not learned"),
    "reasoning": ("llama", {1: "hm"}, "a cat", "drops the reasoning of an answer, which is not learned"),
    "reasoning when told not to think": ("stripping", {1: "hm"}, "a cat", "drops the reasoning of an answer"),
    "the prompt": (
        "stripping",
        {},
        "a cat",
        r"asks for an answer with '<\|header\|>model\\n<think></think>', but does",
    ),
}


@pytest.mark.parametrize("case", DROPPED)
def test_what_is_not_learned_is_said(case):
    name, reasoning, answer, words = DROPPED[case]
    said = []
    learned(TEMPLATES[name], record_of("what?", answer, "and?", "yes", reasoning=reasoning), said.append)
    assert any(re.search(words, notice) for notice in said)


@pytest.mark.parametrize("name", ["qwen", "llama", "thinking", "plain"])
def test_nothing_is_said_of_plain_answers(name):
    said = []
    for turns in (("what?", " a\n\ncat "), ("what?", "a cat", "and?", "")):
        record = record_of(*turns)
        learned(TEMPLATES[name], record, said.append) if name != "plain" or all(turns) else None
        TEMPLATES[name].report(record, TEMPLATES[name].render(record), said.append)
    assert said == []


def test_values_that_the_template_does_not_use_are_said():
    record = parse_record(
        {
            "messages": [
                {"role": "user", "content": "what?", "name": "Ann"},
                {"role": "assistant", "content": "a cat"},
            ],
            "tools": [{"type": "function", "function": {"name": "f"}}],
            "chat_template_kwargs": {"enable_thinking": False},
        },
        "a.jsonl:1",
        None,
    )
    said = {}
    for name in ("thinking", "llama"):
        said[name] = []
        TEMPLATES[name].report(record, TEMPLATES[name].render(record), said[name].append)
    wanted = ["tools", "chat_template_kwargs", "a turn's name"]
    assert said == {"thinking": [], "llama": [f"the chat template does not use {name}" for name in wanted]}
    text = TEMPLATES["thinking"].render(record)
    assert '"function": {"name": "f"}' in text and "<|im_start|>user Ann\n" in text


def common(a, b):
    return next((n for n, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def slow_spans(template, record, text):
    """By the definition: from renderings of the turns before each answer, and of records with another in its place.

    None: what is shown of an answer is not its end.
    """
    out = []
    for number, message in enumerate(record.messages):
        if message.role != "assistant" or not message.learned:
            continue

        def differs(**change):
            """The part of the text that is another where this is."""
            turns = [*record.messages]
            turns[number] = dataclasses.replace(message, **change)  # noqa: B023
            other = template._render(dataclasses.replace(record, messages=tuple(turns)))
            start, tail = common(text, other), common(text[::-1], other[::-1])
            return start, max(start, len(text) - tail)

        first, end = differs(parts=(TextPart("\uf123\uf124"),))
        said, wanted = ("".join(part.split()) for part in (text[first:end], message.text))
        if not said or not wanted.endswith(said):
            return None
        if message.reasoning and differs(reasoning="\uf123\uf124") != (len(text), len(text)):
            first = min(first, differs(reasoning="\uf123\uf124")[0])
        before = dataclasses.replace(record, messages=record.messages[:number])
        begin, prompt, closed = first, template._render(before, opened=True), template._render(before)
        if prompt != closed:
            assert text.startswith(closed) and prompt.startswith(closed)
            shared = common(text[len(closed) :], prompt[len(closed) :])
            begin = len(prompt) if text.startswith(prompt) else min(len(closed) + shared, first)
        out.append((min(begin, end), text.index(template.stop, end) + len(template.stop)))
    return out


PIECES = ["a cat", "two\n\nbirds", "<", "<b>", " ", "\n", "assistant", "\n\n", "user", "\ue000", "é 熊", "(", "<th"]
TEXT = st.lists(st.sampled_from(PIECES), min_size=1, max_size=5).map("".join)
THOUGHTS = st.sampled_from(["<think>\nhm, {}\n</think>\n\n", "<think>{}</think>", "<think>\n\n</think>\n\n", ""])


@st.composite
def records(draw):
    turns = [{"role": "system", "content": draw(TEXT)}] if draw(st.booleans()) else []
    for number in range(draw(st.integers(1, 5))):
        answer = {"role": "assistant", "content": draw(THOUGHTS).format(number) + draw(TEXT) + "."}
        if draw(st.booleans()):
            answer["reasoning"] = f"so {number}: {draw(TEXT)}!"
        if draw(st.integers(0, 3)) == 0:
            answer["weight"] = 0
        turns += [{"role": "user", "content": draw(TEXT) + "?"}, answer]
    turns[-1].pop("weight", None)
    kwargs = draw(st.sampled_from([{}, {"enable_thinking": True}, {"enable_thinking": False}]))
    tools = draw(st.sampled_from([None, [{"name": "f"}]]))
    return parse_record({"messages": turns, "chat_template_kwargs": kwargs, "tools": tools}, "a.jsonl:1", None)


@given(record=records())
@settings(max_examples=60, deadline=None)
@pytest.mark.parametrize("name", SOURCES)
def test_answers_are_where_the_slow_method_finds_them(name, record):
    template = TEMPLATES[name]
    text = template.render(record)
    try:
        found = template.spans(record, text)
    except RecordError as error:
        assert error.reason == "unclear answer"
        found = None
    assert found == slow_spans(template, record, text)


def long_chat(name, count):
    """With thoughts in every answer: in its text, and where the template shows such, beside it."""
    answers = [f"<think>\nhm, {number}\n</think>\n\nanswer {number}" for number in range(count)]
    turns = [turn for number in range(count) for turn in (f"question {number}?", answers[number])]
    return record_of(*turns, reasoning={2 * n + 1: f"so, {n}" for n in range(count)} if name == "plain" else None)


@pytest.mark.parametrize("name", SOURCES)
def test_the_work_is_linear_in_the_number_of_turns(name, monkeypatch):
    """Characters that are rendered, as a multiple of the record's own."""
    template, rendered = TEMPLATES[name], []
    render = template._template.render
    monkeypatch.setattr(template, "_template", types.SimpleNamespace(render=lambda *a, **b: kept(render(*a, **b))))

    def kept(text):
        rendered.append(len(text))
        return text

    multiples = []
    for count in (40, 160):
        record = long_chat(name, count)
        text = template.render(record)
        rendered.clear()
        assert len(template.spans(record, text)) == count
        multiples.append(sum(rendered) / len(text))
    assert max(multiples) < 8 and multiples[1] < 1.1 * multiples[0]


def test_a_prompt_that_is_not_the_same_after_every_turn(monkeypatch):
    """The one that differs is where none is looked at first, then where one is."""
    source = (
        "{% for m in messages %}{{ m.role }}: {{ m.content }}<|eot|>{% endfor %}"
        "{% if add_generation_prompt %}assistant: {{ 'x' if messages[-1].content == 'odd' else '' }}{% endif %}"
    )
    template = ChatTemplate(source, {}, SPECIAL)
    for odd in range(9):
        turns = [turn for n in range(9) for turn in ("odd" if n == odd else "even", f"x{n}")]
        wanted = [f"x{n}<|eot|>" for n in range(9)]
        if odd in (0, 1, 2, 4, 8):
            wanted[odd] = wanted[odd][1:]
        assert learned(template, record_of(*turns)) == wanted


@pytest.fixture(scope="module")
def joining(tmp_path_factory):
    """An encoder whose tokenizer has a token for two ends of lines, as that of Qwen."""
    folder = make_folder(tmp_path_factory.mktemp("model") / "a", THINKING)
    file = folder / "tokenizer.json"
    tokenizer = Tokenizer.from_file(str(file))
    tokenizer.add_tokens([AddedToken("\n\n", normalized=False)])
    size = tokenizer.get_vocab_size()
    tokenizer.save(str(file))
    config = json.loads((folder / "config.json").read_text())
    config["text_config"]["vocab_size"] = size
    (folder / "config.json").write_text(json.dumps(config))
    return Encoder.from_folder(folder)


@pytest.mark.parametrize("turns", [("what?", "a cat"), ("what?", "a cat", "and?", "two\n\nbirds")])
def test_training_goes_on_from_the_very_tokens_that_ask(joining, turns):
    """No token is on both sides: "\\n\\n" after "<think>" would never teach what comes after "<think>" and "\\n"."""
    record = record_of(*turns)
    text, question, row = joining.template.render(record), last_answer(joining, record), joining.row(record)
    ids, labels = np.asarray(row.input_ids), np.asarray(row.labels)
    start = int(np.flatnonzero((labels != IGNORE) & ~np.append(False, labels[:-1] != IGNORE))[-1])
    assert ids[:start].tolist() == np.asarray(question.prompt.input_ids).tolist()
    assert ids[:start].tolist() == joining.tokenizer.encode(joining.template.prompt(record)).ids
    assert joining.tokenizer.decode(ids.tolist(), skip_special_tokens=False) == text
    assert joining.tokenizer.decode(labels[start:][labels[start:] != IGNORE].tolist()) == question.answer
    assert question.answer == "\n</think>\n\n" + turns[-1]
    assert joining.size(record) == (len(ids), 0)
    whole = joining.tokenizer.encode(text).ids
    assert len(ids) == len(whole) + 1  # it is split there alone


def test_the_last_learned_answer_is_asked(joining):
    record = chat("what?", "a cat", "and?", "bad")
    record["messages"][3]["weight"] = 0
    question = last_answer(joining, parse_record(record, "a.jsonl:1", None))
    assert question.answer == "\n</think>\n\na cat" and question.prompt.labels is None
