"""Dense attention on whole sequences: short, quadratic in memory, in any precision. What the fast code must equal."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from cpjax.attention.mask import Mask


def dense_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array | None = None,
    *,
    mask: Mask,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: jax.Array | None = None,
) -> jax.Array:
    """The same function as `cpjax.attention.attention`, on whole sequences.

    Args:
        q: [B, S, H, D]; k: [B, S, K, D]; v: [B, S, K, Dv] or None, tokens in global order.
        mask: with streams [B, S].

    Returns:
        [B, S, H, Dv]; rows without a key are 0 and have gradient 0.
    """
    heads, width = q.shape[2:]
    dtype = jnp.promote_types(q.dtype, jnp.float32)
    k, v = (jnp.repeat(x, heads // x.shape[2], axis=2) for x in (k, k if v is None else v))
    allowed = allowed_pairs(mask, q.shape[1])[:, None]
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k, preferred_element_type=dtype)
    scores = scores * (width**-0.5 if scale is None else scale)
    if softcap is not None:
        scores = softcap * jnp.tanh(scores / softcap)
    scores = jnp.where(allowed, scores, -jnp.inf)
    if sinks is not None:
        column = jnp.broadcast_to(sinks.astype(dtype)[:, None, None], (*scores.shape[:3], 1))
        scores = jnp.concatenate([scores, column], -1)
    peak = jax.lax.stop_gradient(scores.max(-1, keepdims=True))
    p = jnp.exp(scores - jnp.where(peak == -jnp.inf, 0, peak))
    total = p.sum(-1, keepdims=True)
    p = (p / jnp.where(total > 0, total, 1))[..., : k.shape[1]]
    return jnp.einsum("bhqk,bkhd->bqhd", p.astype(v.dtype), v, preferred_element_type=dtype).astype(q.dtype)


def allowed_pairs(mask: Mask, length: int) -> jax.Array:
    """bool [B or 1, S, S]: the formula in `Mask`, pair by pair."""
    i, j = jnp.arange(length)[:, None], jnp.arange(length)
    left, right = mask.window
    text = jnp.ones((length, length), bool)
    if mask.causal:
        text &= j <= i
    if left is not None:
        text &= j >= i - left
    if right is not None:
        text &= j <= i + right
    if mask.slices is not None:
        q_start, q_end, k_start, k_end, kind = mask.slices.T[..., None, None]
        inside = (q_start <= i) & (i < q_end) & (k_start <= j) & (j < k_end)
        inside &= ((kind != 1) & (kind != 3)) | (j - k_end <= i - q_end)
        inside &= ((kind != 2) & (kind != 3)) | (j - k_start >= i - q_start)
        text &= inside.any(0)
    allowed = text[None]
    if mask.vision_group_ids is not None:
        groups = mask.vision_group_ids
        same = (groups[:, :, None] == groups[:, None, :]) & (groups[:, None, :] >= 0)
        if mask.windowed_groups and left is not None:
            same &= j >= i - left
        allowed = allowed | same
    if mask.prefix is not None:
        allowed = allowed | mask.prefix[:, None, :]
    if mask.document_ids is not None:
        ids = mask.document_ids
        allowed = allowed & (ids[:, :, None] == ids[:, None, :]) & (ids[:, None, :] > 0)
    if mask.padding_mask is not None:
        allowed = allowed & ~mask.padding_mask[:, None, :]
    return allowed
