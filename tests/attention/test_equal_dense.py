"""Invariant I1: any mask, cp, layout, transport and head count gives the dense output and gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cpjax.attention import Mask, dense_attention
from tests.attention.common import assert_equal, documents_of, problem, solve, solve_dense, solve_numpy

pytestmark = pytest.mark.usefixtures("short_tiles")

LENGTH, BATCH = 45, 2  # divides by nothing, so that every layout pads

CASES = [
    # where; heads; streams; static form: every part of the mask meets every other, every layout and every transport
    ((1, "identity", "ring"), (4, 2), "documents padding vision prefix slices sinks",
     {"window": (6, None), "softcap": 2.0}),
    ((2, "zigzag", "ring"), (4, 4), "documents padding vision sinks shared", {"scale": 0.7}),
    ((4, "zigzag", "ring"), (4, 1), "documents", {"causal": False, "window": (5, 3)}),
    ((8, "contiguous", "ring"), (2, 2), "padding sinks", {"window": (9, None)}),
    ((8, "contiguous", "ring"), (2, 1), "documents vision prefix", {"window": (9, None), "softcap": 3.0}),
    ((4, "zigzag", "ring"), (4, 2), "ordered padding vision", {"window": (3, None), "windowed_groups": True}),
    ((8, "zigzag", "ring"), (4, 2), "padding slices", {"causal": False, "softcap": 1.0}),
    ((4, "striped", "ring"), (4, 2), "documents slices prefix shared", {"window": (20, None)}),
    ((4, "contiguous", "allgather"), (4, 2), "documents vision sinks", {"causal": False, "window": (7, 0)}),
    ((8, "striped", "allgather"), (4, 4), "padding prefix vision shared", {}),
    ((4, "zigzag", "ulysses"), (8, 2), "documents padding vision prefix slices sinks", {"window": (6, None)}),
    ((8, "contiguous", "ulysses"), (8, 8), "documents slices shared", {"causal": False}),
    ((8, "zigzag", "ring_ulysses:2"), (4, 2), "documents padding sinks", {"window": (4, None)}),
    ((8, "striped", "ring_ulysses:4"), (12, 3), "documents vision slices sinks", {"causal": False, "softcap": 2.0}),
    ((4, "packed", "ring"), (4, 2), "ordered vision prefix sinks", {"window": (6, None), "softcap": 2.0}),
    ((4, "packed", "ring_ulysses:2"), (4, 2), "ordered vision shared", {"causal": False}),
    ((4, "dispatched", "ring"), (4, 2), "documents padding vision prefix slices sinks", {"window": (20, None)}),
]  # fmt: skip


@st.composite
def problems(draw, heads, streams):
    """Any data for the streams: documents in order or scattered, groups that span documents, slices that overlap."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    shape = BATCH, LENGTH
    masks = {}
    if "documents" in streams or "ordered" in streams:
        ids = rng.integers(0, draw(st.integers(2, 6)), shape).astype(np.int32)
        masks["documents"] = np.sort(ids, 1) if "ordered" in streams or draw(st.booleans()) else ids
    if "padding" in streams:
        masks["padding"] = rng.random(shape) < draw(st.sampled_from([0.0, 0.1, 0.9, 1.0]))
    if "vision" in streams:
        runs = rng.integers(-1, 3, (BATCH, 9)).astype(np.int32)
        masks["vision_group_ids"] = np.repeat(runs, 5, 1)
    if "prefix" in streams:
        masks["prefix"] = rng.random(shape) < draw(st.sampled_from([0.0, 0.1, 0.5]))
    if "slices" in streams:
        ends = np.sort(rng.integers(0, LENGTH + 1, (6, 2, 2)), 2)
        masks["slices"] = np.concatenate([ends.reshape(6, 4), rng.integers(0, 4, (6, 1))], 1).astype(np.int32)
    return problem(
        LENGTH, batch=BATCH, heads=heads[0], kv_heads=heads[1], width=4, sinks="sinks" in streams,
        shared="shared" in streams, seed=rng.integers(2**32), **masks,
    )  # fmt: skip


@pytest.mark.parametrize(("where", "heads", "streams", "form"), CASES)
def test_any_mask_anywhere(where, heads, streams, form):
    @settings(max_examples=10, deadline=None)
    @given(problems(heads, streams))
    def check(p):
        got = solve(p, *where, jnp.float64, padded_length=256 if where[1] == "packed" else None, **form)
        assert_equal(got, solve_numpy(p, **form), jnp.float64)

    check()


def everything():
    """Rows with different documents and pads, also in the middle; GQA; Dv != D."""
    documents = documents_of([17, 1, 20], [3, 3, 25, 14], length=45)
    padding = documents == 0
    padding[1, 10:13] = True
    return problem(45, documents=documents, padding=padding)


@pytest.mark.quick
@pytest.mark.parametrize(
    ("cp", "layout", "transport"),
    [
        (1, "identity", "ring"), (8, "striped", "ring"), (4, "zigzag", "allgather"), (2, "striped", "ulysses"),
        (4, "contiguous", "ring_ulysses"),
    ],
)  # fmt: skip
def test_documents_padding_and_grouped_heads(cp, layout, transport):
    """Layouts with transports that CASES leave out are among these."""
    p = everything()
    assert_equal(solve(p, cp, layout, transport, jnp.float64), solve_numpy(p), jnp.float64)


@pytest.mark.parametrize(
    ("cp", "layout", "transport"),
    [(1, "identity", "ring"), (8, "zigzag", "ring"), (4, "zigzag", "allgather"), (4, "contiguous", "ring_ulysses")],
)  # fmt: skip
def test_the_same_in_float32(cp, layout, transport):
    p = everything()
    assert_equal(solve(p, cp, layout, transport), solve_numpy(p))


def test_numbers_at_the_ends_of_int32():
    """The largest number is a document, and a vision group, like any other; any negative group is text."""
    most, least = np.iinfo(np.int32).max, np.iinfo(np.int32).min
    documents = np.repeat(np.array([[1, most - 1, most], [most, 2, 0]], np.int32), 15, 1)
    groups = np.repeat(np.array([[-1, 0, most - 1, most, -1, most, 3, most, 0]] * 2, np.int32), 5, 1)
    form = {"window": (3, None), "windowed_groups": True}
    p = problem(LENGTH, width=4, documents=documents, padding=documents == 0, vision_group_ids=groups)
    wanted = solve_numpy(p, **form)
    for text in (-1, least):
        q = p._replace(vision_group_ids=np.where(groups < 0, text, groups).astype(np.int32))
        assert_equal(solve(q, 4, "zigzag", "ring", jnp.float64, **form), wanted, jnp.float64)
        assert_equal(solve_dense(q, **form), wanted, jnp.float64)


@pytest.mark.parametrize(
    ("causal", "documents", "padding", "kv_heads"),
    [(True, False, False, 4), (False, False, False, 1), (False, True, False, 2), (True, False, True, 1)],
)
def test_each_part_of_the_mask(causal, documents, padding, kv_heads):
    p = problem(
        80,  # 10 tokens a run: tiles have empty slots
        kv_heads=kv_heads,
        documents=documents_of([30, 50], [80], length=80) if documents else None,
        padding=np.arange(80) >= np.array([[75], [60]]) if padding else None,
    )
    got = solve(p, 4, "zigzag", "ring", jnp.float64, causal=causal, scale=0.7)
    assert_equal(got, solve_numpy(p, causal=causal, scale=0.7), jnp.float64)


@pytest.mark.quick
@settings(max_examples=6, deadline=None, derandomize=True)
@given(st.data())
def test_the_reference_is_what_numpy_computes(data):
    _, heads, streams, form = CASES[data.draw(st.sampled_from([0, 2, 8]))]
    p = data.draw(problems(heads, streams))
    assert_equal(solve_dense(p, **form), solve_numpy(p, **form), jnp.float64)


def test_the_reference_is_what_jax_computes():
    p = everything()
    q, k, v = (jnp.asarray(x, jnp.float32) for x in p[:3])
    seen = (p.document_ids[:, :, None] == p.document_ids[:, None]) & ~p.padding_mask[:, None]
    rows = (p.document_ids > 0) & (seen & np.tri(45, dtype=bool)).any(-1)
    expected = jax.nn.dot_product_attention(
        q, k, jnp.pad(v, [(0, 0)] * 3 + [(0, 2)]), mask=jnp.asarray(seen[:, None]), is_causal=True
    )
    got = dense_attention(q, k, v, mask=Mask(True, jnp.asarray(p.document_ids), jnp.asarray(p.padding_mask)))
    np.testing.assert_allclose(got[rows], expected[..., :6][rows], atol=1e-5)
    assert not np.asarray(got)[~rows].any()


@settings(max_examples=3, deadline=None, derandomize=True)  # each length is a compilation, cached
@given(st.integers(1, 70), st.sampled_from([(8, "zigzag"), (4, "striped"), (2, "contiguous")]))
def test_any_length(length, where):
    p = problem(length, batch=1)
    cp, layout = where
    assert_equal(solve(p, cp, layout, "ring"), solve_numpy(p))


@pytest.mark.parametrize("transport", ["ring", "allgather", "ulysses"])
def test_bfloat16_is_as_close_as_dense_bfloat16(transport):
    p = problem(64, width=16, v_width=16)
    exact, dense = solve_numpy(p), solve_dense(p, jnp.bfloat16)
    for x, y, z in zip(solve(p, 4, "zigzag", transport, jnp.bfloat16), dense, exact, strict=True):
        assert x.dtype == jnp.bfloat16
        x, y = x.astype(np.float64), y.astype(np.float64)
        assert np.abs(x - z).max() <= 2 * np.abs(y - z).max()
        assert np.linalg.norm(x - z) <= 2 * np.linalg.norm(y - z)
