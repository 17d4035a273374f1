"""Attention of the newest token to keys and values that are kept: one step of decoding."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def cached_attention(
    q: jax.Array, k: jax.Array, v: jax.Array, *, readable: jax.Array, scale: float | None = None
) -> jax.Array:
    """What `attention` gives for one token of each row, from a cache that one rank holds whole.

    Keys and values are read where they are: not repeated for each query head, and with the tokens of a head together,
    as the matrix products want them.

    Args:
        q: [B, H, D].
        k: [B, K, C, D], K a divisor of H; v: [B, K, C, Dv].
        readable: bool [B, C], the entries of the cache that the token attends to, at least one a row.
        scale: factor on the scores, D ** -0.5 by default.

    Returns:
        [B, H, Dv] in q's dtype.
    """
    rows, heads, width = q.shape
    dtype = jnp.promote_types(q.dtype, jnp.float32)
    q = q.reshape(rows, k.shape[1], -1, width)
    scores = jnp.einsum("bkgd,bkcd->bkgc", q, k, preferred_element_type=dtype)
    scores = scores * (width**-0.5 if scale is None else scale)
    p = jax.nn.softmax(jnp.where(readable[:, None, None], scores, -jnp.inf), axis=-1)
    out = jnp.einsum("bkgc,bkcd->bkgd", p.astype(v.dtype), v, preferred_element_type=dtype)
    return out.reshape(rows, heads, -1).astype(q.dtype)
