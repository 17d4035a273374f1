"""One problem on global sequences, solved under any layout and transport, and densely."""

from __future__ import annotations

import contextlib
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from cpjax.attention import Mask, attention, dense_attention
from cpjax.shard import layout_from_name


class Problem(NamedTuple):
    """Arrays [B, S, ...] in global order; `g` is the cotangent of the output."""

    q: Any
    k: Any
    v: Any
    g: Any
    document_ids: Any = None
    padding_mask: Any = None


def problem(
    length: int, *, batch=2, heads=4, kv_heads=2, width=8, v_width=6, documents=None, padding=None, seed=0
) -> Problem:
    rng = np.random.default_rng(seed)
    shapes = ((heads, width), (kv_heads, width), (kv_heads, v_width), (heads, v_width))
    q, k, v, g = (rng.normal(size=(batch, length, *shape)) for shape in shapes)
    return Problem(q, k, v, g, documents, padding)


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


def solve(p: Problem, cp: int, layout_name: str, transport: str, dtype=jnp.float32, *, causal=True, scale=None):
    """Output and gradients (dq, dk, dv), numpy [B, S, ...] in global order.

    The padded slots hold noise, are marked by the streams that `p` has, and their outputs must be finite.
    """
    layout = layout_from_name(layout_name, cp)
    length = p.q.shape[1]
    padded = layout.pad_length(length)
    assert padded == length or p.document_ids is not None or p.padding_mask is not None or causal
    order = layout.indices(padded, np.arange(cp)).reshape(-1)

    def place(x, fill):
        if x is None:
            return None
        x = np.pad(x, [(0, padded - length if axis == 1 else 0) for axis in range(x.ndim)], constant_values=fill)
        return x[:, order]

    with x64(dtype):
        q, k, v, g = (jnp.asarray(place(x, fill), dtype) for x, fill in zip(p[:4], (3, 3, 3, 0), strict=True))
        streams = place(p.document_ids, 0), place(p.padding_mask, True)
        results = program(layout, length, padded, transport, causal, scale)(q, k, v, g, streams)
        results = [np.asarray(x)[:, layout.inverse(padded)] for x in results]
    assert all(np.isfinite(x).all() for x in results)
    return [x[:, :length] for x in results]


@functools.cache
def program(layout, length, padded, transport, causal, scale):
    """Jitted (q, k, v, g, (document_ids, padding_mask)) -> output, dq, dk, dv on rank-major sequences."""
    from cpjax.shard import Sharder

    sharder = Sharder(layout, length, padded)

    def body(q, k, v, g, streams):
        def run(q, k, v):
            mask = Mask(causal, *streams)
            return attention(q, k, v, sharder=sharder, mask=mask, transport=transport, scale=scale)

        output, pull = jax.vjp(run, q, k, v)
        return output, *pull(g)

    if layout.cp == 1:
        return jax.jit(body)
    spec = P(None, "cp")
    return jax.jit(jax.shard_map(body, mesh=mesh_of(layout.cp), in_specs=spec, out_specs=spec, axis_names={"cp"}))


def solve_dense(p: Problem, dtype=jnp.float64, *, causal=True, scale=None):
    with x64(dtype):
        q, k, v, g = (jnp.asarray(x, dtype) for x in p[:4])
        mask = Mask(causal, *(None if x is None else jnp.asarray(x) for x in p[4:]))
        output, pull = jax.vjp(lambda q, k, v: dense_attention(q, k, v, mask=mask, scale=scale), q, k, v)
        return [np.asarray(x) for x in (output, *pull(g))]


def assert_equal(got, expected, dtype=jnp.float32):
    """Invariant I1: output to 1e-6 (fp64 1e-12), gradients to 1e-5 (1e-12) of their largest entry.

    The entries are of size 1; a gradient that is all zeros, as with one key per query, is met to 1e-6.
    """
    output, gradient = (1e-12, 1e-12) if dtype == jnp.float64 else (1e-6, 1e-5)
    for name, x, y, tolerance in zip(
        ("output", "dq", "dk", "dv"), got, expected, (output, *[gradient] * 3), strict=True
    ):
        np.testing.assert_allclose(x, y, rtol=0, atol=tolerance * max(np.abs(y).max(), 0.1), err_msg=name)
