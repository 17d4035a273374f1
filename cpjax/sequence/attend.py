"""Attention over selected blocks of keys."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp

from cpjax.sequence.runs import check_one_map
from cpjax.sequence.select import take_keys
from cpjax.shard import Sharder

_TILE = 128
"""Queries whose keys are held at a time."""


def attend_blocks(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    blocks: jax.Array,
    *,
    block: int,
    sharder: Sharder,
    causal: bool = True,
    document_ids: jax.Array | None = None,
    scale: float | None = None,
) -> jax.Array:
    """Softmax attention of this rank's queries to the keys of the blocks selected for them, whoever holds these.

    The sparse layers of MiniMax-M3, with `blocks` from `top_k_blocks`. Query head h reads key head h // (H / K), and
    the blocks chosen for it. A query without an allowed key gives 0. Differentiable in q, k and v.

    Queries go in tiles of 128, for each of which keys and values pass around the ring once, and in the backward pass
    once more, with their gradients behind them. So memory is that of 128 count block rows for each key head.

    Args:
        q: [B, L, H, D], this rank's tokens.
        k: [B, L, K, D], K a divisor of H; v: [B, L, K, Dv].
        blocks: int [B, L, K, count], numbers of blocks of `block` positions, each at most once a query; -1: none.
        causal: only keys up to the query.
        document_ids: int [B, L], 1-based, 0 = pad: only keys of the query's own document. Without them the keys are all
            before `sharder.end`.
        scale: factor on the scores, D ** -0.5 by default.

    Returns:
        [B, L, H, Dv] in the dtype of q; scores and sums are in float32 or wider.

    Raises:
        ValueError: shapes that do not fit each other or the sharder.
    """
    _check(q, k, v, blocks, block, scale, document_ids, sharder)
    (batch, length, heads, width), kv_heads = q.shape, k.shape[2]
    dtype = jnp.promote_types(q.dtype, jnp.float32)
    factor = width**-0.5 if scale is None else scale

    def by_key_head(x: jax.Array) -> jax.Array:  # [B, n, K, ...] -> [B K, n, ...]: each selects for itself
        return jnp.moveaxis(x, 2, 1).reshape(batch * kv_heads, x.shape[1], *x.shape[3:])

    rows = by_key_head(jnp.concatenate([k, v], -1))
    ids = None if document_ids is None else jnp.repeat(document_ids, kv_heads, axis=0)

    @jax.checkpoint  # else the rows of all queries would be kept
    def one_tile(tile: tuple[jax.Array, jax.Array, jax.Array, jax.Array | None]) -> jax.Array:
        q, blocks, here, own = tile  # [B K, t, G, D], [B K, t, count], [t], [B K, t]
        places = blocks[..., None] * block + jnp.arange(block, dtype=jnp.int32)
        allowed = (blocks >= 0)[..., None] & (places < sharder.end)
        if causal:
            allowed &= places <= here[:, None, None]
        places = jnp.where(allowed, places, -1).reshape(*blocks.shape[:2], -1)
        allowed = places >= 0
        if ids is not None and own is not None:
            allowed &= (take_keys(ids, places, sharder=sharder) == own[..., None]) & (own != 0)[..., None]
        taken = take_keys(rows, places, sharder=sharder)
        scores = jnp.einsum("btgd,btnd->btgn", q, taken[..., :width], preferred_element_type=dtype) * factor
        scores = jnp.where(allowed[:, :, None], scores, -jnp.inf)
        peak = jax.lax.stop_gradient(scores.max(-1, keepdims=True))
        p = jnp.exp(scores - jnp.where(peak == -jnp.inf, 0, peak))
        total = p.sum(-1, keepdims=True)
        values = taken[..., width:]
        out = jnp.einsum("btgn,btnd->btgd", p.astype(values.dtype), values, preferred_element_type=dtype)
        return (out / jnp.where(total > 0, total, 1)).astype(q.dtype)

    size = min(_TILE, length)

    def cut(x: jax.Array, axis: int = 1) -> jax.Array:  # [.., L, ..] -> [tiles, .., size, ..]
        x = jnp.pad(x, [(0, -length % size if a == axis else 0) for a in range(x.ndim)])
        return jnp.moveaxis(x.reshape(*x.shape[:axis], -1, size, *x.shape[axis + 1 :]), axis, 0)

    grouped = by_key_head(q.reshape(batch, length, kv_heads, heads // kv_heads, width))
    own = None if ids is None else cut(ids)
    out = jax.lax.map(one_tile, (cut(grouped), cut(by_key_head(blocks)), cut(sharder.positions(), 0), own))
    out = jnp.moveaxis(out, 0, 1).reshape(batch, kv_heads, -1, *out.shape[3:])[:, :, :length]
    return jnp.moveaxis(out, 1, 2).reshape(batch, length, heads, -1)


def _check(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    blocks: jax.Array,
    block: int,
    scale: float | None,
    document_ids: jax.Array | None,
    sharder: Sharder,
) -> None:
    check_one_map("attend_blocks", sharder)
    if not q.dtype == k.dtype == v.dtype or not jnp.issubdtype(q.dtype, jnp.floating):
        raise ValueError(
            f"attend_blocks was given q {q.dtype}, k {k.dtype}, v {v.dtype}: convert them to one floating dtype first"
        )
    if scale is not None and (isinstance(scale, jax.core.Tracer) or not math.isfinite(scale)):
        raise ValueError(f"attend_blocks was given scale={scale}: give a finite number that is known when it is traced")
    if block < 1:
        raise ValueError(f"attend_blocks was given block={block}: it must be at least 1")
    if not q.ndim == k.ndim == v.ndim == blocks.ndim == 4 or (
        q.shape[1] != sharder.local_length
        or not q.shape[:2] == k.shape[:2] == v.shape[:2] == blocks.shape[:2]
        or not k.shape[2] == v.shape[2] == blocks.shape[2]
        or q.shape[3] != k.shape[3]
        or 0 in (*q.shape, *v.shape, *blocks.shape)
        or q.shape[2] % k.shape[2]
    ):
        raise ValueError(
            f"attend_blocks was given q {q.shape}, k {k.shape}, v {v.shape}, blocks {blocks.shape}: it needs q "
            f"[B, L, H, D], k [B, L, K, D], v [B, L, K, Dv] and blocks [B, L, K, count] of this rank's "
            f"L={sharder.local_length} tokens, with K a divisor of H and no size of 0"
        )
    if document_ids is not None and document_ids.shape != q.shape[:2]:
        raise ValueError(
            f"attend_blocks was given document_ids of shape {document_ids.shape}, but the local tokens are [B, L] = "
            f"{q.shape[:2]}: shard them like q"
        )
