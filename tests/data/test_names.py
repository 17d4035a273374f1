"""Every name that public formats of records use is obeyed, or refused by name; others are reported once, counted."""

import dataclasses
import json
import re

import numpy as np
import pytest

from cpjax.shard import IGNORE
from cpjax.train.data import Dataset, Encoder, ImagePart, RecordError, RecordsConfig, names
from cpjax.train.data.records import parse_record
from tests.data.common import THINKING, chat, make_folder, png, write_jsonl
from tests.models.test_gemma4_processing import PROCESSOR


def read(record, folder=None):
    return parse_record(record, "a.jsonl:1", folder)


def told(turn, **more):
    """A conversation of two answers, in which one of the four turns says more."""
    record = chat("what?", "BAD", "and?", "good")
    record["messages"][turn] |= more
    return record


@pytest.fixture(scope="module")
def encoder(tmp_path_factory):
    return Encoder.from_folder(make_folder(tmp_path_factory.mktemp("model") / "a", THINKING))


def learned(encoder, record):
    labels = np.asarray(encoder.row(record).labels)
    return encoder.tokenizer.decode(labels[labels != IGNORE].tolist(), skip_special_tokens=False)


BOTH, GOOD = "BAD<|im_end|>\n</think>\n\ngood<|im_end|>", "\n</think>\n\ngood<|im_end|>"


@pytest.mark.parametrize("name", names.LEARNED)
def test_a_turn_says_whether_it_is_learned(encoder, name):
    for no in (0, 0.0, False):
        assert learned(encoder, read(told(1, **{name: no}))) == GOOD
    for yes in (1, 1.0, True, None):
        assert learned(encoder, read(told(1, **{name: yes}))) == BOTH
    assert learned(encoder, read(told(0, **{name: 0}))) == BOTH  # a question is not learned anyway
    shared = {"from": "human", "value": "what?"}, {"from": "gpt", "value": "BAD", name: False}
    assert not read({"conversations": [*shared, shared[0], {"from": "gpt", "value": "x"}]}).messages[1].learned
    assert learned(encoder, read(told(1) | {name: 1})) == BOTH


@pytest.mark.parametrize(
    ("record", "message"),
    [
        (told(1, weight=0.5), "has weight 0.5 in a turn of the assistant: it must be 0 or 1, false or true"),
        (told(1, loss_scale="ignore_empty_think"), "has loss_scale ignore_empty_think in a turn"),
        (told(1, loss_mask=[1, 0]), "has loss_mask list in a turn"),
        (told(1, weight=1, train=False), "has weight and train in a turn of the assistant, which contradict"),
        (told(0, weight=1), "wants a turn of the user to be learned: only those of the assistant can be"),
        (told(2, train=True), "wants a turn of the user to be learned"),
        (told(1) | {"weight": 2}, "has weight 2 in a record: it must be 0 or 1"),
        (told(1) | {"weight": 0}, "says of itself that it is not to be learned: leave it out"),
        (told(1) | {"label": False}, "says of itself that it is not to be learned: leave it out"),
        (chat("hi", "x") | {"messages": [*chat("hi")["messages"], {"role": "assistant", "content": "x", "weight": 0}]},
         "has no assistant turn that is to be learned"),
        (told(1, reasoning="a", thinking="b"), "has reasoning and thinking in a turn, which differ: give one"),
        (told(0, reasoning="a"), "has reasoning that is no text of an assistant turn"),
        (told(1, reasoning_content=["a"]), "has reasoning_content that is no text of an assistant turn"),
        (told(0, name=3), "has name of type int in a turn: it must be text"),
        (told(1) | {"system": ["x"]}, "has system of type list: it must be text"),
        ({"messages": [{"role": "system", "content": "x"}, *told(1)["messages"]], "system": "y"}, "has system beside"),
        (told(1) | {"tools": {"name": "f"}}, "has tools of type dict: give a list of definitions"),
        (told(1) | {"tools": "["}, "has tools that is not valid JSON"),
        (told(1) | {"chat_template_kwargs": [1]}, "has chat_template_kwargs of type list: give an object"),
        (told(1) | {"chat_template_kwargs": {"messages": []}}, "has messages in chat_template_kwargs"),
        ({"prompt": "hi", "chosen": "a", "rejected": "b"}, "has chosen, which is not supported: "),
    ],
)  # fmt: skip
def test_values_that_cannot_be_obeyed_are_refused(record, message):
    with pytest.raises(RecordError, match="a.jsonl:1 " + re.escape(message)):
        read(record)


@pytest.mark.parametrize("name", names.GOOD)
def test_bad_answers_are_not_learned(encoder, name):
    """In every way to write no; a label that is a number, or another text, is a class for others."""
    for no in (False, "false", "False", *((0, 0.0) if name != "label" else ())):
        with pytest.raises(RecordError, match="says of itself that it is not to be learned"):
            read(told(1) | {name: no})
        assert learned(encoder, read(told(1, **{name: no}))) == GOOD
    with pytest.raises(RecordError, match="says of itself that it is not to be learned"):
        read({"prompt": "q", "completion": "a", name: 0})
    for yes in (True, "true", 1):
        assert learned(encoder, read(told(1, **{name: yes}) | {name: yes})) == BOTH
        assert read({"prompt": "q", "completion": "a", name: yes}).unused == ()
    for other in ("greeting", 7, *((0,) if name == "label" else ())):
        record = read(told(1, **{name: other}) | {name: other})
        assert learned(encoder, record) == BOTH and record.unused == (name, f"{name} in a turn")


@pytest.mark.parametrize("mark", ["<image>", "<video>", "<audio>", "<img>"])
def test_marks_that_stay_text_are_reported(mark):
    text = "see <img>a.png</img>" if mark == "<img>" else f"see {mark}"
    for content in (text, [{"type": "text", "text": text}]):
        record = read(chat(content, "yes"))
        assert record.messages[0].text == text and record.unused == (f"the mark {mark} in a text",)
    assert read(chat("an <img> of HTML", "yes")).unused == ()


@pytest.mark.parametrize(
    ("level", "name"),
    [(level, name) for level in ("RECORD", "TURN", "TEXT", "MEDIUM") for name in getattr(names, level)],
)
def test_every_refused_name_is_refused_by_name_where_it_says_something(level, name, tmp_path):
    def record(value):
        part = {"type": "text", "text": "hi"} if level == "TEXT" else {"type": "image", "image": "a.png"}
        if level in ("TEXT", "MEDIUM"):
            return chat([part | {name: value}], "yes")
        return chat("hi", "yes") | {name: value} if level == "RECORD" else told(1, **{name: value})

    with pytest.raises(RecordError, match=rf"a\.jsonl:1 has {name}.* not supported: ") as error:
        read(record("x"), tmp_path)
    assert error.value.reason == "bad format"
    for nothing in (None, "", [], {}):  # what tables fill up with
        assert read(record(nothing), tmp_path).unused == ()


def test_values_beside_the_turns_are_handed_to_the_template(encoder):
    tools = [{"type": "function", "function": {"name": "f", "strict": None}}]
    for given in (tools, json.dumps(tools)):
        record = read(chat("what?", "a cat", system="Be brief.", tools=given))
        assert [message.role for message in record.messages] == ["system", "user", "assistant"]
        text = encoder.template.render(record)
        assert "<|im_start|>system\nBe brief.<|im_end|>" in text
        assert '[{"type": "function", "function": {"name": "f"}}]' in text
    told_not_to = chat("what?", "a cat", chat_template_kwargs={"enable_thinking": False, "other": None})
    assert learned(encoder, read(told_not_to)) == "a cat<|im_end|>"
    named = read({"messages": [{"role": "user", "content": "hi", "name": "Ann"}, *chat("", "yes")["messages"][1:]]})
    assert "<|im_start|>user Ann\nhi" in encoder.template.render(named)


@pytest.mark.parametrize("name", names.REASONING)
def test_thoughts_are_learned_by_whichever_name_they_come(encoder, name):
    record = read(told(3, **{name: "so"}))
    assert learned(encoder, record) == "BAD<|im_end|>so\n</think>\n\ngood<|im_end|>"


def test_answers_in_a_prompt_are_not_learned(encoder):
    """Only the completion is, as in TRL."""
    record = {"prompt": chat("what?", "BAD", "and?")["messages"], "completion": "good"}
    assert learned(encoder, read(record)) == GOOD


def test_limits_of_media_are_read_where_they_are_given(tmp_path):
    limits = {"max_pixels": 640, "min_pixels": 64}
    for part, more in (
        ({"type": "image", "image": "a.png", **limits}, {}),
        ({"type": "image", "image": {"path": "a.png", **limits}}, {}),
        ({"type": "image_url", "image_url": {"url": "a.png", "detail": "auto"}, **limits}, {}),
        ({"type": "image", **limits}, {"images": ["a.png"]}),
        ({"type": "image"}, {"images": [{"path": "a.png", "bytes": None, **limits}]}),
    ):
        record = read(chat([part], "ok", **more), tmp_path)
        assert record.media() == [ImagePart(tmp_path / "a.png", limits=limits)] and not record.unused
    video = {"type": "video", "video": ["a.png"] * 8, "sample_fps": 2, "nframes": 4, "video_start": 0, "video_end": 3.5}
    [part] = read(chat([video], "ok"), tmp_path).media()
    assert part.fps == 2 and part.limits == {"nframes": 4, "video_start": 0, "video_end": 3.5}
    for bad in ({"max_pixels": 0}, {"max_pixels": "9"}, {"resized_height": True}, {"min_pixels": float("nan")}):
        with pytest.raises(RecordError, match=f"has {next(iter(bad))} .*: it must be a number above 0"):
            read(chat([{"type": "image", "image": "a.png", **bad}], "ok"), tmp_path)
    with pytest.raises(RecordError, match="has limits in a frame of a video: give them in the video"):
        read(chat([video | {"video": [{"path": "a.png", **limits}]}], "ok"), tmp_path)


def test_limits_of_media_change_what_is_seen(tmp_path):
    encoder = Encoder.from_folder(make_folder(tmp_path / "model"))
    (tmp_path / "a.png").write_bytes(png(64, 64))
    image = {"type": "image", "image": "a.png"}
    sizes = [
        encoder.size(read(chat([image | limits], "ok"), tmp_path))[1]
        for limits in ({}, {"max_pixels": 1024}, {"resized_height": 16, "resized_width": 32})
    ]
    assert sizes == [256, 64, 32]  # patches of 4 x 4
    video = {"type": "video", "video": ["a.png"] * 16, "fps": 8}
    row = encoder.row(read(chat([video | {"nframes": 6, "video_start": 1, "max_pixels": 256}], "ok"), tmp_path))
    assert [medium.grid for medium in row.media] == [(3, 4, 4)]
    with pytest.raises(
        RecordError, match="jsonl:1: resized_height 16 and resized_width None were given: both"
    ) as error:
        encoder.size(read(chat([image | {"resized_height": 16}], "ok"), tmp_path))
    assert error.value.reason == "unfit image"


def test_a_limit_that_a_family_cannot_obey_is_refused(encoder, tmp_path):
    (tmp_path / "a.png").write_bytes(png())
    other = dataclasses.replace(encoder, processor=PROCESSOR)
    record = read(chat([{"type": "image", "image": "a.png", "max_pixels": 640}], "ok"), tmp_path)
    with pytest.raises(
        RecordError, match="has max_pixels in an image or a video, for which the processor of this model"
    ):
        other._plans(record)


def test_other_names_are_reported_once_with_count_and_first_place(encoder, tmp_path):
    turn = {"role": "user", "content": [{"type": "text", "text": "hi", "note": 1}], "time": 3}
    records = [
        chat("hi", "yes", id=1),
        {"messages": [turn, turn, {"role": "assistant", "content": "yes"}], "id": 2, "source": "x", "text": None},
        {"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "yes", "role": ""}], "id": 3},
        chat("what?", "<think>x</think>yes", "and?", "no", prompt="what?"),
    ]
    file = write_jsonl(tmp_path / "a.jsonl", records)
    dataset = Dataset.open(RecordsConfig(files=[str(file)], tokens=192, patches=0), encoder)
    assert sorted(dataset.notices.lines()) == sorted(
        [
            f"id is not used: 3 records, first {file}:1",
            f"source is not used: 1 record, first {file}:2",
            f"time in a turn is not used: 1 record, first {file}:2",
            f"note in a part of type text is not used: 1 record, first {file}:2",
            f"role in a turn is not used: 1 record, first {file}:3",
            f"prompt is not used: 1 record, first {file}:4",
            f"the chat template drops a part of an answer, which is not learned: 1 record, first {file}:4",
        ]
    )
    assert dataset.notices.lines()[0].startswith("id ")
