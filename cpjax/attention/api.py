"""The one entry point of attention for models."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from cpjax.attention import transport as transports
from cpjax.attention.mask import Mask, segments_of
from cpjax.attention.tiles import Tiling
from cpjax.shard import Sharder
from cpjax.varying import vary_over, varying_axes

_TRANSPORTS: dict[str, Callable[..., jax.Array]] = {"allgather": transports.all_gather, "ring": transports.ring}


def attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    sharder: Sharder,
    mask: Mask,
    scale: float | None = None,
    transport: str = "ring",
) -> jax.Array:
    """Softmax attention of this rank's queries to the keys of all ranks.

    Called inside the body of a `jax.shard_map` that is manual over `sharder.axis_name`; with cp = 1 it needs no mesh.
    Query head h attends to key head h // (H / K). A query without an allowed key gives 0 and finite gradients. Scores
    and their sums are float32 at least; memory is linear in L. Reverse-mode differentiable.

    Args:
        q: [B, L, H, D], this rank's tokens.
        k: [B, L, K, D], K a divisor of H.
        v: [B, L, K, Dv].
        sharder: who holds which tokens.
        mask: who may attend to whom, its streams [B, L] local like q.
        scale: factor on the scores, D ** -0.5 by default.
        transport: "ring" passes k and v on from rank to rank while computing; "allgather" gathers them first.

    Returns:
        [B, L, H, Dv] in q's dtype.

    Raises:
        ValueError: shapes, dtypes or mask streams that do not fit each other or the sharder, or an unknown transport.
    """
    if transport not in _TRANSPORTS:
        raise ValueError(f"unknown transport {transport!r}: choose one of {', '.join(_TRANSPORTS)}")
    _check(q, k, v, sharder, mask)
    tiling = Tiling.choose(sharder.local_length // max(sharder.layout.runs, 1), q.shape[0] * q.shape[2])
    factor = q.shape[-1] ** -0.5 if scale is None else float(scale)
    setup = transports.Setup(sharder, tiling, mask.causal, factor)
    segments = jax.tree.map(lambda x: tiling.cut(x, 1, None), segments_of(mask))
    # k and v travel as one array: two collectives would not both be hidden behind the computation.
    kv = tiling.keys(jnp.concatenate([k, v], -1))
    operands = _all_varying((tiling.queries(q, k.shape[2]), kv, *segments), sharder)
    run = _TRANSPORTS[transport] if sharder.cp > 1 else transports.all_gather
    return tiling.from_queries(run(setup, *operands))


def _all_varying(operands: Any, sharder: Sharder) -> Any:
    """Marks all operands as varying over the cp axis and over every manual axis that any of them varies over.

    Done here, outside the custom derivatives, JAX itself sums the cotangents of an operand that is the same on all.
    """
    axes = frozenset({sharder.axis_name} if sharder.cp > 1 else ())
    axes = axes.union(*map(varying_axes, jax.tree.leaves(operands)))
    return jax.tree.map(functools.partial(vary_over, axes=axes), operands)


def _check(q: Any, k: Any, v: Any, sharder: Sharder, mask: Mask) -> None:
    shapes = f"q {q.shape}, k {k.shape}, v {v.shape}"
    if not q.ndim == k.ndim == v.ndim == 4:
        raise ValueError(f"attention was given {shapes}: all three must be [B, L, heads, width]")
    if q.shape[:2] != k.shape[:2] or k.shape[:3] != v.shape[:3] or q.shape[3] != k.shape[3]:
        raise ValueError(
            f"attention was given {shapes}: batch and length must be the same in all three, the width in q and k, "
            "the heads in k and v"
        )
    if k.shape[2] == 0 or q.shape[2] % k.shape[2]:
        raise ValueError(
            f"attention was given {q.shape[2]} query heads and {k.shape[2]} key heads: the first must be a multiple of "
            "the second"
        )
    if not q.dtype == k.dtype == v.dtype:
        raise ValueError(f"attention was given q {q.dtype}, k {k.dtype}, v {v.dtype}: convert them to one dtype first")
    if q.shape[1] != sharder.local_length:
        raise ValueError(
            f"attention was given {q.shape[1]} tokens, but each of the {sharder.cp} ranks of this sharder holds "
            f"{sharder.local_length}: call it inside shard_map on the local tokens (sharder.take_local)"
        )
    for name in ("document_ids", "padding_mask"):
        stream = getattr(mask, name)
        if stream is not None and stream.shape != q.shape[:2]:
            raise ValueError(
                f"mask.{name} has shape {stream.shape}, but the local tokens are [B, L] = {q.shape[:2]}: shard it like "
                "q (sharder.take_local)"
            )
