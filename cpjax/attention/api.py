"""The one entry point of attention for models."""

from __future__ import annotations

import functools
import math
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from cpjax.attention import blockwise, pallas
from cpjax.attention import transport as transports
from cpjax.attention.blockwise import Rule, accumulation_dtype
from cpjax.attention.mask import Mask, check_mask, streams_of
from cpjax.attention.plan import plan_transport
from cpjax.attention.tiles import Tiling
from cpjax.mesh import HEAD_AXES, ROW_AXES, device_platform, splitting_axes
from cpjax.shard import Sharder
from cpjax.varying import vary_over, varying_axes


def attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array | None = None,
    *,
    sharder: Sharder,
    mask: Mask,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: jax.Array | None = None,
    transport: str = "ring",
    kernel: str = "auto",
) -> jax.Array:
    """Softmax attention of this rank's queries to the keys of all ranks.

    Called inside the body of a `jax.shard_map` that is manual over `sharder.axis_name`; with cp = 1 it needs no mesh.
    Query head h attends to key head h // (H / K). A query without an allowed key gives 0 and finite gradients. Scores
    and their sums are float32 at least; memory is linear in L. Reverse-mode differentiable.

    Args:
        q: [B, L, H, D], this rank's tokens.
        k: [B, L, K, D], K a divisor of H.
        v: [B, L, K, Dv], or None where the values are the keys, which then travel once.
        sharder: who holds which tokens.
        mask: who may attend to whom, its streams [B, L] local like q.
        scale: static factor on the scores, D ** -0.5 by default.
        softcap: static c: the scaled scores become c tanh(score / c).
        sinks: [H], one more score per head that takes its share of the softmax and has no value.
        transport: "ring" passes keys and values on from rank to rank while computing; "allgather" gathers them first;
            "ulysses" exchanges them for all tokens of some of the heads, which the number of ranks must divide;
            "ring_ulysses" does so in groups of ranks (":N" behind it: of N) and passes keys and values from group to
            group; "auto" chooses. See `plan_transport`.
        kernel: what computes a block: "xla", "pallas" (`cpjax.attention.pallas`), or "auto", which is pallas on GPUs
            where it takes the dtype and widths, else xla. On CPUs pallas is interpreted, for tests, which JAX allows
            only inside a shard_map with check_vma=False.

    Returns:
        [B, L, H, Dv] in q's dtype.

    Raises:
        ValueError: shapes, dtypes or mask streams that do not fit each other or the sharder, or a transport or kernel
            that is unknown or does not take them.
    """
    _check(q, k, v, sharder, mask, sinks, scale, softcap)
    blocks = _choose_kernel(kernel, q, k if v is None else v)
    factor = q.shape[-1] ** -0.5 if scale is None else float(scale)
    v_width = (k if v is None else v).shape[-1]
    if blocks is pallas:
        q, k, v = pallas.widen(q), pallas.widen(k), None if v is None else pallas.widen(v)
    plan = plan_transport(q, k, v, sharder=sharder, mask=mask, transport=transport)
    sharder.rank()  # raises where there is no such mesh axis
    cap = None if softcap is None else float(softcap)
    rule = Rule(mask.reach(sharder.padded_length), factor, cap, 0 if v is None else q.shape[-1])
    # k and v travel as one array: two collectives would not both be hidden behind the computation.
    kv = k if v is None else jnp.concatenate([k, v], -1)
    sinks = None if sinks is None else sinks.astype(accumulation_dtype(q))
    operands = _all_varying((q, kv, sinks, streams_of(mask), mask.slices), sharder)
    q, kv, sinks, (q_streams, k_streams), slices = operands

    if plan.members > 1:
        q, kv = transports.to_heads(q, kv, sharder, plan.members)
        if sinks is not None:
            sinks = sinks.reshape(plan.members, -1)[sharder.rank() % plan.members]
    elif plan.held > 1:
        kv = transports.gather_keys(kv, sharder)
    run = sharder.local_length // max(sharder.layout.runs, 1)
    if blocks is pallas:
        tiling = Tiling.power_of_two(run, pallas.MIN_TILE, pallas.MAX_TILE)
    else:
        tiling = Tiling.choose(run, q.shape[0] * q.shape[2])
    setup = transports.Setup(plan, tiling, rule, blocks)
    streams = transports.place_streams(q_streams, k_streams, sharder, setup)
    if sinks is not None:
        sinks = sinks.reshape(kv.shape[2], -1)
    tiles = _split(tiling.queries(q, kv.shape[2])), _split(tiling.keys(kv))
    output = tiling.from_queries(_split(transports.attend(setup, *tiles, sinks, sharder, *streams, slices)))
    if plan.members > 1:
        output = transports.to_tokens(output, sharder, plan.members)
    return output[..., :v_width]


def _split(tiles: jax.Array) -> jax.Array:
    """Tiles [n, B, K, ..], rows and heads split over the automatic axes for them (or as XLA likes), and nothing else.

    Were features split, loops over tiles, of which each cp rank has a number of its own, would hold collectives that
    not all ranks come to.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if all(mesh.shape[name] == 1 for name in mesh.auto_axes):
        return tiles
    rows, heads = splitting_axes(ROW_AXES, tiles.shape[1]), splitting_axes(HEAD_AXES, tiles.shape[2])
    return jax.lax.with_sharding_constraint(tiles, P(None, rows or P.UNCONSTRAINED, heads or P.UNCONSTRAINED))


def _choose_kernel(kernel: str, q: jax.Array, v: jax.Array) -> ModuleType:
    if kernel not in ("auto", "xla", "pallas"):
        raise ValueError(f"unknown kernel {kernel!r}: choose auto, xla or pallas")
    taken = pallas.supports(q.shape[-1], v.shape[-1], q.dtype)
    if kernel == "pallas" and not taken:
        raise ValueError(
            f"the pallas kernel was given queries {q.shape[-1]} and values {v.shape[-1]} wide, {q.dtype}: it takes "
            f"up to 256 numbers of 16 bits or 128 of 32 bits; use the kernel auto or xla"
        )
    wanted = kernel == "pallas" or (kernel == "auto" and device_platform() == "gpu")
    return pallas if wanted and taken else blockwise


def _all_varying(operands: Any, sharder: Sharder) -> Any:
    """Marks all operands as varying over the cp axis and over every manual axis that any of them varies over.

    Done here, outside the custom derivatives, JAX itself sums the cotangents of an operand that is the same on all.
    """
    axes = frozenset({sharder.axis_name} if sharder.cp > 1 else ())
    axes = axes.union(*map(varying_axes, jax.tree.leaves(operands)))
    return jax.tree.map(functools.partial(vary_over, axes=axes), operands)


def _check(q: Any, k: Any, v: Any, sharder: Sharder, mask: Mask, sinks: Any, scale: Any, softcap: Any) -> None:
    v = k if v is None else v
    for name, x in {"q": q, "k": k, "v": v, **({} if sinks is None else {"sinks": sinks})}.items():
        if not isinstance(x, (jax.Array, np.ndarray)):
            raise ValueError(f"attention was given {name} of type {type(x).__name__}: it must be an array")
    shapes = f"q {q.shape}, k {k.shape}, v {v.shape}"
    if not q.ndim == k.ndim == v.ndim == 4:
        raise ValueError(f"attention was given {shapes}: all three must be [B, L, heads, width]")
    if q.shape[:2] != k.shape[:2] or k.shape[:3] != v.shape[:3] or q.shape[3] != k.shape[3]:
        raise ValueError(
            f"attention was given {shapes}: batch and length must be the same in all three, the width in q and k, "
            "the heads in k and v"
        )
    if 0 in q.shape or 0 in v.shape:
        raise ValueError(f"attention was given {shapes}: no size may be 0")
    if q.shape[2] % k.shape[2]:
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
    if not jnp.issubdtype(q.dtype, jnp.floating):
        raise ValueError(f"attention was given {q.dtype} arrays: convert them to a floating dtype first")
    if sharder.places is not None and mask.document_ids is None and mask.padding_mask is None:
        raise ValueError(
            "attention was given a sharder of documents that are padded one by one, and nothing says which tokens are "
            "pads: give mask.document_ids (or padding_mask), taken from the batch like q"
        )
    bounded = mask.causal or mask.padding_mask is not None or mask.document_ids is not None or mask.slices is not None
    if not bounded and sharder.length < sharder.padded_length:
        raise ValueError(
            f"attention without a causal mask was given {sharder.length} tokens padded to {sharder.padded_length}, and "
            "nothing says which are pads: give mask.padding_mask"
        )
    if sinks is not None and sinks.shape != q.shape[2:3]:
        raise ValueError(f"attention was given sinks {sinks.shape} for {q.shape[2]} query heads: give one for each")
    for name, value in (("scale", scale), ("softcap", softcap)):
        if isinstance(value, jax.core.Tracer):
            raise ValueError(f"attention was given a traced {name}: it is static, so close over a Python number")
        if value is not None and not math.isfinite(value):
            raise ValueError(f"attention was given {name}={value}: give a finite number, or None")
    if softcap is not None and not softcap > 0:
        raise ValueError(f"attention was given softcap={softcap}: give a number above 0, or None")
    check_mask(mask, q.shape[:2])
