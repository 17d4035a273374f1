"""The gated delta rule against the token-by-token recurrence, on every layout."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cpjax.recurrence import continue_gated_delta_rule, gated_delta_rule
from cpjax.shard import Striped, layout_from_name, make_sharder
from tests.recurrence import reference
from tests.recurrence.common import (
    CASES,
    assert_close,
    delta_inputs,
    documents,
    on_every_layout,
    sharded,
    value_and_grads,
)


def chunked(size):
    def op(*tokens, sharder, document_ids):
        return gated_delta_rule(*tokens, sharder=sharder, document_ids=document_ids, chunk_size=size)

    return op


@jax.jit
def by_token(tokens, document_ids, shared):
    return reference.gated_delta_rule(*tokens, document_ids)


@on_every_layout
def test_float64_equals_the_recurrence(name, cp, case):
    length, ids = CASES[case]
    with jax.enable_x64(True):
        tokens = delta_inputs(0, 2, length)
        cotangent = jnp.asarray(np.random.default_rng(1).normal(size=tokens[2].shape))
        wanted = value_and_grads(by_token, tokens, ids, (), cotangent)
        got = value_and_grads(sharded(chunked(8), name, cp, length), tokens, ids, (), cotangent)
    assert_close(got, wanted, 1e-12)


@pytest.mark.parametrize(("name", "cp"), [("contiguous", 4), ("zigzag", 8)])
def test_float32_does_not_depend_on_the_layout(name, cp):
    length, ids = 100, documents((30, 1, 40, 20, -9))
    tokens = delta_inputs(2, 1, length, dtype=jnp.float32)

    def loss_and_grads(name, cp):
        full = sharded(chunked(64), name, cp, length)
        loss, grads = jax.value_and_grad(lambda tokens: jnp.square(full(tokens, ids)).sum())(tokens)
        return [loss], grads

    (loss, grads), (dense_loss, dense_grads) = loss_and_grads(name, cp), loss_and_grads("identity", 1)
    assert_close(loss, dense_loss, 1e-6)
    assert_close(grads, dense_grads, 1e-5)


@settings(max_examples=5)
@given(
    st.sampled_from([("identity", 1), ("contiguous", 2), ("zigzag", 2), ("zigzag", 4)]),
    st.integers(1, 9),
    st.lists(st.integers(1, 12), min_size=1, max_size=4),
    st.integers(0, 5),
)
def test_any_documents_lengths_and_chunks(layout, size, lengths, pads):
    ids = documents((*lengths, -pads)) if pads else documents(lengths)
    with jax.enable_x64(True):
        tokens = delta_inputs(3, 1, ids.shape[1], heads=1)
        got = sharded(chunked(size), *layout, ids.shape[1])(tokens, ids)
        assert_close([got], [by_token(tokens, ids, ())], 1e-12)


@pytest.mark.quick
def test_the_rule_of_qwen3_5():
    """The loop of the published layer in numpy: decay, read with k, write the beta-weighted error, read with q."""
    q, k, v, log_decay, beta = (np.asarray(x, np.float64) for x in delta_inputs(4, 1, 20, dtype=np.float32))
    state, wanted = np.zeros((2, 4, 6)), []
    for t in range(20):
        state = state * np.exp(log_decay[0, t])[:, None, None]
        memory = (state * k[0, t][:, :, None]).sum(1)
        delta = (v[0, t] - memory) * beta[0, t][:, None]
        state = state + k[0, t][:, :, None] * delta[:, None, :]
        wanted.append((state * q[0, t][:, :, None]).sum(1))
    got = sharded(chunked(8), "zigzag", 2, 20)(delta_inputs(4, 1, 20, dtype=np.float32))
    assert_close([got[0]], [np.stack(wanted)], 1e-6)


@pytest.mark.parametrize(("name", "cp"), [("identity", 1), ("zigzag", 2)])
def test_strong_decays_stay_finite_and_do_not_blur_weak_ones(name, cp):
    length, ids = 32, documents((21, 9, -2))
    tokens = list(delta_inputs(5, 1, length, dtype=jnp.float32))
    choices = np.random.default_rng(6).choice([-1e-3, -1e-2, -60.0, -3e4, -1e30, -np.inf], size=tokens[3].shape)
    tokens[3] = jnp.asarray(choices, jnp.float32).at[:, ::3].set(-1e-3)
    got = value_and_grads(sharded(chunked(16), name, cp, length), tuple(tokens), ids, (), jnp.ones_like(tokens[2]))
    assert all(np.isfinite(x).all() for x in got)
    with jax.enable_x64(True):
        wanted = by_token([jnp.asarray(x, jnp.float64) for x in tokens], ids, ())
        assert_close(got[:1], [wanted], 1e-6)


def test_equal_keys_are_stable():
    """Blank patches give equal keys; powers of the system's matrix then reach 1e18 while its inverse stays below 1."""
    q, k, v, log_decay, beta = delta_inputs(7, 1, 64, dtype=jnp.float32)
    k = k[:, :1] + 1e-2 * k
    k = k / jnp.linalg.norm(k, axis=-1, keepdims=True)
    tokens = (q, k, v, 1e-3 * log_decay, jnp.ones_like(beta))
    cotangent = jnp.cos(v)
    got = value_and_grads(sharded(chunked(64), "identity", 1, 64), tokens, None, (), cotangent)
    with jax.enable_x64(True):
        tokens = tuple(jnp.asarray(x, jnp.float64) for x in tokens)
        assert_close(got, value_and_grads(by_token, tokens, None, (), cotangent), 1e-4)


def test_bfloat16_in_bfloat16_out_float32_between():
    tokens = delta_inputs(8, 1, 64, dtype=jnp.bfloat16)
    got = sharded(chunked(16), "zigzag", 2, 64)(tokens)
    assert got.dtype == jnp.bfloat16
    wanted = by_token([x.astype(jnp.float32) for x in tokens], None, ())
    assert_close([got], [wanted.astype(jnp.bfloat16)], 2**-8)


def test_a_sequence_goes_on_where_it_was_left():
    """In parts of any length, down to one token, which none of the chunks need to divide; documents in the first."""
    ids = documents((9, 4), (13,))
    go_on = jax.jit(functools.partial(continue_gated_delta_rule, chunk_size=8))
    with jax.enable_x64(True):
        tokens = delta_inputs(10, 2, 30)
        whole = jnp.concatenate([jnp.asarray(ids), jnp.broadcast_to(ids[:, -1:], (2, 17))], axis=1)
        wanted = by_token(tokens, whole, ())
        got, state, start = [], None, 0
        for length in (13, 1, 1, 15):
            part = [x[:, start : start + length] for x in tokens]
            out, state = go_on(*part, state=state, document_ids=None if start else ids)
            got.append(out)
            start += length
        assert_close([jnp.concatenate(got, axis=1)], [wanted], 1e-12)


def test_what_does_not_fit_is_refused():
    sharder = make_sharder(16, layout_from_name("zigzag", 2))
    q, k, v, g, beta = delta_inputs(9, 1, 8, dtype=np.float32)
    with pytest.raises(ValueError, match=r"Striped\(cp=2.*use a contiguous or zigzag layout"):
        gated_delta_rule(q, k, v, g, beta, sharder=make_sharder(16, Striped(2)))
    with pytest.raises(ValueError, match=r"k of shape \(1, 7, 2, 4\).*L=8"):
        gated_delta_rule(q, k[:, :7], v, g, beta, sharder=sharder)
    with pytest.raises(ValueError, match="document_ids of shape"):
        gated_delta_rule(q, k, v, g, beta, sharder=sharder, document_ids=jnp.zeros((2, 8), jnp.int32))
    with pytest.raises(ValueError, match="repeat key heads onto value heads"):
        gated_delta_rule(q[:, :, :1], k[:, :, :1], v, g, beta, sharder=sharder)
    with pytest.raises(ValueError, match="chunk_size=0"):
        gated_delta_rule(q, k, v, g, beta, sharder=sharder, chunk_size=0)
    with pytest.raises(ValueError, match=r"state \(1, 2, 4, 5\): q .* need \[B, H, Dk, Dv\] = \(1, 2, 4, 6\)"):
        continue_gated_delta_rule(q, k, v, g, beta, state=jnp.zeros((1, 2, 4, 5)))
    with pytest.raises(ValueError, match="a state and document_ids"):
        continue_gated_delta_rule(q, k, v, g, beta, state=v, document_ids=jnp.ones((1, 8), jnp.int32))
