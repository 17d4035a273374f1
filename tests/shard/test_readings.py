"""What a batch says of pads, documents and labels means the same under every layout."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cpjax.shard import (
    IGNORE,
    Contiguous,
    Dispatched,
    Identity,
    Packed,
    SliceKind,
    Striped,
    Zigzag,
    dispatch,
    make_batch,
)

LAYOUTS = [
    Identity(), Contiguous(2), Contiguous(3, multiple=2), Zigzag(2), Zigzag(4), Striped(3), Packed(1), Packed(2),
    Packed(3, multiple=2), Dispatched(2, chunk_size=2),
]  # fmt: skip
RNG = np.random.default_rng(0)
EMBED, HEAD = RNG.normal(size=(40, 4)), RNG.normal(size=(4, 40))


def sharded(given, layout, parts=1):
    if isinstance(layout, Dispatched):
        length = np.shape(given["input_ids"])[1]
        layout, _ = dispatch(np.array([[0, length, 0, length, SliceKind.CAUSAL]]), length, layout)
    return make_batch(given, layout, packed_rows=parts)


def losses_of(batch):
    """Cross-entropy [B, T] of a causal model: tokens of the document, weighted by their distance, in float64."""
    tokens, documents, labels = batch["input_ids"], batch["document_ids"], batch["labels"]
    near = np.arange(tokens.shape[1])[:, None] - np.arange(tokens.shape[1])
    seen = (documents[:, :, None] == documents[:, None]) & ~batch["padding_mask"][:, None] & (near >= 0)
    weights = np.where(seen, np.exp(-0.3 * np.maximum(near, 0)), 0)
    logits = np.einsum("bij,bje->bie", weights, EMBED[tokens]) @ HEAD
    losses = np.log(np.exp(logits).sum(-1)) - np.take_along_axis(logits, np.maximum(labels, 0)[..., None], -1)[..., 0]
    return np.where(labels == IGNORE, 0, losses)


def reading(given, layout, parts=1):
    """What every token is, and the loss summed rank by rank; or the sentence by which the batch is refused.

    Tokens are all different, so they name themselves.
    """
    try:
        batch, sharder = sharded(given, layout, parts)
    except ValueError as error:
        return str(error)
    pads = batch["padding_mask"]
    np.testing.assert_array_equal(pads, batch["document_ids"] == 0)
    assert (batch["vision_group_ids"][pads] == -1).all() and (batch["labels"][pads] == IGNORE).all()
    tokens = {}
    for row, column in np.argwhere(~pads):
        same = (batch["document_ids"][row] == batch["document_ids"][row, column]) & ~pads[row]
        token, *rest = (int(batch[name][row, column]) for name in ("input_ids", "labels", "vision_group_ids"))
        tokens[token] = (*rest, tuple(batch["input_ids"][row][same].tolist()))
    order = sharder.indices(np.arange(sharder.cp)).reshape(-1, sharder.padded_length)
    losses = losses_of(batch)
    return tokens, losses[np.arange(len(losses))[:, None], order].sum()


@st.composite
def batches(draw):
    """Streams that fit each other, and streams of which nothing does."""
    rows, length = draw(st.integers(1, 2)), draw(st.integers(1, 7))
    rng, shape = np.random.default_rng(draw(st.integers(0, 2**32 - 1))), (rows, length)
    tokens = 1 + np.arange(rows * length).reshape(shape)
    fits = draw(st.integers(0, 3)) > 0
    kind = draw(st.sampled_from(["none", "runs", "mask", "both", "wild"]))
    documents = 1 + np.sort(rng.integers(0, 3, shape), axis=1)
    pads = np.zeros(shape, bool)
    for row in pads:  # some before, some after, now and then some between
        before, after = rng.integers(0, length // 2 + 1, 2)
        row[:before] = row[length - after :] = True
        row |= rng.random(length) < rng.choice([0, 0.3])
    given, marks = {"input_ids": tokens}, np.zeros(shape, bool)
    if kind in ("runs", "both"):
        given["document_ids"] = np.where(pads, -rng.integers(0, 2, shape), documents)
        marks = pads
    if kind in ("mask", "both"):
        marks = pads | (rng.random(shape) < 0.1)
        name = draw(st.sampled_from(["attention_mask", "padding_mask"]))
        given[name] = ~marks if name == "attention_mask" else marks
    if kind == "wild":
        given["document_ids"] = rng.integers(-1, 3, shape)
        given |= {"padding_mask": rng.random(shape) < 0.3} if rng.random() < 0.5 else {}
    labels = rng.integers(0, 40, shape)
    labels[rng.random(shape) < 0.2] = IGNORE
    given["labels"] = np.where(marks, IGNORE, labels) if fits else labels
    if not fits and rng.random() < 0.2:
        given["labels"] = np.where(rng.random(shape) < 0.1, -1, labels)
    given["vision_group_ids"] = rng.integers(-1, 2, shape)
    if rng.random() < 0.3:
        given["position_ids"] = np.stack([rng.permutation(np.arange(length)) if not fits else np.arange(length)] * rows)
    return given


@settings(max_examples=150)
@given(batches())
def test_every_layout_reads_the_same(given):
    cases = [*((layout, 1) for layout in LAYOUTS), (Packed(2), len(given["input_ids"]))]
    (first, *others) = (reading(given, *case) for case in cases)
    for case, other in zip(cases[1:], others, strict=True):
        if isinstance(first, str):
            assert other == first, case
        else:
            assert other[0] == first[0], case
            np.testing.assert_allclose(other[1], first[1], rtol=1e-12, err_msg=str(case))


def row(**streams):
    return {name: np.array([x]) for name, x in streams.items()}


every_layout = pytest.mark.parametrize("layout", LAYOUTS, ids=str)


@every_layout
@pytest.mark.parametrize(
    ("streams", "message"),
    [
        # ids that count from 0
        ({"labels": [2, 3, 4, IGNORE, 6, 7], "document_ids": [0, 0, 0, 0, 1, 1]},
         "document_ids has 0 at row 0, token 0, where labels has a target: number documents from 1"),
        ({"attention_mask": [1] * 6, "document_ids": [0, 0, 0, 0, 1, 1]},
         "document_ids has 0 at row 0, token 0, where attention_mask says that it is a token: number documents from 1"),
        ({"padding_mask": [True, False, False, False, False, True], "document_ids": [-1, -1, 2, 2, 2, 0]},
         "document_ids has -1 at row 0, token 1, where padding_mask says that it is a token"),
        # labels on pads
        ({"labels": [2, 3, 4, 5, 6, 7], "attention_mask": [1, 1, 1, 1, 0, 0]},
         "labels has 6 at row 0, token 4, which is a pad by attention_mask: make the label -100"),
        ({"labels": [2, 3, 4, 5, 6, 7], "padding_mask": [True, False, False, False, False, False]},
         "labels has 2 at row 0, token 0, which is a pad by padding_mask"),
        ({"labels": [2, 3, 4, 5, 6, 7], "attention_mask": [1, 1, 1, 1, 1, 0], "cu_seqlens": [0, 2, 6]},
         "labels has 7 at row 0, token 5, which is a pad by attention_mask"),
        # labels that name no token
        ({"labels": [2, 3, -1, 5, 6, 7]}, "labels has -1 at row 0, token 2: a target is a token id"),
        # documents that are not together; positions that start anew behind a pad
        ({"document_ids": [1, 1, 2, 2, 1, 1]}, "return to a document after another one"),
        ({"position_ids": [0, 1, 0, 0, 1, 2], "attention_mask": [1, 1, 0, 1, 1, 1]}, "restart at row 0, token 3"),
    ],
)  # fmt: skip
def test_what_contradicts_itself_is_refused(layout, streams, message):
    given = row(input_ids=[1, 2, 3, 4, 5, 6], **streams)
    if "cu_seqlens" in given:
        given["cu_seqlens"] = given["cu_seqlens"][0]
        layout = Packed(2) if isinstance(layout, Dispatched) else layout
    with pytest.raises(ValueError, match=message) as error:
        sharded(given, layout)
    assert "\n" not in str(error.value)


def test_the_row_that_is_named_is_the_callers():
    """Also where packed rows are made of several."""
    labels = np.arange(1, 25).reshape(4, 6)
    mask = np.arange(24).reshape(4, 6) != 20
    for layout, parts in ((Zigzag(2), 1), (Packed(2), 1), (Packed(2), 2)):
        with pytest.raises(ValueError, match="labels has 21 at row 3, token 2"):
            make_batch({"input_ids": labels, "labels": labels, "attention_mask": mask}, layout, packed_rows=parts)


@pytest.mark.quick
@every_layout
def test_labels_kept_and_pads(layout):
    """Masks or ids alone, or both; a loss mask takes a label from a pad."""
    labels, ids = [2, 3, 4, 5, 6, 7], [1, 2, 3, 4, 5, 6]
    for streams in (
        {"attention_mask": [1, 1, 1, 1, 0, 0], "loss_mask": [1, 1, 1, 1, 0, 0]},
        {"document_ids": [1, 1, 1, 1, 0, 0], "loss_mask": [1, 1, 1, 1, 0, 0]},
        {"document_ids": [3, 3, 3, 3, 3, 3], "padding_mask": [0, 0, 0, 0, 1, 1], "loss_mask": [1, 1, 1, 1, 0, 0]},
    ):
        batch, _ = sharded(row(input_ids=ids, labels=labels, **streams), layout)
        assert batch["labels"][batch["labels"] != IGNORE].tolist() == [2, 3, 4, 5]
        assert batch["input_ids"][~batch["padding_mask"]].tolist() == [1, 2, 3, 4]
        np.testing.assert_array_equal(batch["padding_mask"], batch["document_ids"] == 0)
    batch, _ = sharded(row(input_ids=[*ids, 7, 8], document_ids=[1, 1, 1, 2, 2, 0, 0, 0]), layout)
    assert batch["input_ids"][~batch["padding_mask"]].tolist() == [1, 2, 3, 4, 5]


def test_pads_among_the_tokens_of_a_document_keep_their_place():
    """Distances count them; those before and after are dropped where documents are packed."""
    given = row(input_ids=[1, 2, 3, 4, 5, 6], document_ids=[0, 1, 0, 1, 0, 2], labels=[IGNORE, 3, IGNORE, 5, IGNORE, 7])
    batch, sharder = make_batch(given, Packed(1))
    np.testing.assert_array_equal(batch["input_ids"], [[2, 3, 4, 0, 6, 0]])
    np.testing.assert_array_equal(batch["padding_mask"], [[0, 1, 0, 1, 0, 1]])
    np.testing.assert_array_equal(batch["position_ids"], [[0, 1, 2, 3, 0, 1]])
    np.testing.assert_array_equal(sharder.places, [-1, 0, 1, 2, -1, 4])
