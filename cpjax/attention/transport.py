"""How queries meet the keys of other ranks. Every function here runs inside `shard_map`, or with cp = 1 anywhere.

Operands are tiled, see `cpjax.attention.blockwise`; the output is too.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from cpjax.attention import blockwise
from cpjax.attention.mask import NO_KEY, Tokens
from cpjax.attention.tiles import Tiling
from cpjax.shard import Sharder
from cpjax.varying import vary_over, varying_axes


@dataclasses.dataclass(frozen=True)
class Setup:
    """Static facts of one attention call."""

    sharder: Sharder
    tiling: Tiling
    causal: bool
    scale: float

    @property
    def kernel(self) -> dict[str, Any]:
        """Static arguments of the block kernel."""
        return {"causal": self.causal, "scale": self.scale}

    def queries(self, segments: Any) -> Tokens:
        """This rank's queries."""
        return Tokens(self.tiling.cut(self.sharder.positions(), 0, None), segments)

    def keys(self, ranks: Any, segments: Any) -> Tokens:
        """The keys of one rank, or of several one after the other."""
        positions = jnp.asarray(self.sharder.layout.indices(self.sharder.padded_length, ranks)).reshape(-1)
        return Tokens(self.tiling.cut(positions, 0, NO_KEY), segments)


def all_gather(setup: Setup, q: Any, kv: Any, q_segments: Any, k_segments: Any) -> jax.Array:
    """Every rank gathers all keys and values; their gradients are summed and scattered back (psum_scatter)."""
    sharder = setup.sharder
    if sharder.cp > 1:
        gather = functools.partial(lax.all_gather, axis_name=sharder.axis_name, axis=0, tiled=True)
        kv, k_segments = jax.tree.map(gather, (kv, k_segments))
    keys = setup.keys(jnp.arange(sharder.cp, dtype=jnp.int32), k_segments)
    return _local(setup, q, kv, setup.queries(q_segments), keys)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _local(setup: Setup, q: Any, kv: Any, queries: Tokens, keys: Tokens) -> jax.Array:
    return _local_forward(setup, q, kv, queries, keys)[0]


def _local_forward(setup: Setup, q: Any, kv: Any, queries: Tokens, keys: Tokens) -> tuple[Any, Any]:
    state = blockwise.start(q, kv.shape[-1] - q.shape[-1])
    output, *statistics = blockwise.finish(blockwise.forward(state, q, kv, queries, keys, **setup.kernel))
    output = output.astype(q.dtype)
    return output, (q, kv, output, *statistics, queries, keys)


def _local_backward(setup: Setup, residuals: Any, grad: jax.Array) -> tuple[Any, ...]:
    q, kv, output, peak, total, queries, keys = residuals
    delta = _delta(output, grad)
    dq, dkv = blockwise.backward(_zero_dq(q), q, kv, grad, peak, total, delta, queries, keys, **setup.kernel)
    return _from_dq(dq, q), dkv.astype(kv.dtype), None, None


_local.defvjp(_local_forward, _local_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def ring(setup: Setup, q: Any, kv: Any, q_segments: Any, k_segments: Any) -> jax.Array:
    """Keys and values travel around the ring, and in the backward their gradients with them (arXiv 2310.01889)."""
    return _ring_forward(setup, q, kv, q_segments, k_segments)[0]


def _ring_forward(setup: Setup, q: Any, kv: Any, q_segments: Any, k_segments: Any) -> tuple[Any, Any]:
    places = _Ring(setup, q_segments, k_segments)

    def hop(step, carry):
        kv, state = carry
        following = places.permute(kv)  # before the computation, which hides it
        return following, blockwise.forward(state, q, kv, *places.tokens(step), **setup.kernel)

    last = setup.sharder.cp - 1
    here, state = lax.fori_loop(0, last, hop, (kv, blockwise.start(q, kv.shape[-1] - q.shape[-1])))
    output, *statistics = blockwise.finish(blockwise.forward(state, q, here, *places.tokens(last), **setup.kernel))
    output = output.astype(q.dtype)
    return output, (q, kv, output, *statistics, q_segments, k_segments)


def _ring_backward(setup: Setup, residuals: Any, grad: jax.Array) -> tuple[Any, ...]:
    q, kv, output, peak, total, q_segments, k_segments = residuals
    places = _Ring(setup, q_segments, k_segments)
    delta = _delta(output, grad)

    def meet(step, dq, kv):
        return blockwise.backward(dq, q, kv, grad, peak, total, delta, *places.tokens(step), **setup.kernel)

    def hop(step, carry):
        kv, dq, dkv = carry
        # Both collectives start before this hop's computation, which hides them: that is why the gradients sent are
        # those of the previous hop.
        arrived, following = places.permute(dkv), places.permute(kv)
        dq, dkv = meet(step, dq, kv)
        return following, dq, arrived + dkv

    carry = (places.permute(kv), *meet(0, _zero_dq(q), kv))
    _, dq, dkv = lax.fori_loop(1, setup.sharder.cp, hop, carry)
    return _from_dq(dq, q), places.permute(dkv).astype(kv.dtype), None, None  # the last hop brings dkv home


ring.defvjp(_ring_forward, _ring_backward)


class _Ring:
    """Where things are: at step s a rank holds the keys of rank - s."""

    def __init__(self, setup: Setup, q_segments: Any, k_segments: Any) -> None:
        self.setup = setup
        self.queries = setup.queries(q_segments)
        # Four bytes a token: gathered once rather than sent along with every hop.
        self.segments = None if k_segments is None else lax.all_gather(k_segments, setup.sharder.axis_name)

    def tokens(self, step: Any) -> tuple[Tokens, Tokens]:
        """The queries of this rank, and the keys it holds at `step`."""
        source = (self.setup.sharder.rank() - step) % self.setup.sharder.cp
        return self.queries, self.setup.keys(source, None if self.segments is None else self.segments[source])

    def permute(self, x: jax.Array) -> jax.Array:
        cp = self.setup.sharder.cp
        return lax.ppermute(x, self.setup.sharder.axis_name, [(r, (r + 1) % cp) for r in range(cp)])


def _delta(output: jax.Array, grad: jax.Array) -> jax.Array:
    dtype = blockwise.accumulation_dtype(output)
    return (output.astype(dtype) * grad.astype(dtype)).sum(-1)


def _zero_dq(q: jax.Array) -> jax.Array:
    n, b, kv_heads, group, t, width = q.shape
    zero = jnp.zeros((n, b, kv_heads, width, group, t), blockwise.accumulation_dtype(q))
    return vary_over(zero, varying_axes(q))


def _from_dq(dq: jax.Array, q: jax.Array) -> jax.Array:
    return jnp.moveaxis(dq, 3, -1).astype(q.dtype)
