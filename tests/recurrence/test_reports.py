"""Reports from users of such systems (R..) and an acceptance case of another library (F..), for the recurrences."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cpjax.recurrence import causal_conv, gated_delta_rule, ssd
from tests.recurrence.common import assert_close, delta_inputs, documents, sharded, value_and_grads


def all_three(q, k, v, log_decay, beta, *, sharder, document_ids):
    """Convolution, gated delta rule and Mamba2 side by side, [B, L, 3 H Dv]."""
    where = {"sharder": sharder, "document_ids": document_ids}
    flat = v.reshape(*v.shape[:2], -1)
    conv = causal_conv(flat, jnp.cos(jnp.arange(4.0 * flat.shape[2], dtype=v.dtype)).reshape(-1, 4), **where)
    delta = gated_delta_rule(q, k, v, log_decay, beta, chunk_size=8, **where)
    mamba = ssd(v, beta, -jnp.ones_like(v[0, 0, :, 0]), q[:, :, :1], k[:, :, :1], chunk_size=8, **where)
    return jnp.concatenate([conv, *(x.reshape(flat.shape) for x in (delta, mamba))], axis=-1)


@pytest.mark.parametrize("name", ["contiguous", "zigzag"])
def test_r16_a_document_does_not_see_another(name):
    """Five documents; other values in the first leave the outputs of the others bitwise the same."""
    ids = documents((7, 12, 1, 9, 11))
    tokens = delta_inputs(0, 1, 40, dtype=np.float32)
    full = sharded(all_three, name, 4, 40)
    changed = [x.at[:, 3].set(x[:, 30]) for x in tokens]
    before, after = (np.asarray(full(tuple(x), ids)) for x in (tokens, changed))
    assert (before[:, 3:7] != after[:, 3:7]).any(axis=(0, 2)).all()
    np.testing.assert_array_equal(before[:, 7:], after[:, 7:])


def test_r17_every_row_has_its_own_documents():
    """Three rows of different documents and pads: each row as if it were alone, values and gradients."""
    rows = ((5, 9, 10), (20, 1, -3), (3, 3, 3, 14, -1))
    with jax.enable_x64(True):
        tokens = delta_inputs(1, 3, 24)
        full = sharded(all_three, "zigzag", 2, 24)
        cotangent = jnp.sin(jnp.arange(3 * 24 * 36.0)).reshape(3, 24, 36)
        together = value_and_grads(full, tokens, documents(*rows), (), cotangent)
        for n, row in enumerate(rows):
            one = tuple(x[n : n + 1] for x in tokens)
            alone = value_and_grads(full, one, documents(row), (), cotangent[n : n + 1])
            assert_close([x[n : n + 1] for x in together], alone, 1e-12)


def test_r24_no_documents_is_one_document():
    tokens = delta_inputs(2, 1, 24, dtype=np.float32)
    full = sharded(all_three, "zigzag", 2, 24)
    assert_close([full(tokens)], [full(tokens, np.ones((1, 24), np.int32))], 1e-6)


@pytest.mark.parametrize("name", ["contiguous", "zigzag"])
def test_r31_documents_shorter_than_two_tokens_a_rank(name):
    """Documents of 1, 2, 3 and 38 tokens on eight ranks, as each of them alone on one."""
    lengths = (1, 2, 3, 38)
    with jax.enable_x64(True):
        tokens = delta_inputs(3, 1, sum(lengths))
        got = sharded(all_three, name, 8, sum(lengths))(tokens, documents(lengths))
        ends = np.cumsum(lengths)
        for start, end in zip(ends - lengths, ends, strict=True):
            alone = sharded(all_three, "identity", 1, end - start)(tuple(x[:, start:end] for x in tokens))
            assert_close([got[:, start:end]], [alone], 1e-12)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("name", ["contiguous", "zigzag"])
def test_f2_a_mamba2_mixer_equals_one_rank(name, packed):
    """Output, input gradient and the gradient of every parameter, in float64 to 1e-12 (there: up to 2.0 absolute)."""
    heads, width, groups, states, inner = 4, 4, 2, 3, 16
    channels = inner + 2 * groups * states
    rng = np.random.default_rng(4)

    def mixer(x, into, weight, dt_bias, a_log, skip, out, *, sharder, document_ids):
        gate, mixed, dt = jnp.split(x @ into, [inner, inner + channels], axis=-1)
        mixed = jax.nn.silu(causal_conv(mixed, weight, sharder=sharder, document_ids=document_ids))
        v, b, c = jnp.split(mixed, [inner, inner + groups * states], axis=-1)
        y = ssd(
            v.reshape(*v.shape[:2], heads, width), jax.nn.softplus(dt + dt_bias), -jnp.exp(a_log),
            *(z.reshape(*z.shape[:2], groups, states) for z in (b, c)),
            sharder=sharder, skip=skip, document_ids=document_ids, chunk_size=8,
        )  # fmt: skip
        return (y.reshape(v.shape) * jax.nn.silu(gate)) @ out

    shapes = (8, inner + channels + heads), (channels, 4), (heads,), (heads,), (heads,), (inner, 8)
    ids = documents((7, 11, 14)) if packed else None  # and no pads: 32 tokens
    with jax.enable_x64(True):
        tokens = (jnp.asarray(rng.normal(size=(1, 32, 8))),)
        parameters = tuple(jnp.asarray(rng.normal(size=shape)) / 2 for shape in shapes)
        cotangent = jnp.asarray(rng.normal(size=(1, 32, 8)))
        got, wanted = (
            value_and_grads(sharded(mixer, *layout, 32), tokens, ids, parameters, cotangent)
            for layout in ((name, 2), ("identity", 1))
        )
    assert_close(got, wanted, 1e-12)
