"""Runs, chunks and tiles of a single token: value and gradient of everything that looks at other tokens.

In float64 against the definitions, inside a shard_map with check_vma=True.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cpjax.attention import Mask, attention, dense_attention
from cpjax.recurrence import causal_conv, gated_delta_rule, ssd
from cpjax.sequence import attend_blocks, pool, shift
from tests.recurrence import reference
from tests.recurrence.common import assert_close, delta_inputs, documents, sharded, value_and_grads

TAPS = np.cos(np.arange(12.0)).reshape(3, 4)


def all_of_it(chunk_size):
    def op(q, k, v, log_decay, beta, *, sharder, document_ids):
        where = {"sharder": sharder, "document_ids": document_ids}
        blocks = jnp.arange(sharder.padded_length, dtype=jnp.int32)
        blocks = jnp.broadcast_to(blocks, (*k.shape[:3], len(blocks)))
        outputs = (
            gated_delta_rule(q, k, v, log_decay, beta, chunk_size=chunk_size, **where),
            ssd(v, beta, -jnp.ones_like(v[0, 0, :, 0]), q[:, :, :1], k[:, :, :1], chunk_size=chunk_size, **where),
            causal_conv(v[:, :, 0], jnp.asarray(TAPS), **where),
            attention(q, k, v, sharder=sharder, mask=Mask(document_ids=document_ids)),
            attend_blocks(q, k, v, blocks, block=1, **where),
            shift(v, 1, fill=0, **where),
            pool(v, 2, 1, logits=v, **where).values[:, : v.shape[1]],
        )
        return jnp.concatenate([x.reshape(*x.shape[:2], -1) for x in outputs], -1)

    return op


@jax.jit
def defined(tokens, document_ids, shared):
    q, k, v, _, beta = tokens

    def ahead(x):
        return jnp.pad(x[:, 1:], [(0, 0), (0, 1), (0, 0), (0, 0)])

    follows = (document_ids == jnp.pad(document_ids[:, 1:], [(0, 0), (0, 1)]))[..., None, None]
    attended = dense_attention(q, k, v, mask=Mask(document_ids=document_ids))
    weights = jnp.exp(v)
    outputs = (
        reference.gated_delta_rule(*tokens, document_ids),
        reference.ssd(v, beta, q[:, :, :1], k[:, :, :1], -jnp.ones(2), jnp.zeros(2), document_ids),
        reference.causal_conv(v[:, :, 0], jnp.asarray(TAPS), document_ids),
        attended,
        attended,
        jnp.where(follows, ahead(v), 0),
        (weights * v + jnp.where(follows, ahead(weights * v), 0)) / (weights + jnp.where(follows, ahead(weights), 0)),
    )
    return jnp.concatenate([x.reshape(*x.shape[:2], -1) for x in outputs], -1)


@pytest.mark.parametrize(
    ("name", "cp", "lengths", "chunk_size"),
    [
        ("contiguous", 2, (2,), 64), ("zigzag", 2, (3, 1), 64), ("contiguous", 2, (3, 4), 1), ("identity", 1, (1,), 64),
    ],
)  # fmt: skip
def test_every_gradient(name, cp, lengths, chunk_size):
    """A rank or a chunk of one token; a sequence of one, of which other ranks have nothing but padding."""
    ids = documents(lengths)
    with jax.enable_x64(True):
        tokens = delta_inputs(0, 1, sum(lengths), values=3)
        wanted = defined(tokens, ids, ())
        cotangent = jnp.cos(jnp.arange(1.0 * wanted.size)).reshape(wanted.shape)
        got = value_and_grads(sharded(all_of_it(chunk_size), name, cp, sum(lengths)), tokens, ids, (), cotangent)
        assert_close(got, value_and_grads(defined, tokens, ids, (), cotangent), 1e-12)
