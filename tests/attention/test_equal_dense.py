"""Invariant I1: any cp, layout, transport, mask and head count gives the dense output and gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cpjax.attention import Mask, dense_attention
from tests.attention.common import assert_equal, documents_of, problem, solve, solve_dense

pytestmark = pytest.mark.usefixtures("short_tiles")

PARALLEL = [
    (cp, layout, transport)
    for cp in (2, 4, 8)
    for layout in ("contiguous", "zigzag", "striped")
    for transport in ("ring", "allgather")
]


def everything():
    """45 tokens divide by nothing; rows with different documents and pads, also in the middle; GQA; Dv != D."""
    documents = documents_of([17, 1, 20], [3, 3, 25, 14], length=45)
    padding = documents == 0
    padding[1, 10:13] = True
    return problem(45, documents=documents, padding=padding)


@pytest.mark.parametrize(("cp", "layout", "transport"), [(1, "identity", "ring"), *PARALLEL])
def test_documents_padding_and_grouped_heads(cp, layout, transport):
    p = everything()
    assert_equal(solve(p, cp, layout, transport, jnp.float64), solve_dense(p), jnp.float64)


@pytest.mark.parametrize(
    ("cp", "layout", "transport"),
    [(1, "identity", "ring"), (2, "zigzag", "ring"), (4, "striped", "ring"), (8, "zigzag", "ring"),
     (8, "contiguous", "ring"), (4, "zigzag", "allgather"), (8, "contiguous", "allgather")],
)  # fmt: skip
def test_the_same_in_float32(cp, layout, transport):
    p = everything()
    assert_equal(solve(p, cp, layout, transport), solve_dense(p))


@pytest.mark.parametrize(
    ("causal", "documents", "padding", "kv_heads"),
    [(True, False, False, 4), (False, False, False, 1), (False, True, False, 2), (True, False, True, 1)],
)
@pytest.mark.parametrize(
    ("cp", "layout", "transport"), [(1, "identity", "ring"), (4, "zigzag", "ring"), (4, "zigzag", "allgather")]
)
def test_each_part_of_the_mask(cp, layout, transport, causal, documents, padding, kv_heads):
    p = problem(
        80,  # 10 tokens a run: tiles have empty slots
        kv_heads=kv_heads,
        documents=documents_of([30, 50], [80], length=80) if documents else None,
        padding=np.arange(80) >= np.array([[75], [60]]) if padding else None,
    )
    got = solve(p, cp, layout, transport, jnp.float64, causal=causal, scale=0.7)
    assert_equal(got, solve_dense(p, causal=causal, scale=0.7), jnp.float64)


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


@st.composite
def masks(draw, batch=2, length=48):
    """Any documents, contiguous or not, and any pads."""
    contiguous = draw(st.booleans())
    ids = np.array(draw(st.lists(st.lists(st.integers(0, 4), min_size=length, max_size=length), min_size=batch,
                                 max_size=batch)), np.int32)  # fmt: skip
    ids = np.sort(ids, axis=1) if contiguous else ids
    padding = draw(st.integers(0, 2**length - 1))
    return ids, np.tile(np.array([padding >> i & 1 for i in range(length)], bool), (batch, 1))


@settings(max_examples=10, deadline=None)
@given(masks(), st.sampled_from([(4, "zigzag", "ring"), (8, "striped", "ring"), (2, "contiguous", "allgather")]))
def test_any_documents_and_padding(mask, where):
    p = problem(48, documents=mask[0], padding=mask[1])
    assert_equal(solve(p, *where), solve_dense(p))


@settings(max_examples=4, deadline=None, derandomize=True)  # each length is a compilation, cached
@given(st.integers(1, 70), st.sampled_from([(8, "zigzag"), (4, "striped"), (2, "contiguous")]))
def test_any_length(length, where):
    p = problem(length, batch=1)
    cp, layout = where
    assert_equal(solve(p, cp, layout, "ring"), solve_dense(p))


@pytest.mark.parametrize("layout", ["zigzag", "contiguous"])
def test_r31_documents_shorter_than_a_rank(layout):
    """Documents of 1, 2, 3 and 38 tokens on 8 ranks."""
    p = problem(44, batch=1, documents=documents_of([1, 2, 3, 38], length=44))
    assert_equal(solve(p, 8, layout, "ring"), solve_dense(p))


@pytest.mark.parametrize("transport", ["ring", "allgather"])
def test_bfloat16_is_as_close_as_dense_bfloat16(transport):
    p = problem(64, width=16, v_width=16)
    exact, dense = solve_dense(p), solve_dense(p, jnp.bfloat16)
    for x, y, z in zip(solve(p, 4, "zigzag", transport, jnp.bfloat16), dense, exact, strict=True):
        assert x.dtype == jnp.bfloat16
        x, y = x.astype(np.float64), y.astype(np.float64)
        assert np.abs(x - z).max() <= 2 * np.abs(y - z).max()
        assert np.linalg.norm(x - z) <= 2 * np.linalg.norm(y - z)
