"""Dense attention on whole sequences: short, quadratic in memory, in any precision. What the fast code must equal."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from cpjax.attention.mask import Mask


def dense_attention(q: jax.Array, k: jax.Array, v: jax.Array, *, mask: Mask, scale: float | None = None) -> jax.Array:
    """The same function as `cpjax.attention.attention`, on whole sequences.

    Args:
        q: [B, S, H, D]; k: [B, S, K, D]; v: [B, S, K, Dv], tokens in global order.
        mask: with streams [B, S].

    Returns:
        [B, S, H, Dv]; rows without a key are 0 and have gradient 0.
    """
    batch, length, heads, width = q.shape
    dtype = jnp.promote_types(q.dtype, jnp.float32)
    k, v = (jnp.repeat(x, heads // x.shape[2], axis=2) for x in (k, v))
    allowed = jnp.ones((batch, length, length), bool)
    if mask.causal:
        allowed &= jnp.tril(jnp.ones((length, length), bool))
    if mask.document_ids is not None:
        ids = mask.document_ids
        allowed &= (ids[:, :, None] == ids[:, None, :]) & (ids[:, None, :] > 0)
    if mask.padding_mask is not None:
        allowed &= ~mask.padding_mask[:, None, :]
    allowed = allowed[:, None]
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k, preferred_element_type=dtype)
    scores = jnp.where(allowed, scores * (width**-0.5 if scale is None else scale), -jnp.inf)
    peak = jax.lax.stop_gradient(scores.max(-1, keepdims=True))
    p = jnp.exp(scores - jnp.where(peak == -jnp.inf, 0, peak))
    p = p / jnp.where(allowed.any(-1, keepdims=True), p.sum(-1, keepdims=True), 1)
    return jnp.einsum("bhqk,bkhd->bqhd", p.astype(v.dtype), v, preferred_element_type=dtype).astype(q.dtype)
