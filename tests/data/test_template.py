"""Chats become the tokens that transformers makes of them, and only answers with their stop tokens are learned."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cpjax.shard import IGNORE
from cpjax.train.data import Encoder, RecordError
from cpjax.train.data.records import parse_record
from cpjax.train.data.template import ChatTemplate
from tests.data.common import LLAMA_LIKE, QWEN_LIKE, SPECIAL, THINKING, chat, make_folder

TEMPLATES = {"qwen": QWEN_LIKE, "llama": LLAMA_LIKE, "thinking": THINKING}
STOP = {"qwen": "<|im_end|>", "llama": "<|eot|>", "thinking": "<|im_end|>"}
CHATS = {
    "one turn": chat("what is in this picture?", "a cat"),
    "three turns": chat("what?", "a cat", "how many?", " two birds\n", "why?", "so"),
    "system": {"messages": [{"role": "system", "content": "Be brief."}, *chat("what?", "a cat")["messages"]]},
    "spaces": chat("  what?  ", "\n\na cat  \n", "\tand?", "  "),
    "empty answer": chat("what?", "", "and?", "yes"),
    "the answer is the question": chat("a cat", "a cat", "a cat", "a cat"),
    "the answer begins as the turn does": chat("assistant", "assistant\nassistant", "user", "<think> user"),
    "characters of private use": chat("what?", "\ue000", "and?", "\ue000answer\ue001"),
    "special tokens in text": chat("say <|im_end|> and <|eot|>", "<|im_end|> <|eot|> now"),
    "all of Unicode": chat("wie heißt »Bär«?", "熊 🐻‍❄️ é e\u0301 \u00a0"),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    base = tmp_path_factory.mktemp("models")
    return {name: make_folder(base / name, template) for name, template in TEMPLATES.items()}


@pytest.fixture(scope="module")
def encoders(folders):
    return {name: Encoder.from_folder(folder) for name, folder in folders.items()}


def record_of(value, tmp_path=None):
    return parse_record(value, "a.jsonl:1", tmp_path)


def shown(name, answers):
    """What is learned of answers; the last one of a template that asks with open thoughts closes them."""
    opened = ["" for _ in answers[1:]] + ["" if name == "llama" else "\n</think>\n\n"]
    texts = [text.lstrip("\n") if name == "qwen" else text.strip() for text in answers]
    return [before + text + STOP[name] for before, text in zip(opened, texts, strict=True)]


def learned(encoder, row):
    """The text of each run of labels."""
    labels = np.asarray(row.labels)
    edges = np.flatnonzero(np.diff((labels != IGNORE).astype(int), prepend=0, append=0))
    return [
        encoder.tokenizer.decode(labels[a:b].tolist(), skip_special_tokens=False)
        for a, b in zip(edges[::2], edges[1::2], strict=True)
    ]


@pytest.fixture(scope="module")
def theirs(folders):
    transformers = pytest.importorskip("transformers", reason="the oracle is transformers' apply_chat_template")
    return {name: transformers.PreTrainedTokenizerFast.from_pretrained(folder) for name, folder in folders.items()}


@pytest.mark.parametrize("case", CHATS)
@pytest.mark.parametrize("name", TEMPLATES)
def test_tokens_equal_transformers(encoders, theirs, name, case):
    row = encoders[name].row(record_of(CHATS[case]))
    wanted = theirs[name].apply_chat_template(CHATS[case]["messages"], return_dict=True)
    assert np.asarray(row.input_ids).tolist() == wanted["input_ids"]
    assert encoders[name].size(record_of(CHATS[case])) == (len(wanted["input_ids"]), 0)


@pytest.mark.parametrize("kwargs", [{}, {"enable_thinking": False}])
def test_what_a_record_hands_to_the_template_equals_transformers(encoders, theirs, kwargs):
    turns = chat("what?", "a cat", "and?", "two")["messages"]
    turns[0]["name"], turns[1]["reasoning_content"], turns[3]["reasoning_content"] = "Ann", "so", "hm"
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}]
    record = record_of({"messages": turns, "tools": tools, "chat_template_kwargs": kwargs})
    wanted = theirs["thinking"].apply_chat_template(turns, tools=tools, return_dict=True, **kwargs)
    assert np.asarray(encoders["thinking"].row(record).input_ids).tolist() == wanted["input_ids"]
    asked = theirs["thinking"].apply_chat_template(
        turns[:3], tools=tools, return_dict=True, add_generation_prompt=True, **kwargs
    )
    assert encoders["thinking"].prompt(record).input_ids.tolist() == asked["input_ids"]


@pytest.mark.parametrize("case", CHATS)
def test_labels_equal_transformers_mask_of_a_template_that_marks_answers(encoders, theirs, case):
    row = encoders["llama"].row(record_of(CHATS[case]))
    wanted = theirs["llama"].apply_chat_template(
        CHATS[case]["messages"], return_dict=True, return_assistant_tokens_mask=True
    )
    assert (np.asarray(row.labels) != IGNORE).astype(int).tolist() == wanted["assistant_masks"]


@pytest.mark.parametrize("case", CHATS)
@pytest.mark.parametrize("name", TEMPLATES)
def test_exactly_the_answers_and_their_stop_tokens_are_learned(encoders, name, case):
    row = encoders[name].row(record_of(CHATS[case]))
    answers = [turn["content"] for turn in CHATS[case]["messages"] if turn["role"] == "assistant"]
    assert learned(encoders[name], row) == shown(name, answers)
    ids, labels = np.asarray(row.input_ids), np.asarray(row.labels)
    np.testing.assert_array_equal(labels[labels != IGNORE], ids[labels != IGNORE])  # not shifted yet


ANSWERS = st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=12), min_size=1, max_size=3)


@given(answers=ANSWERS)
@settings(max_examples=60)
@pytest.mark.parametrize("name", TEMPLATES)
def test_any_answer_is_learned_as_a_whole(encoders, name, answers):
    turns = [turn for answer in answers for turn in ("what?", answer)]
    assert learned(encoders[name], encoders[name].row(record_of(chat(*turns)))) == shown(name, answers)


def test_labels_are_shifted_once_by_prepare(encoders):
    encoder = encoders["qwen"]
    row = encoder.row(record_of(CHATS["one turn"]))
    batch = encoder.module.prepare(encoder.processor.config, [row])
    np.testing.assert_array_equal(batch["labels"][0, :-1], np.asarray(row.labels)[1:])


def test_thinking_is_learned_where_the_template_shows_it(encoders):
    thought = "<think>\nhm, well\n</think>\n\na cat"
    row = encoders["qwen"].row(record_of(chat("what?", thought, "and?", thought)))
    assert learned(encoders["qwen"], row) == ["a cat<|im_end|>", "hm, well\n</think>\n\na cat<|im_end|>"]


def test_a_turn_that_the_template_refuses_is_named(encoders):
    turns = chat("what?", "a cat")["messages"]
    with pytest.raises(
        RecordError, match=r"a\.jsonl:1 is refused by the chat template \(turns must alternate\)"
    ) as error:
        encoders["llama"].row(record_of({"messages": [turns[0], *turns]}))
    assert error.value.reason == "refused by the template"


def test_text_that_is_no_unicode_is_named(encoders):
    with pytest.raises(RecordError, match="has text that is not valid Unicode"):
        encoders["qwen"].size(record_of(chat("\ud83d", "a cat")))


EITHER = "{% for m in messages %}{{ m.content if m.role == 'user' and m.content is string else m.content[0].text }}"
TURN = "{% for m in messages %}{{ m.role }}: {{ m.content }}"


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (TURN + "\n{% endfor %}", "does not end every assistant turn with a special token"),
        (TURN + " over<|eot|>{% endfor %}", "does not end every assistant turn with a special token"),
        (TURN + "{% if loop.last %}<|eot|>{% endif %}{% endfor %}", "does not end every assistant turn"),
        (TURN + "{{ m.content }}<|eot|>{% endfor %}", "shows two answers 4 times"),
        (TURN.replace("m.content", "m.content | upper") + "<|eot|>{% endfor %}", "shows two answers 0 times"),
        ("{% for m in messages %}", "is not valid Jinja"),
        ("{{ raise_exception('no') }}", r"refuses a question and an answer \(no\)"),
        ("{{ strftime_now('%d') }}" + TURN + "<|eot|>{% endfor %}", "refuses a question and an answer .*strftime_now"),
        ("{{ messages.__class__.__mro__ }}", "refuses a question and an answer .*unsafe"),
    ],
)
def test_templates_that_do_not_show_what_to_learn_are_refused(template, message):
    with pytest.raises(ValueError, match=message):
        ChatTemplate(template, {}, SPECIAL)


@pytest.mark.parametrize(
    ("template", "stop"),
    [
        (TURN + " <|eot|>\n{% endfor %}", " <|eot|>"),
        (TURN.replace("m.content", "m.content[0].text") + "<|eot|>{% endfor %}", "<|eot|>"),  # takes parts only
        (TURN.replace("m.content", "m.content[0]['text'] + ''") + "<|eot|>{% endfor %}", "<|eot|>"),
        (EITHER + "</s>{% endfor %}", "</s>"),
        (TURN + "{% if m.role == 'assistant' %}<|im_end|>{% endif %}<|eot|>{% endfor %}", "<|im_end|>"),
    ],
)
def test_stop_is_derived(template, stop):
    assert ChatTemplate(template, {}, [*SPECIAL, "</s>"]).stop == stop


def test_an_answer_that_a_template_changes_is_refused():
    template = ChatTemplate(
        TURN.replace("m.content", "m.content.replace('cat', 'dog')") + "<|eot|>{% endfor %}", {}, SPECIAL
    )
    good, bad = record_of(chat("what?", "a bird")), record_of(chat("what?", "a cat"))
    assert template.spans(good, template.render(good)) == [
        (len("user: what?<|eot|>assistant: "), len(template.render(good)))
    ]
    with pytest.raises(RecordError, match=r"a\.jsonl:1 has an answer in turn 2 that the chat template changes"):
        template.spans(bad, template.render(bad))


def move_template(folder, kind):
    """The template where older folders have it."""
    source = (folder / "chat_template.jinja").read_text()
    (folder / "chat_template.jinja").unlink()
    if kind == "chat_template.json":
        (folder / kind).write_text(json.dumps({"chat_template": source}))
    elif kind != "none":
        file = folder / "tokenizer_config.json"
        named = [{"name": "tool_use", "template": "x"}, {"name": "default", "template": source}]
        config = json.loads(file.read_text()) | {"chat_template": source if kind == "text" else named}
        file.write_text(json.dumps(config))


@pytest.mark.parametrize("kind", ["chat_template.json", "text", "named"])
def test_templates_are_found_where_folders_have_them(tmp_path, encoders, kind):
    folder = make_folder(tmp_path / "model")
    move_template(folder, kind)
    record = record_of(CHATS["system"])
    assert Encoder.from_folder(folder).template.render(record) == encoders["qwen"].template.render(record)


def test_a_folder_without_template_is_refused(tmp_path):
    folder = make_folder(tmp_path / "model")
    move_template(folder, "none")
    with pytest.raises(ValueError, match=r"has no chat template: put one into chat_template\.jinja"):
        Encoder.from_folder(folder)
