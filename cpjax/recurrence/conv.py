"""Causal depthwise convolution over a sharded sequence."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from cpjax.sequence import halo
from cpjax.sequence.runs import check_tokens
from cpjax.shard import Sharder


def causal_conv(
    x: jax.Array, weight: jax.Array, *, sharder: Sharder, document_ids: jax.Array | None = None
) -> jax.Array:
    """y[t, c] = sum_w weight[c, w] x[t - (W - 1) + w, c], with zeros before the sequence and the token's document.

    Each run of local tokens receives the W - 1 tokens that precede it in global order, wherever they live.

    Args:
        x: [B, L, C], this rank's tokens.
        weight: [C, W]; tap W - 1 multiplies the token itself (the order of a Conv1d).
        document_ids: int [B, L]; a document starts wherever the id changes.

    Returns:
        [B, L, C] in the dtype of x; sums are in float32 or wider.

    Raises:
        ValueError: a layout without runs (striped), or a shape that does not fit.
    """
    check_tokens("causal_conv", sharder, x=x, document_ids=document_ids)
    if x.ndim != 3 or weight.ndim != 2 or weight.shape[0] != x.shape[2] or weight.shape[1] < 1:
        raise ValueError(
            f"causal_conv was given x {x.shape} and weight {weight.shape}: "
            "it needs x [B, L, C] and weight [C, W] with the same C and W >= 1"
        )
    before = weight.shape[1] - 1
    runs = halo(x, before, 0, sharder=sharder)
    same = None
    if document_ids is not None and before > 0:
        ids = halo(document_ids, before, 0, sharder=sharder)
        same = ids[:, :, 1:] == ids[:, :, :-1]
    return _taps(runs, weight, same).reshape(x.shape).astype(x.dtype)


# The products of all taps would be kept for the backward pass; recomputed, only x is.
@jax.checkpoint
def _taps(x: jax.Array, weight: jax.Array, same: jax.Array | None) -> jax.Array:
    """[B, runs, W - 1 + M, C] -> [B, runs, M, C].

    `same` bool [B, runs, W - 2 + M] says of each token but the first whether the one before it is of its document.
    """
    width = weight.shape[1]
    length = x.shape[2] - width + 1
    dtype = jnp.promote_types(jnp.result_type(x, weight), jnp.float32)
    total = jnp.zeros((), dtype)
    inside = None
    for back in range(width):  # how far before the token
        first = width - 1 - back
        tap = x[:, :, first : first + length].astype(dtype) * weight[:, first].astype(dtype)
        if same is not None and back > 0:
            step = same[:, :, first : first + length]  # from `back` tokens before to `back - 1`
            inside = step if inside is None else inside & step
            tap = jnp.where(inside[..., None], tap, 0)
        total = total + tap
    return total
