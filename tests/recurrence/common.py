"""Running a recurrence on the ranks of a layout, as a function of full sequences."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from cpjax.shard import layout_from_name, make_sharder

LAYOUTS = [("identity", 1), *((name, cp) for name in ("contiguous", "zigzag") for cp in (2, 4, 8))]


def mesh_of(cp, dp=1):
    return jax.make_mesh(
        (dp, cp), ("dp", "cp"), devices=jax.devices()[: dp * cp], axis_types=(jax.sharding.AxisType.Auto,) * 2
    )


def sharded(op, name, cp, length):
    """full(*tokens, document_ids=None, shared=()): `op` on the ranks, for tokens [B, length, ...] in global order.

    Tokens enter replicated and are sharded inside, so gradients of full sequences come back summed over the ranks.
    `op` gets the local tokens, then the `shared` arrays, sharder= and document_ids=.
    """
    sharder = make_sharder(length, layout_from_name(name, cp))

    def body(tokens, document_ids, shared):
        local = [sharder.shard(x, fill=0) for x in tokens]
        ids = None if document_ids is None else sharder.shard(document_ids, fill=0)
        return op(*local, *shared, sharder=sharder, document_ids=ids)

    @jax.jit
    def full(tokens, document_ids=None, shared=()):
        if cp == 1:
            out = body(tokens, document_ids, shared)
        else:
            out = jax.shard_map(body, mesh=mesh_of(cp), in_specs=P(), out_specs=P(None, "cp"), axis_names={"cp"})(
                tokens, document_ids, shared
            )
        return out[:, sharder.layout.inverse(sharder.padded_length)][:, :length]

    return full


@functools.partial(jax.jit, static_argnums=0)
def value_and_grads(full, tokens, document_ids, shared, cotangent):
    """Output, and the gradients of sum(output * cotangent) in `tokens` and `shared`."""
    out, pull = jax.vjp(lambda tokens, shared: full(tokens, document_ids, shared), tokens, shared)
    return [out, *jax.tree.leaves(pull(cotangent.astype(out.dtype)))]


def assert_close(got, wanted, tolerance):
    """Every array within `tolerance` of the largest entry of the wanted one."""
    assert len(got) == len(wanted)
    for number, (a, b) in enumerate(zip(got, wanted, strict=True)):
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        error = np.abs(a - b).max()
        assert error <= tolerance * max(np.abs(b).max(), 1e-30), f"array {number}: {error} of {np.abs(b).max()}"


def delta_inputs(seed, batch, length, heads=2, keys=4, values=6, dtype=np.float64):
    rng = np.random.default_rng(seed)
    q, k = (rng.normal(size=(batch, length, heads, keys)) for _ in range(2))
    q, k = (x / np.linalg.norm(x, axis=-1, keepdims=True) for x in (q, k))
    v = rng.normal(size=(batch, length, heads, values))
    log_decay = -0.3 * rng.exponential(size=(batch, length, heads))
    beta = rng.uniform(size=(batch, length, heads))
    return tuple(jnp.asarray(x, dtype) for x in (q, k, v, log_decay, beta))


def ssd_inputs(seed, batch, length, heads=4, groups=2, width=3, states=5, dtype=np.float64):
    """Tokens (x, dt, b, c) and shared parameters (a, skip)."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(batch, length, heads, width))
    dt = 0.3 * rng.exponential(size=(batch, length, heads))
    b, c = (rng.normal(size=(batch, length, groups, states)) for _ in range(2))
    a, skip = -rng.uniform(0.1, 2, size=heads), rng.normal(size=heads)
    return tuple(jnp.asarray(v, dtype) for v in (x, dt, b, c)), tuple(jnp.asarray(v, dtype) for v in (a, skip))


def documents(*rows):
    """int32 [B, S] from the document lengths of each row; a trailing negative length is that many pads (id 0)."""
    ids = [np.concatenate([np.full(abs(n), 0 if n < 0 else i + 1) for i, n in enumerate(row)]) for row in rows]
    return np.stack(ids).astype(np.int32)


CASES = {
    "one document": (48, None),
    # boundaries on run and chunk edges (8, 16, 24), inside chunks, documents of one token, pads at the end
    "documents": (45, documents((8, 8, 1, 1, 6, 13, 1, -7), (1, 15, 16, 3, 10))),
}
"""Length, and document ids of two rows."""

on_every_layout = pytest.mark.parametrize(
    ("name", "cp", "case"),
    [*((*layout, "documents") for layout in LAYOUTS), ("contiguous", 4, "one document"), ("zigzag", 4, "one document")],
)
