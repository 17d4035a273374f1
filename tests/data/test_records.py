"""Records of every format come to one normal form; broken ones are named with file and line."""

import base64
import json
import sys
import textwrap

import pytest

from cpjax.train.data import ImagePart, Message, RecordError, TextPart, VideoPart
from cpjax.train.data.files import Records, open_records
from tests.data.common import chat, png, write_jsonl

IMAGE = png()
RAW = base64.b64encode(IMAGE).decode()
URI = "data:image/png;base64," + RAW


def texts(*turns):
    roles = ("user", "assistant")
    return tuple(Message(roles[n % 2], (TextPart(turn),)) for n, turn in enumerate(turns))


def read(tmp_path, record):
    return open_records(write_jsonl(tmp_path / "a.jsonl", [record]))[0]


@pytest.mark.quick
@pytest.mark.parametrize(
    "record",
    [
        chat("hi", "yes"),
        chat([{"type": "text", "text": "hi", "image": None}], [{"type": "text", "text": "yes"}], images=None),
        {"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "yes"}], "id": 7},
        {"conversations": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]},
        {"prompt": "hi", "completion": "yes"},
        {"prompt": chat("hi")["messages"], "completion": [{"role": "assistant", "content": "yes"}]},
    ],
)
def test_text_in_every_format(tmp_path, record):
    read_back = read(tmp_path, record)
    assert read_back.messages == texts("hi", "yes") and read_back.source == f"{tmp_path / 'a.jsonl'}:1"


@pytest.mark.parametrize(
    ("part", "more"),
    [
        ({"type": "image", "image": "in/a.png"}, {}),
        ({"type": "image", "path": "in/a.png"}, {}),
        ({"type": "image_url", "image_url": {"url": "file://in/a.png"}}, {}),
        ({"type": "image", "image": {"path": "in/a.png", "bytes": None}}, {}),
        ({"type": "image"}, {"images": ["in/a.png"]}),
        ({"type": "image"}, {"image": "in/a.png"}),
    ],
)
def test_images_by_path_are_relative_to_the_file(tmp_path, part, more):
    record = read(tmp_path, chat([part, {"type": "text", "text": "what?"}], "a cat", **more))
    assert record.messages[0].parts == (ImagePart(path=tmp_path / "in/a.png"), TextPart("what?"))
    assert record.media() == [ImagePart(path=tmp_path / "in/a.png")]


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image", "image": URI},
        {"type": "image_url", "image_url": {"url": URI}},
        {"type": "image", "url": URI},
        {"type": "image", "base64": RAW},
        {"type": "image", "base64": URI},
        {"type": "image", "image": {"base64": RAW, "path": None}},
        {"type": "image", "base64": "\n".join(textwrap.wrap(RAW, 7)) + "\n"},
        {"type": "image", "image": "data:image/png;base64,\r\n" + "\r\n ".join(textwrap.wrap(RAW, 7))},
    ],
)
def test_images_in_the_record(tmp_path, part):
    assert read(tmp_path, chat([part], "a cat")).media() == [ImagePart(data=IMAGE)]


@pytest.mark.parametrize("value", ["a.png", ["a.png"]])
def test_marks_in_text_take_the_records_images_in_order(tmp_path, value):
    a = ImagePart(path=tmp_path / "a.png")
    name = "images" if isinstance(value, list) else "image"
    llava = {"conversations": [{"from": "human", "value": "see <image>\nnow"}, {"from": "gpt", "value": "<b>"}]}
    wanted = (TextPart("see "), a, TextPart("\nnow"))
    for record in (llava, chat("see <image>\nnow", "<b>"), {"prompt": "see <image>\nnow", "completion": "<b>"}):
        assert read(tmp_path, record | {name: value}).messages == (Message("user", wanted), *texts("", "<b>")[1:])
    two = read(tmp_path, chat("<image><image>", "ok", images=["a.png", "b.png"]))
    assert two.media() == [a, ImagePart(path=tmp_path / "b.png")]


def test_a_mark_is_text_where_there_are_no_images(tmp_path):
    assert read(tmp_path, chat("write <image> in HTML", "<img>")).messages == texts("write <image> in HTML", "<img>")


def test_videos_are_lists_of_frames(tmp_path):
    wanted = VideoPart((ImagePart(path=tmp_path / "a.png"), ImagePart(path=tmp_path / "b.png")), 2.0)
    frames = ["a.png", "b.png"]
    for record in (
        chat([{"type": "video", "video": frames, "fps": 2}], "ok"),
        chat([{"type": "video"}], "ok", videos=[{"frames": frames, "fps": 2}]),
        chat("<video>", "ok", videos=[frames], fps=2.0),
        chat("<video>", "ok", videos=[frames], fps="2.0"),
    ):
        assert read(tmp_path, record).media() == [wanted]


BROKEN = {
    "no record": ([], "bad format", "holds list: a record is an object"),
    "no format": ({"text": "hi"}, "bad format", "has the names text: a record needs messages, conversations, or"),
    "no turns": ({"messages": []}, "bad format", "needs a list of turns in messages"),
    "unknown role": (
        {"messages": [{"role": "tool", "content": "4"}]}, "unknown role", "the role tool: it must be one of system",
    ),
    "no content": ({"messages": [{"role": "user"}]}, "bad format", "has content of type NoneType"),
    "tools": (
        {"messages": [{"role": "assistant", "content": "", "tool_calls": [{"id": 1}]}]}, "bad format", "has tool_calls",
    ),
    "unknown part": (chat([{"type": "audio", "audio": "a.wav"}], "ok"), "bad format", "a part of type audio: "),
    "no answer": (chat("hi"), "no assistant turn", "has no assistant turn"),
    "URL": (chat([{"type": "image", "image": "https://x.org/a.png"}], "ok"), "image by URL", "an image at https://x.org"),
    "URL in capitals": (chat("<image>", "ok", image="HTTPS://x.org/a.png"), "image by URL", "an image at HTTPS://x.org"),
    "URL of a store": (chat("<image>", "ok", images=["s3://x/a.png"]), "image by URL", "an image at s3://x/a.png: "),
    "base64": (chat([{"type": "image", "image": "data:image/png;base64,@"}], "ok"), "unreadable image", "damaged"),
    "no image": (chat([{"type": "image"}], "ok"), "wrong image count", "gives 0 images but has places for more"),
    "two images": (
        chat("<image>", "ok", images=["a.png", "b.png"]), "wrong image count", "gives 2 images but has places for 1",
    ),
    "mark without image": (
        {"conversations": [{"from": "human", "value": "<image>"}, {"from": "gpt", "value": "ok"}]},
        "wrong image count", "gives 0 images but",
    ),
    "two marks for one image": (
        chat("<image><image>", "ok", image="a.png"), "wrong image count", "gives 1 image but has places for more",
    ),
    "both names": (chat("<image>", "ok", image="a.png", images=["a.png"]), "bad format", "both image and images"),
    "number": (chat([{"type": "image", "image": 3}], "ok"), "bad format", "neither a path, bytes, nor a base64"),
    "shown by the model": (
        chat("draw", [{"type": "image", "image": "a.png"}]), "bad format", "an image in an assistant turn",
    ),
    "video file": (chat([{"type": "video", "video": "a.mp4", "fps": 2}], "ok"), "bad format", "not a list of images"),
    "no fps": (chat([{"type": "video", "video": ["a.png"]}], "ok"), "bad format", "a video without fps"),
    "no number": (chat("<video>", "ok", videos=[["a.png"]], fps=float("nan")), "bad format", "a video with fps nan: "),
    "endless fps": (chat("<video>", "ok", videos=[["a.png"]], fps=float("inf")), "bad format", "with fps inf: it must"),
    "text for fps": (chat("<video>", "ok", videos=[["a.png"]], fps="two"), "bad format", "fps two: it must be a num"),
    "yes for fps": (chat("<video>", "ok", videos=[["a.png"]], fps=True), "bad format", "fps True: it must be a num"),
    "long role": ({"messages": [{"role": RAW * 9, "content": ""}]}, "unknown role", r"iVBOR\S+\.\.\.\S{30}:"),
}  # fmt: skip


@pytest.mark.parametrize("case", BROKEN)
def test_broken_records_are_named(tmp_path, case):
    record, reason, message = BROKEN[case]
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps(chat("hi", "yes")) + "\n\n" + json.dumps(record) + "\n")
    with pytest.raises(RecordError, match=message) as error:
        open_records(path)[1]
    assert error.value.reason == reason and str(error.value).startswith(f"{path}:3 ")


@pytest.mark.parametrize("text", ['{"messages": [', '{"messages":' + 200_000 * "["], ids=["cut", "deep"])
def test_bad_json_is_named(tmp_path, text):
    path = tmp_path / "a.jsonl"
    path.write_text(text + "\n")
    with pytest.raises(RecordError, match=r"a\.jsonl:1 is not valid JSON .*: mend the line") as error:
        open_records(path)[0]
    assert error.value.reason == "bad JSON"


def test_a_json_list(tmp_path):
    path = tmp_path / "a.json"
    path.write_text(json.dumps([chat("hi", "yes"), chat("hi")]))
    records = open_records(path)
    assert len(records) == 2 and records[0].messages == texts("hi", "yes") and records[0].source == f"{path}:record 1"
    with pytest.raises(RecordError, match=r"a\.json:record 2 has no assistant turn"):
        records[1]


ROWS = [chat("<image>hi", "yes", images=[{"bytes": IMAGE, "path": None}])] + [chat("hi", str(n)) for n in range(5)]
"""As the datasets library writes them: images as bytes with a path."""


def write_arrow(folder, rows, pyarrow):
    """What datasets.save_to_disk leaves: arrow streams, and a list of them."""
    folder.mkdir()
    names = []
    for number, part in enumerate((rows[:4], rows[4:])):
        table = pyarrow.Table.from_pylist(part, pyarrow.Table.from_pylist(rows).schema)
        names.append(f"data-0000{number}-of-00002.arrow")
        with pyarrow.OSFile(str(folder / names[-1]), "wb") as file, pyarrow.ipc.new_stream(file, table.schema) as out:
            out.write_table(table)
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": name} for name in names]}))
    return folder


@pytest.mark.parametrize("kind", ["parquet", "save_to_disk"])
def test_tables(tmp_path, kind):
    pyarrow = pytest.importorskip("pyarrow", reason="needs the extra parquet")
    if kind == "parquet":
        import pyarrow.parquet

        path = tmp_path / "a.parquet"
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist([*ROWS, chat("hi")]), path, row_group_size=2)
    else:
        path = write_arrow(tmp_path / "set", [*ROWS, chat("hi")], pyarrow)
    records = open_records(path)
    assert len(records) == 7 and records[0].media() == [ImagePart(data=IMAGE)]
    assert [records[n].messages for n in range(1, 6)] == [texts("hi", str(n)) for n in range(5)]
    assert records[5].source == f"{path}:record 6"
    with pytest.raises(RecordError, match="record 7 has no assistant turn"):
        records[6]


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("state.json", "[]", r"state\.json holds list, not a JSON object"),
        ("state.json", "{", r"state\.json is not valid JSON"),
        ("state.json", "{}", r"state\.json names no data files"),
        ("data-00001-of-00002.arrow", "half", r"data-00001-of-00002\.arrow is damaged \("),
        ("data-00001-of-00002.arrow", None, r"data-00001-of-00002\.arrow is damaged \("),
    ],
)
def test_damaged_folders_are_named(tmp_path, name, text, message):
    file = write_arrow(tmp_path / "set", ROWS, pytest.importorskip("pyarrow", reason="needs the extra parquet")) / name
    if text is None:
        file.unlink()
    else:
        file.write_bytes(file.read_bytes()[: file.stat().st_size // 2] if text == "half" else text.encode())
    with pytest.raises(ValueError, match=message):
        open_records(tmp_path / "set")


@pytest.mark.parametrize("kind", ["parquet", "save_to_disk"])
def test_damaged_bytes_are_named_when_they_are_read(tmp_path, kind):
    """Of a text in the middle; whatever is not found out is still a record."""
    pyarrow = pytest.importorskip("pyarrow", reason="needs the extra parquet")
    parquet = pytest.importorskip("pyarrow.parquet")
    rows = [chat("hi " * 99, f"yes {n}") for n in range(50)]
    if kind == "parquet":
        file = tmp_path / "a.parquet"
        parquet.write_table(pyarrow.Table.from_pylist(rows), file)
        opened = file
    else:
        opened = write_arrow(tmp_path / "set", rows, pyarrow)
        file = opened / "data-00001-of-00002.arrow"
    good = file.read_bytes()
    found = 0
    for at in range(64, len(good) - 1200, 97):
        file.write_bytes(good[:at] + b"\xff" * 60 + good[at + 60 :])
        try:
            records = open_records(opened)
            for n in range(len(records)):
                records.value(n)
        except ValueError as error:
            found += 1
            assert str(file if kind == "parquet" else opened) in str(error)
    assert found


def test_several_files_follow_one_another(tmp_path):
    paths = [write_jsonl(tmp_path / f"{n}.jsonl", [chat("hi", f"{n}{m}") for m in range(n)]) for n in (2, 0, 3)]
    records = Records(paths)
    assert [record.messages[1].text for record in records] == ["20", "21", "30", "31", "32"]


def write(path, text):
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.txt", "", "is no file of records: give .jsonl"),
        ("a.jsonl", "\n", "there is no record in"),
        (
            "a.json",
            "{}",
            r"holds one object: it must be a list of records, so write \[ \] around it, or name it .jsonl",
        ),
        ("a.json", '{"messages": [1]}', r"so write \[ \] around it, or name it .jsonl if it is a line"),
        ("a.json", '{"version": 1, "data": [{}]}', r"around it, or, if these are records, keep its data alone, or"),
        ("a.json", "3", "holds int: it must be a list"),
        ("a.json", "{", "is not valid JSON"),
        ("a.parquet", "x", r"a\.parquet is damaged \(Parquet file size is 1 bytes.*\): copy"),
        ("set/x", "", "is a folder without state.json"),
        (
            "set/dataset_dict.json",
            '{"splits": ["train", "test"]}',
            "holds the splits train, test: give the folder of one",
        ),
    ],
)
def test_files_that_hold_no_records_are_refused(tmp_path, name, text, message):
    if name.endswith(".parquet"):
        pytest.importorskip("pyarrow", reason="needs the extra parquet")
    write(tmp_path / name, text)
    with pytest.raises(ValueError, match=message):
        Records([tmp_path / name if "/" not in name else tmp_path / "set"])


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(ValueError, match="does not exist: give the path of a file of records"):
        Records([tmp_path / "a.jsonl"])


def test_without_pyarrow_tables_say_what_to_install(tmp_path, monkeypatch):
    write(tmp_path / "a.parquet", "")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ValueError, match=r"needs pyarrow to be read: pip install 'cpjax\[parquet\]'"):
        open_records(tmp_path / "a.parquet")
