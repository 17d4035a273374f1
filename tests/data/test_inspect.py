"""`python -m cpjax.train.data inspect` shows what a record becomes, and says in one sentence what is wrong."""

import io
import sys

import pytest
from rich.console import Console

from cpjax.train.data.__main__ import main
from cpjax.train.data.inspect import inspect
from tests.data.common import chat, make_folder, png, write_jsonl


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("data")
    (path / "a.png").write_bytes(png())
    image = {"type": "image", "image": "a.png"}
    video = {"type": "video", "video": ["a.png"] * 5, "fps": 2}
    write_jsonl(path / "a.jsonl", [chat("hi"), chat([image, video], "a cat", "and?", "two birds")])
    make_folder(path / "model")
    return path


def test_a_record_is_shown(folder):
    out = io.StringIO()
    inspect(folder / "a.jsonl", folder / "model", 2, Console(file=out, width=200, soft_wrap=True))
    text = out.getvalue()
    assert "a.jsonl:2, record 2 of 2" in text and "192 patches in 2 images and videos" in text
    assert "<|image_pad|> x 12 <|vision_end|><0.2 seconds><|vision_start|><|video_pad|> x 12" in text
    lines = [line.split("│")[1:-1] for line in text.splitlines() if "│" in line]
    rows = [[cell.strip() for cell in line] for line in lines]
    assert [row[1:4] for row in rows[:2]] == [["image", "(1, 6, 8)", "12"], ["video", "(3, 6, 8)", "36"]]
    assert [row[3] for row in rows[2:]] == ["a cat<|im_end|>", "", "</think>", "", "two birds<|im_end|>"]
    assert "positions: time 0 to " in text


def test_what_is_not_used_or_not_learned_is_said(folder):
    out = io.StringIO()
    write_jsonl(folder / "b.jsonl", [chat("hi", "<think>hm</think>yes", "and?", "no", id=3)])
    inspect(folder / "b.jsonl", folder / "model", 1, Console(file=out, width=200, soft_wrap=True))
    notes = [line for line in out.getvalue().splitlines() if line.startswith("note: ")]
    assert notes == [
        "note: id is not used",
        "note: the chat template drops a part of an answer, which is not learned",
    ]
    (folder / "b.jsonl").unlink()


def test_learned_tokens_have_a_colour_of_their_own(folder):
    out = io.StringIO()
    inspect(folder / "a.jsonl", folder / "model", 2, Console(file=out, force_terminal=True, color_system="standard"))
    green = [piece for piece in out.getvalue().split("\x1b[0m") if "\x1b[1;32m" in piece or "42m" in piece]
    learned = "".join(piece.rsplit("m", 1)[-1] if "m" in piece else piece for piece in green)
    assert "<|im_end|>" in "".join(green) and "pad" not in learned


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["a.jsonl"], r"error: \S*a\.jsonl:1 has no assistant turn"),
        (["a.jsonl", "--record", "3"], "error: --record is 3: .* has records 1 to 2"),
        (["b.jsonl"], r"error: \S*b\.jsonl does not exist"),
        (["a.jsonl", "--model", "nowhere"], "error: .*nowhere has no config.json"),
    ],
)
def test_errors_are_one_sentence(folder, monkeypatch, capsys, arguments, message):
    import re

    options = [] if "--model" in arguments else ["--model", "model"]
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "argv", ["data", "inspect", *arguments, *options])
    from cpjax.train.errors import run_command

    assert run_command(main) == 2
    said = capsys.readouterr().err
    assert re.search(message, said) and said.count("\n") == 1
