"""Running sequence tools on the ranks of a layout."""

import dataclasses
import functools
import re
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import strategies as st
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from cpjax.shard import Contiguous, Identity, Layout, Striped, Zigzag, make_sharder

RUNS = [Identity(), Contiguous(2), Contiguous(3), Contiguous(8), Zigzag(2), Zigzag(4)]


@dataclasses.dataclass(frozen=True)
class Scattered(Layout):
    """A layout without runs or closed form, like those made for one batch."""

    name: ClassVar[str] = "scattered"
    runs: ClassVar[int] = 0

    def _indices(self, local, rank):
        order = np.random.default_rng(0).permutation(local.size * self.cp).astype(np.int32)
        table = np.sort(order.reshape(self.cp, -1), axis=1)
        return jnp.asarray(table)[rank[..., 0]] if isinstance(rank, jax.Array) else table[rank[..., 0]]


LAYOUTS = [*RUNS, Striped(2), Striped(4), Scattered(3)]


def mesh_of(layout):
    devices = jax.devices()[: layout.cp]
    return jax.make_mesh((layout.cp,), ("cp",), devices=devices, axis_types=(jax.sharding.AxisType.Auto,))


def on_ranks(op, layout, length):
    """run(*full): `op(sharder, *local)` on every rank; its outputs with a leading axis of ranks.

    `full` are arrays [B, length, ...] in global order (None passes through), padded with zeros.
    """
    sharder = make_sharder(length, layout)

    def body(full):
        out = op(sharder, *[None if x is None else sharder.shard(x, fill=0) for x in full])
        return jax.tree.map(lambda x: x[None], out)

    if layout.cp > 1:
        body = jax.shard_map(body, mesh=mesh_of(layout), in_specs=P(), out_specs=P("cp"), axis_names={"cp"})
    jitted = jax.jit(body)
    return lambda *full: jitted(full)


def in_order(out, layout, length):
    """[cp, B, L, ...] in global order: [B, length, ...]."""
    out = np.moveaxis(np.asarray(out), 0, 1)
    out = out.reshape(out.shape[0], -1, *out.shape[3:])
    return out[:, layout.inverse(out.shape[1])][:, :length]


def documents(lengths, pads=0):
    """int32 [1, S]: documents of these lengths, then pads (id 0)."""
    ids = np.repeat(np.arange(1, len(lengths) + 1), lengths)
    return np.concatenate([ids, np.zeros(pads, int)]).astype(np.int32)[None]


def any_documents(length):
    """Up to six documents and three pads in `length` tokens."""

    def build(cuts, pads):
        ids = 1 + np.searchsorted(sorted(cuts), np.arange(length), side="right")
        return np.where(np.arange(length) < length - pads, ids, 0).astype(np.int32)[None]

    return st.builds(build, st.sets(st.integers(1, length - 1), max_size=5), st.integers(0, 3))


def allowed_pairs(length, causal, ids):
    """bool [B or 1, S (queries), S (keys)]."""
    mask = np.tri(length, dtype=bool)[None] if causal else np.ones((1, length, length), bool)
    return mask if ids is None else mask & (ids[:, :, None] == ids[:, None]) & (ids[:, :, None] != 0)


def best(scores, count):
    """The first `count` keys by falling score, then by position; -1 for scores of -inf."""
    order = np.argsort(-scores, axis=-1, kind="stable")[..., :count]
    order = np.where(np.take_along_axis(scores, order, -1) == -np.inf, -1, order)
    return np.pad(order, [(0, 0)] * (order.ndim - 1) + [(0, count - order.shape[-1])], constant_values=-1)


def dense_blocks(q, k, count, block, local, causal, ids):
    length = q.shape[1]
    blocks = -(-length // block)
    scores = np.where(allowed_pairs(length, causal, ids)[:, :, None], np.einsum("bthd,bnd->bthn", q, k), -np.inf)
    scores = np.pad(scores, [(0, 0)] * 3 + [(0, blocks * block - length)], constant_values=-np.inf)
    scores = scores.reshape(*scores.shape[:3], blocks, block).max(-1)
    back = np.arange(length)[:, None] // block - np.arange(blocks)
    forced = ((back >= 0) & (back < local))[None, :, None]
    return best(np.where(forced & (scores > -np.inf), np.inf, scores), count)


def moved_bytes(op, layout, length, dtype=jnp.float32):
    """Bytes of each collective of `op(sharder, x)` for x [1, length, 8], by kind, in order of size."""
    sharder = make_sharder(length, layout)
    mesh = mesh_of(layout)
    spec = P(None, "cp")
    run = jax.shard_map(functools.partial(op, sharder), mesh=mesh, in_specs=spec, out_specs=spec, axis_names={"cp"})
    x = jax.ShapeDtypeStruct((1, length, 8), dtype, sharding=NamedSharding(mesh, spec))
    text = jax.jit(run).lower(x).compile().as_text()
    kinds = "all-gather|all-reduce|reduce-scatter|collective-permute|all-to-all"
    found = re.findall(rf"= \(?f32\[([\d,]*)\].*? ({kinds})(?:-start)?\(", text)
    return sorted((kind, 4 * int(np.prod([int(n) for n in shape.split(",")]))) for shape, kind in found)
