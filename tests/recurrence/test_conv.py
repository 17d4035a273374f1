"""The causal convolution: halos in global order, documents (report R49)."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cpjax.recurrence import causal_conv
from cpjax.shard import Striped, layout_from_name, make_sharder
from tests.recurrence import reference
from tests.recurrence.common import LAYOUTS, assert_close, documents, sharded, value_and_grads


def op(x, weight, *, sharder, document_ids):
    return causal_conv(x, weight, sharder=sharder, document_ids=document_ids)


@jax.jit
def dense(tokens, document_ids, shared):
    return reference.causal_conv(*tokens, *shared, document_ids)


def inputs(seed, batch, length, channels=3, width=4, dtype=np.float64):
    rng = np.random.default_rng(seed)
    shapes = (batch, length, channels), (channels, width), (batch, length, channels)
    x, weight, cotangent = (jnp.asarray(rng.normal(size=shape), dtype) for shape in shapes)
    return (x,), (weight,), cotangent


@pytest.mark.quick
@pytest.mark.parametrize("name", ["contiguous", "zigzag"])
def test_r49_edges_of_chunks(name):
    length, cp = 128, 4
    tokens, shared, cotangent = inputs(0, 1, length, dtype=np.float32)
    got = value_and_grads(sharded(op, name, cp, length), tokens, None, shared, cotangent)
    wanted = value_and_grads(dense, tokens, None, shared, cotangent)
    chunk = length // (cp * layout_from_name(name, cp).runs)
    for edge in range(0, length, chunk):
        np.testing.assert_allclose(got[0][:, edge : edge + 3], wanted[0][:, edge : edge + 3], rtol=1e-5, atol=1e-6)
        if edge:
            np.testing.assert_allclose(got[1][:, edge - 3 : edge], wanted[1][:, edge - 3 : edge], rtol=1e-5, atol=1e-6)
    assert_close(got, wanted, 1e-6)


@pytest.mark.parametrize(("name", "cp"), LAYOUTS)
def test_float64_equals_the_definition(name, cp):
    length = 29  # runs of 2 tokens under zigzag 8: shorter than the halo
    ids = documents((4, 4, 1, 1, 6, 11, -2), (1, 15, 8, 3, 2))
    with jax.enable_x64(True):
        tokens, shared, cotangent = inputs(1, 2, length)
        wanted = value_and_grads(dense, tokens, ids, shared, cotangent)
        got = value_and_grads(sharded(op, name, cp, length), tokens, ids, shared, cotangent)
    assert_close(got, wanted, 1e-12)


@pytest.mark.parametrize(
    ("name", "cp", "length"), [("contiguous", 4, 8), ("contiguous", 4, 4), ("zigzag", 4, 16), ("zigzag", 4, 8)]
)
def test_runs_shorter_than_the_halo(name, cp, length):
    """Runs of two tokens and of one: the halo spans several ranks."""
    ids = documents((length // 2 + 1, length - length // 2 - 1))
    with jax.enable_x64(True):
        tokens, shared, cotangent = inputs(2, 1, length)
        for document_ids in (None, ids):
            got = value_and_grads(sharded(op, name, cp, length), tokens, document_ids, shared, cotangent)
            assert_close(got, value_and_grads(dense, tokens, document_ids, shared, cotangent), 1e-12)


@settings(max_examples=5)
@given(
    st.sampled_from([("identity", 1), ("contiguous", 4), ("zigzag", 2), ("zigzag", 4)]),
    st.integers(1, 5),
    st.lists(st.integers(1, 6), min_size=1, max_size=4),
)
def test_any_width_and_documents(layout, width, lengths):
    ids = documents(lengths)
    with jax.enable_x64(True):
        tokens, shared, _ = inputs(3, 1, ids.shape[1], width=width)
        got = sharded(op, *layout, ids.shape[1])(tokens, ids, shared)
        assert_close([got], [dense(tokens, ids, shared)], 1e-12)


def test_bfloat16_sums_in_float32():
    tokens, shared, _ = inputs(4, 1, 16, dtype=jnp.bfloat16)
    got = sharded(op, "zigzag", 2, 16)(tokens, None, shared)
    wanted = dense([x.astype(jnp.float32) for x in tokens], None, [x.astype(jnp.float32) for x in shared])
    assert got.dtype == jnp.bfloat16
    np.testing.assert_array_equal(got, wanted.astype(jnp.bfloat16))


def test_what_does_not_fit_is_refused():
    sharder = make_sharder(16, layout_from_name("zigzag", 2))
    x, weight = jnp.zeros((1, 8, 3)), jnp.zeros((3, 4))
    with pytest.raises(ValueError, match=r"Striped\(cp=2.*use a contiguous or zigzag layout"):
        causal_conv(x, weight, sharder=make_sharder(16, Striped(2)))
    with pytest.raises(ValueError, match=r"x of shape \(1, 16, 3\).*L=8"):
        causal_conv(jnp.zeros((1, 16, 3)), weight, sharder=sharder)
    with pytest.raises(ValueError, match=r"weight \(4, 3\)"):
        causal_conv(x, weight.T, sharder=sharder)
