"""Windows of tokens at a fixed stride of the global order, and keys pooled over them."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from cpjax.sequence.halo import halo
from cpjax.sequence.runs import check_tokens
from cpjax.shard import Sharder

NEVER = jnp.iinfo(jnp.int32).max
"""The last position of a window that does not exist: after every query."""


class Windows(NamedTuple):
    """The windows that start among this rank's tokens, or what was made of them; some slots may hold none.

    Attributes:
        values: [B, n, ...], a window's tokens [w, ...] or their pool.
        first: int32 [n], global position of the window's first token (a multiple of the stride); -1 for an empty slot.
        last: int32 [n], that of its last token, which may lie beyond the sequence; NEVER for an empty slot.
        inside: bool [B or 1, n, w], its tokens that are of the sequence and of the document of the first one.
        document_ids: int [B, n], those of the first tokens, 0 = pad; or None.
    """

    values: jax.Array
    first: jax.Array
    last: jax.Array
    inside: jax.Array
    document_ids: jax.Array | None


def windows(
    x: jax.Array,
    length: int,
    stride: int,
    *,
    sharder: Sharder,
    before: int = 0,
    document_ids: jax.Array | None = None,
) -> Windows:
    """The windows first - before .. first + length - 1 of the global order, for `first` every multiple of `stride`.

    A rank makes those whose `first` is among its own tokens; what they need beyond its runs comes from the neighbours
    as a halo. Differentiable.

    Args:
        x: [B, L, ...], this rank's tokens.
        length: tokens from the first one on.
        stride: from one window to the next.
        before: tokens ahead of the first one (a compressor that also reads the window before).
        document_ids: int [B, L], 1-based, 0 = pad.

    Returns:
        Windows with n = runs ceil(L / runs / stride) and w = before + length.

    Raises:
        ValueError: a layout without runs (striped), a shape that does not fit, or a length or stride below 1.
    """
    check_tokens("windows", sharder, x=x, document_ids=document_ids)
    if length < 1 or stride < 1 or before < 0:
        raise ValueError(
            f"windows was given length={length}, stride={stride}, before={before}: length and stride must be at least "
            "1, before at least 0"
        )
    run = sharder.local_length // sharder.layout.runs
    starts = sharder.positions()[::run]  # [runs]
    # Where in its run each window starts, [runs, n]; the same numbers on all ranks if the stride divides the runs.
    slot = -starts[:, None] % stride if run % stride else jnp.zeros_like(starts)[:, None]
    slot = slot + jnp.arange(0, run, stride, dtype=jnp.int32)
    first = starts[:, None] + slot
    exists = (slot < run) & (first < sharder.end)
    offsets = jnp.arange(-before, length, dtype=jnp.int32)

    after = length - 1 if run % stride else max(length - stride, 0)

    def cut(stream: jax.Array) -> jax.Array:  # [B, n, w, ...]
        runs = halo(stream, before, after, sharder=sharder)
        take = jax.vmap(lambda tokens, index: jnp.take(tokens, index, axis=1, mode="clip"), (1, 0), 1)
        out = take(runs, slot[..., None] + before + offsets)  # [B, runs, n / runs, w, ...]
        return out.reshape(out.shape[0], -1, *out.shape[3:])

    place = first[..., None] + offsets
    inside = (exists[..., None] & (place >= 0) & (place < sharder.end)).reshape(1, -1, before + length)
    ids = None
    if document_ids is not None:
        tokens = cut(document_ids)
        ids = jnp.where(exists.reshape(-1), tokens[:, :, before], 0)
        inside = inside & (tokens == ids[..., None]) & (tokens != 0)
    return Windows(
        values=cut(x),
        first=jnp.where(exists, first, -1).reshape(-1),
        last=jnp.where(exists, first + length - 1, NEVER).reshape(-1),
        inside=inside,
        document_ids=ids,
    )


def pool(
    x: jax.Array,
    length: int,
    stride: int,
    *,
    sharder: Sharder,
    logits: jax.Array | None = None,
    document_ids: jax.Array | None = None,
) -> Windows:
    """The keys of every window as one: the mean of those inside it, or their sum weighted by a softmax over the window.

    Args:
        x: [B, L, ...], this rank's tokens.
        length, stride, document_ids: as of `windows`.
        logits: [B, L, ...] with as many axes as x, broadcast against it: of the weights, channel by channel. A bias
            for each place in the window is added to them by the caller if windows do not overlap.

    Returns:
        Windows with `values` [B, n, ...] in the dtype of x, summed in float32 or wider; 0 where nothing is inside.

    Raises:
        ValueError: as `windows`, or logits that do not fit x.
    """
    check_tokens("pool", sharder, x=x, logits=logits, document_ids=document_ids)
    if logits is not None and (
        logits.ndim != x.ndim or any(n not in (1, m) for n, m in zip(logits.shape, x.shape, strict=True))
    ):
        raise ValueError(
            f"pool was given x {x.shape} and logits {logits.shape}: they need the same number of axes, and each of "
            "the logits' as long as that of x or 1"
        )
    cut = windows(x, length, stride, sharder=sharder, document_ids=document_ids)
    dtype = jnp.promote_types(x.dtype, jnp.float32)
    values = cut.values.astype(dtype)
    inside = cut.inside.reshape(*cut.inside.shape, *[1] * (values.ndim - 3))
    if logits is None:
        weights = inside.astype(dtype)
    else:
        gate = windows(logits, length, stride, sharder=sharder).values.astype(jnp.promote_types(logits.dtype, dtype))
        gate = jnp.where(inside, gate, -jnp.inf)
        peak = jax.lax.stop_gradient(gate.max(axis=2, keepdims=True))
        weights = jnp.exp(gate - jnp.where(jnp.isfinite(peak), peak, 0))
    total = weights.sum(axis=2)
    pooled = (weights * jnp.where(inside, values, 0)).sum(axis=2) / jnp.where(total == 0, 1, total)
    return cut._replace(values=pooled.astype(x.dtype))
