"""The stream of batches: each record once per epoch, the same after any stop."""

import base64
import json

import numpy as np
import pytest

from cpjax.train.data import Dataset, Encoder, RecordError, RecordsConfig, Stream
from tests.data.common import chat, make_folder, png, random_chats, write_jsonl

TOKENS, PATCHES = 192, 256


@pytest.fixture(scope="module")
def encoder(tmp_path_factory):
    return Encoder.from_folder(make_folder(tmp_path_factory.mktemp("model")))


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    return write_jsonl(tmp_path_factory.mktemp("data") / "a.jsonl", random_chats(40))


def open_dataset(file, encoder, **options):
    options = {"files": [str(file)], "tokens": TOKENS, "patches": PATCHES} | options
    return Dataset.open(RecordsConfig(**options), encoder)


@pytest.fixture(scope="module")
def dataset(file, encoder):
    return open_dataset(file, encoder)


def take(stream, count):
    """What identifies a batch: the records of each row, and the tokens themselves."""
    batches = [next(stream) for _ in range(count)]
    return [
        [(tuple(s), np.asarray(r.input_ids).tolist()) for s, r in zip(b.sources, b.rows, strict=True)] for b in batches
    ]


def test_every_record_comes_once_per_epoch_each_epoch_in_its_own_order(dataset, file):
    stream = Stream(dataset, batch_size=2, seed=3)
    rows = [sources for batch in take(stream, len(dataset.packs)) for sources, _ in batch]  # two epochs
    epochs = [rows[: len(dataset.packs)], rows[len(dataset.packs) :]]
    for epoch in epochs:
        assert sorted(s for sources in epoch for s in sources) == sorted(f"{file}:{n + 1}" for n in range(40))
    assert epochs[0] != epochs[1]
    assert take(Stream(dataset, batch_size=2, seed=4), 3) != take(Stream(dataset, batch_size=2, seed=3), 3)


@pytest.mark.parametrize("count", [0, 3, 9])
def test_a_restored_stream_continues_as_if_never_stopped(dataset, count):
    whole = Stream(dataset, batch_size=4)
    begun = Stream(dataset, batch_size=4)
    assert take(whole, count) == take(begun, count)
    state = json.loads(json.dumps(begun.state()))
    next(begun)  # what is read ahead is not part of the state
    again = Stream(dataset, batch_size=4)
    again.restore(state)
    assert take(whole, 4) == take(again, 4)


def test_the_epoch_goes_on_after_a_stop_at_its_end(dataset):
    size = len(dataset.packs)
    stream = Stream(dataset, batch_size=1)
    take(stream, size)
    again = Stream(dataset, batch_size=1)
    again.restore(stream.state())
    assert take(again, size) == take(stream, size)


def test_batches_have_few_shapes_that_hold_their_rows(file, encoder):
    dataset = open_dataset(file, encoder, pack=False, shapes=3)
    assert len(dataset.packs) == 40
    seen = set()
    stream = Stream(dataset, batch_size=2)
    for _ in range(40):
        batch = next(stream)
        seen.add((batch.tokens, batch.patches))
        arrays = encoder.module.prepare(
            encoder.processor.config, batch.rows, length=batch.tokens, num_patches=batch.patches
        )
        assert arrays["input_ids"].shape == (2, batch.tokens) and arrays["pixel_values"].shape[1] == batch.patches
    assert 2 <= len(seen) <= len(dataset.shapes) <= 3 and seen <= set(dataset.shapes)
    assert "3 shapes at most: 48 tokens and 64 patches, 96 tokens" in dataset.describe()


def test_rows_hold_their_records_as_documents(dataset, encoder):
    pack = max(dataset.packs, key=len)
    row, sources = dataset.row(pack)
    parts = [encoder.row(dataset.records[index]) for index in pack]
    assert len(parts) == len(sources) > 1
    for number, part in enumerate(parts, start=1):
        own = row.document_ids == number
        np.testing.assert_array_equal(row.input_ids[own], part.input_ids)
        np.testing.assert_array_equal(row.labels[own], part.labels)
    assert [media.grid for media in row.media] == [media.grid for part in parts for media in part.media]


def test_tokens_are_counted_in_multiples_for_layouts_that_pad_each_document(file, encoder):
    dataset = Dataset.open(RecordsConfig(files=[str(file)], tokens=192, patches=256), encoder, multiple=8)
    assert not (dataset.sizes[:, 0] % 8).any() and not any(tokens % 8 for tokens, _ in dataset.shapes)
    for pack in dataset.packs:
        row, _ = dataset.row(pack)
        padded = -(-np.bincount(row.document_ids)[1:] // 8) * 8
        assert padded.sum() == dataset.sizes[list(pack), 0].sum() <= 192


def test_one_pass_in_order_for_evaluation(dataset, file):
    stream = Stream(dataset, batch_size=4, once=True)
    rows = [pair for batch in stream for pair in zip(batch.sources, batch.rows, strict=True)]
    assert len(rows) % 4 == 0 and len(rows) - len(dataset.packs) == -len(dataset.packs) % 4 > 0
    assert sorted(s for sources, _ in rows for s in sources) == sorted(f"{file}:{n + 1}" for n in range(40))
    for sources, row in rows[len(dataset.packs) :]:
        assert not sources and len(row.input_ids) == 1 and row.labels is None


def test_text_alone_needs_no_patches(tmp_path, encoder):
    dataset = open_dataset(write_jsonl(tmp_path / "a.jsonl", [chat("what?", "a cat")] * 3), encoder)
    assert next(Stream(dataset, batch_size=1)).patches is None and {patches for _, patches in dataset.shapes} == {0}


def test_other_data_are_refused(dataset, file, encoder):
    state = Stream(dataset, batch_size=2).state()
    for stream in (
        Stream(dataset, batch_size=4),
        Stream(dataset, batch_size=2, seed=1),
        Stream(open_dataset(file, encoder, tokens=200), batch_size=2),
    ):
        with pytest.raises(ValueError, match="the data differ from those of the checkpoint: to resume, give the same"):
            stream.restore(state)


def test_collate_runs_ahead(dataset):
    assert [next(Stream(dataset, batch_size=2, collate=lambda batch: len(batch.rows))) for _ in range(2)] == [2, 2]


def broken_records(cut):
    """Four good records among six broken ones; the last one only shows when its image is decoded."""
    uri = "data:image/png;base64," + base64.b64encode(png(60, 60)[:-300] if cut else png(60, 60)).decode()
    return [
        chat("hi", "yes"), chat("hi"), chat("hi", "word " * 200), chat("what?", "a cat"), {"messages": []},
        chat([{"type": "image", "image": "missing.png"}], "ok"), chat("why?", "so"), chat("x" * 999, "ok"),
        chat([{"type": "image", "image": uri}], "ok"), chat("last", "one"),
    ]  # fmt: skip


def test_broken_records_are_skipped_and_counted(tmp_path, encoder):
    file = write_jsonl(tmp_path / "a.jsonl", broken_records(cut=True))
    dataset = open_dataset(file, encoder, broken="skip")
    assert dict(dataset.skipped.counts) == {
        "no assistant turn": 1, "too long": 2, "bad format": 1, "missing image": 1,
    }  # fmt: skip
    assert "Left out: 2 too long, 1 no assistant turn, 1 bad format, 1 missing image." in dataset.describe()
    assert dataset.skipped.first["too long"].startswith(f"{file}:3 has ")
    for _ in range(2):  # an image that turns out to be damaged is counted once, however often it comes up
        sources = [s for batch in Stream(dataset, batch_size=2, once=True) for row in batch.sources for s in row]
        assert sorted(sources) == [f"{file}:{n}" for n in (1, 10, 4, 7)]
        assert dataset.skipped.counts["unreadable image"] == 1
    row, sources = dataset.row([8])
    assert sources == [] and len(row.input_ids) == 1 and row.labels is None


def test_broken_records_stop_a_run_before_it_begins(tmp_path, encoder):
    file = write_jsonl(tmp_path / "a.jsonl", broken_records(cut=False))
    with pytest.raises(RecordError, match=r"a\.jsonl:2 has no assistant turn"):
        open_dataset(file, encoder)


def test_a_damaged_image_stops_the_stream(tmp_path, encoder):
    file = write_jsonl(tmp_path / "a.jsonl", [broken_records(cut=True)[8]])
    with pytest.raises(RecordError, match=r"a\.jsonl:1 shows its bytes, which is damaged"):
        next(Stream(open_dataset(file, encoder), batch_size=1))


@pytest.mark.parametrize(
    ("text", "limits", "message"),
    [
        ("word " * 200, {}, r"a\.jsonl:1 has [\d,]+ tokens, more than the 192 of a row: raise --records\.tokens or"),
        (
            "<image>",
            {"patches": 100},
            r"a\.jsonl:1 has 256 patches, more than the 100 of a row: raise --records\.patches",
        ),
    ],
)
def test_what_is_too_long_is_named(tmp_path, encoder, text, limits, message):
    uri = "data:image/png;base64," + base64.b64encode(png(64, 60)).decode()
    record = chat(text, "ok", **({"images": [uri]} if "image" in text else {}))
    with pytest.raises(RecordError, match=message):
        open_dataset(write_jsonl(tmp_path / "a.jsonl", [record]), encoder, **limits)


def test_nothing_but_broken_records_is_refused(tmp_path, encoder):
    file = write_jsonl(tmp_path / "a.jsonl", [chat("hi"), chat("hi")])
    with pytest.raises(ValueError, match=r"all 2 records are broken \(2 no assistant turn\): .*a\.jsonl:1 has no"):
        open_dataset(file, encoder, broken="skip")


@pytest.mark.parametrize(
    ("options", "message"),
    [({"tokens": 0}, "--records.tokens is 0: it must be at least 1"), ({"patches": -1}, "--records.patches is -1")],
)
def test_options_out_of_range_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        RecordsConfig(**options)
