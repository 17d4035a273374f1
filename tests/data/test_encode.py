"""A record with media becomes the family's row: placeholders, labels and patches that belong together."""

import base64
import io
import json

import numpy as np
import pytest
from PIL import Image
from tokenizers import Tokenizer

from cpjax.shard import IGNORE
from cpjax.train.data import Encoder, RecordError
from cpjax.train.data.records import parse_record
from tests.data.common import SPECIAL, chat, make_folder, png
from tests.models.pictures import picture

IMAGE, VIDEO = SPECIAL.index("<|image_pad|>"), SPECIAL.index("<|video_pad|>")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("data")
    for name, size in (("a", (24, 32)), ("b", (70, 33))):
        (path / f"{name}.png").write_bytes(png(*size))
    (path / "text.png").write_text("no image")
    (path / "cut.png").write_bytes(png(60, 60)[:-300])
    make_folder(path / "model")
    return path


@pytest.fixture(scope="module")
def encoder(folder):
    return Encoder.from_folder(folder / "model")


@pytest.fixture
def record_of(folder):
    return lambda value: parse_record(value, "a.jsonl:1", folder)


def both_images():
    parts = [{"type": "image", "image": "a.png"}, {"type": "text", "text": "or"}, {"type": "image", "image": "b.png"}]
    return chat("hi", "yes", parts, "the first")


@pytest.mark.quick
def test_images(encoder, record_of):
    """Oracle: the text that transformers writes, its placeholders repeated as its processor does, and its tokens."""
    row = encoder.row(record_of(both_images()))
    grids = [encoder.processor.plan_image(*size).grid for size in ((24, 32), (70, 33))]
    assert [media.grid for media in row.media] == grids
    text = encoder.template.render(record_of(both_images()))
    pieces = text.split("<|image_pad|>")
    text = pieces[0] + "".join(
        "<|image_pad|>" * (h * w // 4) + rest for (_, h, w), rest in zip(grids, pieces[1:], strict=True)
    )
    assert np.asarray(row.input_ids).tolist() == encoder.tokenizer.encode(text).ids
    assert encoder.size(record_of(both_images())) == (len(row.input_ids), sum(h * w for _, h, w in grids))
    labels = np.asarray(row.labels)
    said = encoder.tokenizer.decode(labels[labels != IGNORE].tolist(), skip_special_tokens=False)
    assert said == "yes<|im_end|>\n</think>\n\nthe first<|im_end|>"
    encoder.module.prepare(encoder.processor.config, [row])  # refuses placeholders that do not fit the media


def test_images_after_an_answer_do_not_move_its_labels(encoder, record_of):
    image = {"type": "image", "image": "b.png"}
    row = encoder.row(record_of(chat([image], "one", [image, image], "two", "and?", "three")))
    labels = np.asarray(row.labels)
    said = encoder.tokenizer.decode(labels[labels != IGNORE].tolist(), skip_special_tokens=False)
    assert said == "one<|im_end|>two<|im_end|>\n</think>\n\nthree<|im_end|>"


def test_video(encoder, record_of):
    video = {"type": "video", "video": ["a.png"] * 5, "fps": 2}
    row = encoder.row(
        record_of(chat([{"type": "text", "text": "see: "}, video, {"type": "image", "image": "a.png"}], "ok"))
    )
    assert [media.grid for media in row.media] == [(3, 6, 8), (1, 6, 8)]
    frame = "<|vision_start|>" + "<|video_pad|>" * 12 + "<|vision_end|>"
    image = "<|vision_start|>" + "<|image_pad|>" * 12 + "<|vision_end|>"
    shown = f"see: <0.2 seconds>{frame}<1.2 seconds>{frame}<2.0 seconds>{frame}{image}<|im_end|>"
    assert shown in encoder.tokenizer.decode(np.asarray(row.input_ids).tolist(), skip_special_tokens=False)
    encoder.module.prepare(encoder.processor.config, [row])


def test_images_are_turned_the_way_they_are_to_be_seen(encoder, record_of):
    upright = Image.fromarray(picture(24, 40))
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned by a quarter clockwise
    out = io.BytesIO()
    upright.rotate(90, expand=True).save(out, "PNG", exif=exif)
    uri = "data:image/png;base64," + base64.b64encode(out.getvalue()).decode()
    record = record_of(chat([{"type": "image", "image": uri}], "ok"))
    row = encoder.row(record)
    wanted = encoder.processor.media(encoder.processor.plan_image(24, 40), [upright])
    assert row.media[0].grid == wanted.grid and encoder.size(record)[1] == len(wanted.patches)
    np.testing.assert_array_equal(row.media[0].patches, wanted.patches)


@pytest.mark.parametrize(
    ("name", "reason", "message"),
    [
        ("missing.png", "missing image", r"a\.jsonl:1 shows .*missing\.png, which does not exist: mend the path"),
        ("text.png", "unreadable image", r"a\.jsonl:1 shows .*text\.png, which is not an image: replace it"),
        ("cut.png", "unreadable image", r"a\.jsonl:1 shows .*cut\.png, which is damaged \(.*\): replace it"),
        ("iVBOR" * 999, "missing image", r"a\.jsonl:1 shows .{240}, which is too long for a path: if it is base64"),
    ],
)
def test_images_that_cannot_be_read_are_named(encoder, record_of, name, reason, message):
    with pytest.raises(RecordError, match=message) as error:
        encoder.row(record_of(chat([{"type": "image", "image": name}], "ok")))
    assert error.value.reason == reason


def test_media_that_do_not_fit_are_named(encoder, record_of):
    long = "data:image/png;base64," + base64.b64encode(png(2, 500)).decode()
    with pytest.raises(RecordError, match=r"jsonl:1: a picture of 2 x 500 pixels .* no side may be over 200") as error:
        encoder.size(record_of(chat([{"type": "image", "image": long}], "ok")))
    assert error.value.reason == "unfit image"
    with pytest.raises(RecordError, match=r"jsonl:1: a video of 1 frames was given: it needs at least 2"):
        encoder.size(record_of(chat([{"type": "video", "video": ["a.png"], "fps": 1}], "ok")))
    with pytest.raises(RecordError, match=r"jsonl:1 has a video with frames of 24 x 32 and 70 x 33 pixels: make them"):
        encoder.size(record_of(chat([{"type": "video", "video": ["a.png", "b.png", "a.png"], "fps": 1}], "ok")))


def test_tokens_without_an_embedding_are_named(folder, record_of, tmp_path):
    """As after a special token was added to the tokenizer alone."""
    file = make_folder(tmp_path / "model") / "tokenizer.json"
    tokenizer = Tokenizer.from_file(str(file))
    size = tokenizer.get_vocab_size()
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    config["text_config"]["vocab_size"] = size
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    tokenizer.add_special_tokens(["<|new|>"])
    tokenizer.save(str(file))
    encoder = Encoder.from_folder(tmp_path / "model")
    assert encoder.beyond == 1 and encoder.size(record_of(chat("hi", "yes")))[1] == 0
    words = rf"jsonl:1 has the token <\|new\|>, number {size}, but the model has embeddings for {size}: resize"
    with pytest.raises(RecordError, match=words) as error:
        encoder.size(record_of(chat("hi", "yes <|new|>")))
    assert error.value.reason == "token without embedding"


def test_placeholders_in_text_are_named(encoder, record_of):
    for text in ("<|image_pad|>", "see <|video_pad|>?"):
        with pytest.raises(RecordError, match=r"has <\|\w+_pad\|> in its text: it may stand for media only") as error:
            encoder.size(record_of(chat(text, "ok")))
        assert error.value.reason == "placeholder in text"


@pytest.mark.parametrize(
    ("shown", "reason", "message"),
    [
        (
            "x",
            "image not shown by the template",
            r"has images, but the chat template does not show each of them, in its place, as <\|image_pad\|>: use",
        ),
        ("<|image_pad|>" * 3, "wrong image count", "has 2 frames, but the chat template shows others"),
    ],
)
def test_a_template_that_shows_other_images_is_named(tmp_path, record_of, shown, reason, message):
    turn = "{% for m in messages %}{{ m.role }}{{ m.content if m.content is string else 'SHOWN' }}<|eot|>{% endfor %}"
    encoder = Encoder.from_folder(make_folder(tmp_path / "model", turn.replace("SHOWN", shown)))
    with pytest.raises(RecordError, match=message) as error:
        encoder.size(record_of(both_images()))
    assert error.value.reason == reason
    with pytest.raises(RecordError, match="has videos, but the chat template does not show each of them") as error:
        encoder.size(record_of(chat([{"type": "video", "video": ["a.png"] * 2, "fps": 1}], "ok")))
    assert error.value.reason == "video not shown by the template"


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("config.json", {"image_token_id": 399, "text_config": {"vocab_size": 400}}, "has no token 399"),
        ("config.json", {"model_type": "bert"}, r"model/config.json: model_type 'bert' is not supported"),
        ("config.json", {"model_type": None}, "model/config.json has no model_type"),
        ("config.json", {"text_config": {"layer_types": ["x"]}}, r"model/config.json: text_config.layer_types has 1"),
        ("config.json", {"text_config": {"layer_types": 3}}, r"model/config.json: text_config.layer_types=3 must be"),
        ("tokenizer.json", None, "has no tokenizer.json: save it with transformers' fast tokenizer"),
        ("tokenizer.json", {}, "tokenizer.json is damaged"),
    ],
)
def test_folders_that_do_not_fit_are_refused(tmp_path, name, change, message):
    folder = make_folder(tmp_path / "model")
    content = json.loads((folder / name).read_text())
    if change is None:
        (folder / name).unlink()
    elif change:
        change = {key: content[key] | value if isinstance(value, dict) else value for key, value in change.items()}
        (folder / name).write_text(json.dumps(content | change))
    else:
        (folder / name).write_text("{}")
    with pytest.raises(ValueError, match=message):
        Encoder.from_folder(folder)
