"""Mamba2's recurrence against the token-by-token one, on every layout."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cpjax.recurrence import ssd
from cpjax.shard import Striped, layout_from_name, make_sharder
from tests.recurrence import reference
from tests.recurrence.common import (
    CASES,
    assert_close,
    documents,
    on_every_layout,
    sharded,
    ssd_inputs,
    value_and_grads,
)
from tests.sequence.common import any_documents


def chunked(size):
    def op(x, dt, b, c, a, skip, *, sharder, document_ids):
        return ssd(x, dt, a, b, c, skip=skip, sharder=sharder, document_ids=document_ids, chunk_size=size)

    return op


@jax.jit
def by_token(tokens, document_ids, shared):
    return reference.ssd(*tokens, *shared, document_ids)


@on_every_layout
def test_float64_equals_the_recurrence(name, cp, case):
    length, ids = CASES[case]
    with jax.enable_x64(True):
        tokens, shared = ssd_inputs(0, 2, length)
        cotangent = jnp.asarray(np.random.default_rng(1).normal(size=tokens[0].shape))
        wanted = value_and_grads(by_token, tokens, ids, shared, cotangent)
        got = value_and_grads(sharded(chunked(8), name, cp, length), tokens, ids, shared, cotangent)
    assert_close(got, wanted, 1e-12)


@pytest.mark.parametrize(("name", "cp"), [("contiguous", 4), ("zigzag", 8)])
def test_float32_does_not_depend_on_the_layout(name, cp):
    length, ids = 100, documents((30, 1, 40, 20, -9))
    tokens, shared = ssd_inputs(2, 1, length, dtype=jnp.float32)
    cotangent = jnp.cos(tokens[0])
    got, wanted = (
        value_and_grads(sharded(chunked(64), *layout, length), tokens, ids, shared, cotangent)
        for layout in ((name, cp), ("identity", 1))
    )
    assert_close(got, wanted, 1e-5)


@functools.cache
def program(layout, size, length):
    return sharded(chunked(size), *layout, length)


@settings(max_examples=30)
@given(
    st.sampled_from([(("identity", 1), 4), (("contiguous", 8), 4), (("contiguous", 2), 5), (("zigzag", 4), 2)]),
    any_documents(21),
)
def test_any_documents(layout_and_chunk, ids):
    with jax.enable_x64(True):
        tokens, shared = ssd_inputs(3, 1, 21, heads=2, groups=1)
        got = program(*layout_and_chunk, 21)(tokens, ids, shared)
        assert_close([got], [by_token(tokens, ids, shared)], 1e-12)


@pytest.mark.quick
def test_the_recurrence_of_mamba2():
    """The published step in numpy: decay by exp(dt A), add dt B x, read with C, add D x; groups share B and C."""
    tokens, shared = ssd_inputs(4, 1, 20, dtype=np.float32)
    x, dt, b, c, a, skip = (np.asarray(v, np.float64) for v in (*tokens, *shared))
    state, wanted = np.zeros((4, 3, 5)), []
    for t in range(20):
        for head in range(4):
            state[head] *= np.exp(dt[0, t, head] * a[head])
            state[head] += dt[0, t, head] * np.outer(x[0, t, head], b[0, t, head // 2])
        read = [state[head] @ c[0, t, head // 2] + skip[head] * x[0, t, head] for head in range(4)]
        wanted.append(np.stack(read))
    got = sharded(chunked(8), "zigzag", 2, 20)(tokens, None, shared)
    assert_close([got[0]], [np.stack(wanted)], 1e-6)


@pytest.mark.parametrize(("name", "cp"), [("identity", 1), ("zigzag", 2)])
def test_strong_decays_stay_finite_and_do_not_blur_weak_ones(name, cp):
    length, ids = 32, documents((21, 9, -2))
    (x, dt, b, c), (a, skip) = ssd_inputs(5, 1, length, dtype=jnp.float32)
    choices = np.random.default_rng(6).choice([0, 1e-3, 1e-2, 60.0, 3e4, 1e8], size=dt.shape)
    dt = jnp.asarray(choices, jnp.float32).at[:, ::3].set(1e-3)
    tokens, shared = (x / jnp.maximum(dt, 1)[..., None], dt, b, c), (a, skip)
    got = value_and_grads(sharded(chunked(16), name, cp, length), tokens, ids, shared, jnp.ones_like(x))
    assert all(np.isfinite(v).all() for v in got)
    with jax.enable_x64(True):
        wanted = by_token([jnp.asarray(v, jnp.float64) for v in tokens], ids, [v.astype(jnp.float64) for v in shared])
        assert_close(got[:1], [wanted], 1e-6)


def test_bfloat16_in_bfloat16_out_float32_between():
    tokens, shared = ssd_inputs(8, 1, 64, dtype=jnp.bfloat16)
    got = sharded(chunked(16), "zigzag", 2, 64)(tokens, None, shared)
    assert got.dtype == jnp.bfloat16
    wanted = by_token([v.astype(jnp.float32) for v in tokens], None, [v.astype(jnp.float32) for v in shared])
    assert_close([got], [wanted.astype(jnp.bfloat16)], 2**-8)


def test_what_does_not_fit_is_refused():
    sharder = make_sharder(16, layout_from_name("zigzag", 2))
    (x, dt, b, c), (a, skip) = ssd_inputs(9, 1, 8, dtype=np.float32)
    with pytest.raises(ValueError, match=r"Striped\(cp=2.*use a contiguous or zigzag layout"):
        ssd(x, dt, a, b, c, sharder=make_sharder(16, Striped(2)))
    with pytest.raises(ValueError, match=r"dt of shape \(1, 7, 4\).*L=8"):
        ssd(x, dt[:, :7], a, b, c, sharder=sharder)
    with pytest.raises(ValueError, match="G a divisor of H"):
        ssd(x[:, :, :3], dt[:, :, :3], a[:3], b, c, sharder=sharder)
    with pytest.raises(ValueError, match=r"skip \(3,\)"):
        ssd(x, dt, a, b, c, skip=skip[:3], sharder=sharder)
    with pytest.raises(ValueError, match="ssd was given chunk_size=0"):
        ssd(x, dt, a, b, c, sharder=sharder, chunk_size=0)
