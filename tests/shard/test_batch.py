"""The pad table (SPEC I5), and what make_batch refuses (census D1 to D3, D5; reports R16, R24, R33)."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cpjax.shard import IGNORE, Contiguous, Identity, Stream, Zigzag, layout_from_name, make_batch

IDS = np.array([[5, 6, 7, 8, 9], [1, 2, 3, 4, 11]])


def test_every_stream_is_padded_by_its_meaning():
    mrope = np.arange(30).reshape(3, 2, 5)
    batch, sharder = make_batch(
        {
            "input_ids": IDS,
            "labels": IDS + 1,
            "position_ids": mrope,
            "document_ids": np.array([[1, 1, 2, 2, 2], [1, 1, 1, 1, 1]]),
            "vision_group_ids": np.full((2, 5), 3),
            "per_layer": np.ones((2, 5, 4, 3)),
            "deepstack": np.ones((6, 2, 5, 3)),
            "pixels": np.ones((7, 3)),
        },
        Zigzag(4),
        pad_id=11,
        streams={"per_layer": Stream(1, 0.5), "deepstack": Stream(2, 0), "pixels": Stream(axis=None)},
    )
    assert (sharder.length, sharder.padded_length) == (5, 8)
    pads = {
        name: np.take(value, [5, 6, 7], axis=1) for name, value in batch.items() if value.ndim == 2 and name != "pixels"
    }
    wanted = {"input_ids": 11, "labels": IGNORE, "padding_mask": True, "document_ids": 0, "vision_group_ids": -1}
    assert set(pads) == set(wanted)
    for name, value in wanted.items():
        assert (pads[name] == value).all(), name
        assert (batch[name][:, :5] != value).any() or name == "padding_mask"
    np.testing.assert_array_equal(batch["position_ids"][..., 5:], mrope[..., 4:] + [1, 2, 3])
    assert batch["per_layer"].shape == (2, 8, 4, 3) and (batch["per_layer"][:, 5:] == 0.5).all()
    assert batch["deepstack"].shape == (6, 2, 8, 3) and batch["pixels"].shape == (7, 3)


def test_defaults_are_global_and_explicit():
    batch, _ = make_batch({"input_ids": IDS}, Zigzag(2))
    np.testing.assert_array_equal(batch["position_ids"], np.broadcast_to(np.arange(8), (2, 8)))
    np.testing.assert_array_equal(batch["document_ids"], [[1] * 5 + [0] * 3] * 2)
    np.testing.assert_array_equal(batch["padding_mask"], [[False] * 5 + [True] * 3] * 2)


def test_attention_mask_becomes_padding_mask():
    mask = np.array([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]])
    batch, _ = make_batch({"input_ids": IDS, "attention_mask": mask}, Contiguous(3))
    np.testing.assert_array_equal(batch["padding_mask"], [[False] * 5 + [True], [False] * 3 + [True] * 3])
    np.testing.assert_array_equal(batch["document_ids"], [[1] * 5 + [0], [1] * 3 + [0] * 3])
    assert "attention_mask" not in batch


def test_loss_mask_reaches_the_labels():
    batch, _ = make_batch({"input_ids": IDS, "labels": IDS, "loss_mask": [[0, 1, 1, 1, 0], [1, 1, 1, 1, 1]]}, Zigzag(2))
    np.testing.assert_array_equal(batch["labels"][0], [IGNORE, 6, 7, 8, IGNORE, IGNORE, IGNORE, IGNORE])
    assert "loss_mask" not in batch


def test_r33_pads_are_known_by_metadata_never_by_token_value():
    """Real tokens equal to the pad id stay tokens."""
    one, _ = make_batch({"input_ids": IDS, "labels": IDS}, Zigzag(2), pad_id=11)
    other, _ = make_batch({"input_ids": IDS, "labels": IDS}, Zigzag(2), pad_id=0)
    for name in ("padding_mask", "document_ids", "labels"):
        np.testing.assert_array_equal(one[name], other[name])
    assert not one["padding_mask"][1, 4]


@given(st.integers(1, 50), st.sampled_from(("contiguous", "zigzag", "striped")), st.integers(1, 16))
def test_the_input_is_a_prefix_of_the_result(length, name, cp):
    layout = layout_from_name(name, cp)
    ids = np.arange(2 * length).reshape(2, length)
    batch, sharder = make_batch({"input_ids": ids, "labels": ids}, layout)
    assert sharder.padded_length == layout.pad_length(length)
    for name in ("input_ids", "labels"):
        np.testing.assert_array_equal(batch[name][:, :length], ids)
        assert batch[name].shape == (2, sharder.padded_length)
    assert (batch["labels"] != IGNORE).sum() == 2 * length, "valid labels are counted before sharding"


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"teacher_logits": np.ones((2, 5, 3))}, "unknown stream 'teacher_logits'"),
        ({"labels": np.ones((2, 4), int)}, "must hold the 5 tokens"),
        ({"labels": np.ones((3, 5), int)}, "must hold the 2 rows"),
        ({"inputs_embeds": np.ones((2, 5, 3))}, "exactly one"),
        ({"attention_mask": np.ones((2, 1, 5, 5))}, "attention_mask has shape"),
        ({"attention_mask": np.full((2, 5), 2)}, "of 0 and 1"),
        ({"attention_mask": np.ones((2, 5)), "padding_mask": np.zeros((2, 5))}, "both"),
        ({"loss_mask": np.ones((2, 5))}, "without labels"),
        ({"position_ids": [[0, 1, 2, 0, 1], [0, 1, 2, 3, 4]]}, "restart at row 0, token 3"),
        ({"position_ids": np.ones((3, 2, 6), int)}, "must hold the 5 tokens"),
        ({"document_ids": np.full((2, 5), 2**33)}, "document_ids has numbers up to 8589934592, which int32 does not"),
        ({"padding_mask": np.full((2, 5), 0.5)}, "padding_mask of dtype float64 holds other than True and False"),
        ({"padding_mask": np.full((2, 5), "False")}, "padding_mask of dtype <U5 holds other than True and False"),
        ({"labels": np.ones((2, 5), np.uint8)}, "labels has dtype uint8: make it int32"),
        ({"document_ids": np.ones((2, 5))}, "document_ids has dtype float64: make it int32"),
        ({"labels": np.ones((2, 5), bool)}, "labels has dtype bool: make it int32"),
        ({"labels": np.ones((2, 5, 1), int)}, r"it must be \[B, S\]"),
        ({"padding_mask": np.ones(5, bool)}, "stream 'padding_mask' has shape"),
        ({"position_ids": np.full((2, 5), 2**64 - 1, np.uint64)}, "up to 18446744073709551615, which int32 does not"),
        ({"document_ids": np.full((2, 5), -(2**63))}, "up to -9223372036854775808, which int32 does not"),
    ],
)
def test_mismatched_or_undeclared_streams_raise_one_sentence(extra, message):
    with pytest.raises(ValueError, match=message) as error:
        make_batch({"input_ids": IDS, **extra}, Zigzag(2))
    assert "\n" not in str(error.value)


def test_other_misuse_raises():
    with pytest.raises(ValueError, match="neither"):
        make_batch({"labels": IDS}, Identity())
    with pytest.raises(ValueError, match="must be"):
        make_batch({"input_ids": IDS[0]}, Identity())
    with pytest.raises(ValueError, match="cpjax's own"):
        make_batch({"input_ids": IDS}, Identity(), streams={"labels": Stream(1, 0)})
    for shape in ((2, 0), (0, 2), (0, 0)):
        with pytest.raises(ValueError, match="at least one row, and at least one token"):
            make_batch({"input_ids": np.zeros(shape, int)}, Identity())


def test_numbers_at_the_ends_of_int32_stay():
    least, most = -(2**31), 2**31 - 1
    given = {"input_ids": [[0, 1, 2]], "vision_group_ids": [[least, most, 0]], "document_ids": [[least, most, most]]}
    for layout in (Zigzag(2), layout_from_name("packed", 2)):
        batch, _ = make_batch({name: np.array(x) for name, x in given.items()}, layout)
        there = ~batch["padding_mask"]
        assert batch["input_ids"][there].tolist() == [1, 2], "a document id below 1 is a pad"
        assert batch["vision_group_ids"][there].tolist() == [most, 0]
    small = {"input_ids": np.array([[7, 255]], np.uint8), "document_ids": np.array([[1, 2]], np.uint8)}
    batch, _ = make_batch(small, Zigzag(1))
    assert batch["input_ids"].dtype == batch["document_ids"].dtype == np.int32 and batch["input_ids"][0, 1] == 255
