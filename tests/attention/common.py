"""One problem on global sequences, solved under any layout and transport, and densely."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from cpjax.attention import Mask, attention, dense_attention
from cpjax.shard import Dispatched, Sharder, SliceKind, Stream, dispatch, layout_from_name, make_batch

STREAMS = ("document_ids", "padding_mask", "vision_group_ids", "prefix")
"""Per-token parts of a mask."""


class Problem(NamedTuple):
    """Arrays [B, S, ...] in global order; `g` is the cotangent of the output. `v` may be None, `sinks` is [H]."""

    q: Any
    k: Any
    v: Any
    g: Any
    sinks: Any = None
    document_ids: Any = None
    padding_mask: Any = None
    vision_group_ids: Any = None
    prefix: Any = None
    slices: Any = None

    def streams(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in STREAMS if getattr(self, name) is not None}


@dataclasses.dataclass(frozen=True)
class Form:
    """What is static of a problem."""

    causal: bool = True
    window: tuple = (None, None)
    windowed_groups: bool = False
    scale: float | None = None
    softcap: float | None = None
    longest_document: int | None = None
    kernel: str = "auto"

    def mask(self, slices: Any, streams: dict[str, Any]) -> Mask:
        static = {"window": self.window, "windowed_groups": self.windowed_groups}
        return Mask(self.causal, longest_document=self.longest_document, slices=slices, **static, **streams)


def problem(
    length: int, *, batch=2, heads=4, kv_heads=2, width=8, v_width=6, shared=False, sinks=False, seed=0,
    documents=None, padding=None, **masks,
) -> Problem:  # fmt: skip
    rng = np.random.default_rng(seed)
    v_width = width if shared else v_width
    shapes = ((heads, width), (kv_heads, width), (kv_heads, v_width), (heads, v_width))
    q, k, v, g = (rng.normal(size=(batch, length, *shape)) for shape in shapes)
    sink = rng.normal(size=heads) if sinks else None
    return Problem(q, k, None if shared else v, g, sink, documents, padding, **masks)


def documents_of(*rows: list[int], length: int) -> np.ndarray:
    """1-based document ids [B, S] from the documents' lengths in each row; what is left is padding."""
    ids = np.zeros((len(rows), length), np.int32)
    for row, lengths in zip(ids, rows, strict=True):
        ends = np.cumsum(lengths)
        for number, (end, size) in enumerate(zip(ends, lengths, strict=True), 1):
            row[end - size : end] = number
    return ids


def x64(dtype: Any) -> Any:
    return jax.enable_x64(True) if dtype == jnp.float64 else contextlib.nullcontext()


def mesh_of(cp: int) -> jax.sharding.Mesh:
    return jax.make_mesh((cp,), ("cp",), devices=jax.devices()[:cp], axis_types=(jax.sharding.AxisType.Auto,))


def solve(
    p: Problem, cp: int, layout_name: str, transport: str, dtype=jnp.float32, padded_length=None, packed_rows=1, **form
):
    """Output and gradients (dq, dk, then dv and dsinks where there are these), numpy, in the coordinates of `p`.

    Pads hold noise, are marked by the streams that `p` has, and their outputs must be finite. Under the layout packed
    the rows become one or `packed_rows`, and outputs and gradients at pads of `p`, which are dropped, are 0. Under
    dispatched the chunks of 2 tokens are spread by the slices, or those of causal attention.
    """
    batch, sharder = shard(p, cp, layout_name, padded_length, packed_rows)
    return solve_on(p, batch, sharder, transport, dtype, **form)


def shard(
    p: Problem, cp: int, layout_name: str, padded_length=None, packed_rows=1
) -> tuple[dict[str, np.ndarray], Sharder]:
    """What `make_batch` makes of the arrays and streams of `p`: padded, in global order.

    Attention takes more than batches may say, documents in several pieces for one: but under the layout packed, which
    is made from documents, the streams of the mask are given as a model's own.
    """
    length = p.q.shape[1]
    layout: Any = layout_from_name(layout_name, cp)
    if isinstance(layout, Dispatched):
        slices = np.array([[0, length, 0, length, SliceKind.CAUSAL]]) if p.slices is None else p.slices
        layout, _ = dispatch(slices, length, dataclasses.replace(layout, chunk_size=2))
    arrays = {name: getattr(p, name) for name in "qkvg" if getattr(p, name) is not None}
    fills = {"q": 3, "k": 3, "v": 3, "g": 0, "prefix": False}
    own = "" if layout_name == "packed" else "own "
    if own:
        fills |= {"document_ids": 0, "padding_mask": True, "vision_group_ids": -1}
    batch, sharder = make_batch(
        {"input_ids": np.zeros(p.q.shape[:2], np.int32), **arrays, **{own + n: x for n, x in p.streams().items()}},
        layout,
        streams={own * (name in STREAMS) + name: Stream(1, fill) for name, fill in fills.items()},
        padded_length=padded_length,
        packed_rows=packed_rows,
    )
    return batch | {name: batch[own + name] for name in p.streams()}, sharder


def solve_on(p: Problem, batch: dict[str, np.ndarray], sharder: Sharder, transport: str, dtype=jnp.float32, **form):
    """`solve` of a sharded problem."""
    how = Form(**form)
    marked = p.document_ids is not None or p.padding_mask is not None or how.causal or p.slices is not None
    assert (sharder.sources() >= 0).all() or marked
    order = sharder.indices(np.arange(sharder.cp)).reshape(-1, sharder.padded_length)
    with x64(dtype):
        q, k, v, g = (jnp.asarray(taken(batch[name], order), dtype) if name in batch else None for name in "qkvg")
        sinks = None if p.sinks is None else jnp.asarray(p.sinks, dtype)
        streams = {name: taken(batch[name], order) for name in p.streams()}
        output, *grads = program(transport, how)((q, k, v, sinks), g, streams, p.slices, sharder)
    tokens, rest = (output, *grads[: 3 - (v is None)]), grads[3 - (v is None) :]
    assert all(np.isfinite(x).all() for x in (*tokens, *rest))
    return [in_the_callers_order(np.asarray(x), sharder) for x in tokens] + [np.asarray(x) for x in rest]


def in_the_callers_order(x: np.ndarray, sharder: Sharder) -> np.ndarray:
    """[B, T, ..] rank by rank -> [B, S, ..], or the rows that were flattened; 0 at dropped pads."""
    x = taken(x, np.atleast_2d(sharder.inverse()))
    if sharder.places is None:
        return x[:, : sharder.length]
    places = np.atleast_2d(sharder.places)
    x = np.where((places >= 0).reshape(*places.shape, *[1] * (x.ndim - 2)), taken(x, places), 0)
    return x.reshape(len(x) * sharder.rows, -1, *x.shape[2:])


def taken(x: np.ndarray, index: np.ndarray) -> np.ndarray:
    """The tokens of each row of x [B, T, ..] at `index` [B or 1, n]."""
    return x[np.arange(len(x))[:, None], index]


def function(transport, form=Form()):
    """((q, k, v, sinks), streams, slices, sharder) -> output, on rank-major sequences."""

    def output(operands, streams, slices, sharder):
        def body(q, k, v, sinks, streams, slices):
            return attention(
                q, k, v, sinks=sinks, sharder=sharder, mask=form.mask(slices, streams), transport=transport,
                scale=form.scale, softcap=form.softcap, kernel=form.kernel,
            )  # fmt: skip

        if sharder.cp == 1:
            return body(*operands, streams, slices)
        cp = P(None, "cp")
        return jax.shard_map(
            body, mesh=mesh_of(sharder.cp), in_specs=(cp, cp, cp, P(), cp, P()), out_specs=cp, axis_names={"cp"},
            check_vma=form.kernel != "pallas",  # the interpreter of Pallas indexes with numbers that vary over nothing
        )(*operands, streams, slices)  # fmt: skip

    return output


@functools.cache
def program(transport, form=Form()):
    """Jitted ((q, k, v, sinks), g, streams, slices, sharder) -> output, gradients."""
    output = function(transport, form)

    def run(operands, g, streams, slices, sharder):
        out, pull = jax.vjp(lambda operands: output(operands, streams, slices, sharder), operands)
        return out, *jax.tree.leaves(pull(g)[0])

    return jax.jit(run)


def solve_dense(p: Problem, dtype=jnp.float64, **form):
    """`solve` by cpjax's own `dense_attention`."""
    how = Form(**form)
    with x64(dtype):
        operands = [None if x is None else jnp.asarray(x, dtype) for x in (*p[:3], p.sinks)]
        slices = None if p.slices is None else jnp.asarray(p.slices)
        mask = how.mask(slices, {name: jnp.asarray(x) for name, x in p.streams().items()})

        def run(operands):
            q, k, v, sinks = operands
            return dense_attention(q, k, v, mask=mask, sinks=sinks, scale=how.scale, softcap=how.softcap)

        output, pull = jax.vjp(run, operands)
        return [np.asarray(x) for x in (output, *jax.tree.leaves(pull(jnp.asarray(p.g, dtype))[0]))]


def allowed(p: Problem, causal=True, window=(None, None), windowed_groups=False, **_) -> np.ndarray:
    """bool [B, S, S], pair by pair from the definitions, without a line of the library."""
    batch, length = p.q.shape[:2]
    i, j = np.indices((length, length))
    seen = (j <= i) if causal else np.ones((length, length), bool)
    if window[0] is not None:
        seen = seen & (i - j <= window[0])
    if window[1] is not None:
        seen = seen & (j - i <= window[1])
    if p.slices is not None:
        union = np.zeros((length, length), bool)
        for q0, q1, k0, k1, kind in p.slices.tolist():
            q1, k1 = max(q0, q1), max(k0, k1)
            block = np.ones((q1 - q0, k1 - k0), bool)
            if kind in (1, 3):  # a diagonal that ends in the bottom right corner
                block = block & (np.arange(k1 - k0) - (k1 - k0) <= np.arange(q1 - q0)[:, None] - (q1 - q0))
            if kind in (2, 3):  # a diagonal that starts in the top left corner
                block = block & (np.arange(k1 - k0) >= np.arange(q1 - q0)[:, None])
            union[q0:q1, k0:k1] |= block[: length - q0, : length - k0]
        seen = seen & union
    seen = np.repeat(seen[None], batch, 0)
    for row in range(batch):
        if p.vision_group_ids is not None:
            for group in set(p.vision_group_ids[row].tolist()) - {-1}:
                members = p.vision_group_ids[row] == group
                pairs = members[:, None] & members
                seen[row] |= pairs & (i - j <= window[0]) if windowed_groups else pairs
        if p.prefix is not None:
            seen[row][:, p.prefix[row]] = True
        if p.document_ids is not None:
            ids = p.document_ids[row]
            seen[row] &= ids[:, None] == ids
            seen[row][:, ids == 0] = False
        if p.padding_mask is not None:
            seen[row][:, p.padding_mask[row]] = False
    return seen


def solve_numpy(p: Problem, scale=None, softcap=None, **form):
    """`solve` in float64 by numpy alone."""
    group = p.q.shape[2] // p.k.shape[2]
    k, v = (np.repeat(x, group, 2) for x in (p.k, p.k if p.v is None else p.v))
    scale = p.q.shape[3] ** -0.5 if scale is None else scale
    scores = np.einsum("bqhd,bkhd->bhqk", p.q, k) * scale
    slope = np.full_like(scores, scale)
    if softcap is not None:
        slope *= 1 / np.cosh(scores / softcap) ** 2
        scores = softcap * np.tanh(scores / softcap)
    seen = allowed(p, **form)[:, None]
    sinks = np.full(p.q.shape[2], -np.inf) if p.sinks is None else p.sinks
    sinks = sinks[:, None, None]
    peak = np.maximum(np.where(seen, scores, -np.inf).max(-1, keepdims=True), sinks)
    peak = np.where(np.isfinite(peak), peak, 0)
    weights = np.where(seen, np.exp(np.where(seen, scores - peak, 0)), 0)
    total = weights.sum(-1, keepdims=True) + np.exp(sinks - peak)
    total = np.where(total > 0, total, 1)
    weights = weights / total
    output = np.einsum("bhqk,bkhd->bqhd", weights, v)
    inner = np.einsum("bqhd,bkhd->bhqk", p.g, v)
    delta = (weights * inner).sum(-1, keepdims=True)
    d_scores = weights * (inner - delta) * slope

    def per_key_head(x):
        return x.reshape(*x.shape[:2], -1, group, x.shape[3]).sum(3)

    dq = np.einsum("bhqk,bkhd->bqhd", d_scores, k)
    dk = per_key_head(np.einsum("bhqk,bqhd->bkhd", d_scores, p.q))
    dv = per_key_head(np.einsum("bhqk,bqhd->bkhd", weights, p.g))
    grads = [dq, dk + dv] if p.v is None else [dq, dk, dv]
    if p.sinks is not None:
        grads.append(-(np.exp(sinks - peak) / total * delta).sum((0, 2, 3)))
    return [output, *grads]


def assert_equal(got, expected, dtype=jnp.float32):
    """Invariant I1: output to 1e-6 (fp64 1e-12), gradients to 1e-5 (1e-12) of their largest entry.

    The entries are of size 1; a gradient that is all zeros, as with one key per query, is met to 1e-6.
    """
    output, gradient = (1e-12, 1e-12) if dtype == jnp.float64 else (1e-6, 1e-5)
    names = ("output", "dq", "dk", "dv or dsinks", "dsinks")[: len(expected)]
    tolerances = (output, *[gradient] * 4)[: len(expected)]
    for name, x, y, tolerance in zip(names, got, expected, tolerances, strict=True):
        np.testing.assert_allclose(x, y, rtol=0, atol=tolerance * max(np.abs(y).max(), 0.1), err_msg=name)
