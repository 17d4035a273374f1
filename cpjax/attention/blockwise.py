"""Blockwise attention in plain XLA: a loop over the pairs of tiles that hold an allowed pair of tokens.

Formulas: the online softmax of FlashAttention (arXiv 2205.14135) and its backward (arXiv 2307.08691, algorithm 2).

Tiled operands, n tiles of t tokens each, every tile one contiguous slice:

    q, output   [n, B, K, G, t, D]     G = H / K query heads share a key head
    kv, dkv     [n, B, K, t, W]        keys and values in one array, so that they travel as one: side by side,
                                       W = D + Dv, or (values that are the keys) W = D = Dv
    peak, total, delta  [n, B, K, G, t]
    tokens      see `cpjax.attention.mask.Tokens`
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from cpjax.attention.mask import Reach, Tokens, pair_mask, tile_mask
from cpjax.mesh import device_platform
from cpjax.varying import vary_over, varying_axes

CACHED_SCORES = 1 << 15
"""Scores of a pair of tiles that are computed together on a CPU; tiles hold more where one key head makes more."""


@dataclasses.dataclass(frozen=True)
class Rule:
    """Static facts of a score.

    Attributes:
        reach: bounds of j - i.
        scale: factor on the products.
        softcap: c in c tanh(score / c), or None.
        values: the first column of kv that belongs to the values: D, or 0 where they are the keys.
    """

    reach: Reach
    scale: float
    softcap: float | None
    values: int

    def score(self, products: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The scores that products of queries and keys make, and their derivative."""
        if self.softcap is None:
            return products * self.scale, jnp.asarray(self.scale, products.dtype)
        capped = jnp.tanh(products * (self.scale / self.softcap))
        return self.softcap * capped, self.scale * (1 - capped**2)


class State(NamedTuple):
    """The online softmax of some queries over the keys met so far.

    Attributes:
        output: [n, B, K, G, t, Dv] sum of exp(score - peak) v.
        peak: [n, B, K, G, t] greatest score, -inf before the first key.
        total: [n, B, K, G, t] sum of exp(score - peak).
    """

    output: jax.Array
    peak: jax.Array
    total: jax.Array


def accumulation_dtype(x: jax.Array) -> Any:
    """float32 at least."""
    return jnp.promote_types(x.dtype, jnp.float32)


def start(q: jax.Array, width: int) -> State:
    """No key met yet; `width` is Dv."""
    dtype, rows = accumulation_dtype(q), q.shape[:-1]
    state = State(jnp.zeros((*rows, width), dtype), jnp.full(rows, -jnp.inf, dtype), jnp.zeros(rows, dtype))
    return jax.tree.map(functools.partial(vary_over, axes=varying_axes(q)), state)


def forward(state: State, q: jax.Array, kv: jax.Array, queries: Tokens, keys: Tokens, rule: Rule) -> State:
    """The state after meeting these keys too; each key is to be met once, in any order."""
    product = functools.partial(_product, dtype=accumulation_dtype(q))
    width = q.shape[-1]

    heads = _heads_at_once(q)
    parts = q.shape[2] // heads

    def row(n, state):
        i, head = n // parts, n % parts * heads
        q_tile, *here = (_take(x, i, head, heads) for x in (q, *state))

        def visit(j, mask, here):
            kv_tile = _take(kv, j, head, heads)
            k, v = kv_tile[..., :width], kv_tile[..., rule.values :]
            scores, _ = rule.score(product(q_tile, k, (4,), (3,)))
            scores = jnp.where(mask[:, None, None], scores, -jnp.inf)
            return absorb(here, scores, lambda p: product(p.astype(v.dtype), v, (4,), (2,)))

        here = pairs.visit(i, visit, State(*here))
        return jax.tree.map(lambda x, tile: _put(x, tile, i, head), state, here)

    pairs = _Pairs(queries, keys, rule.reach)
    return lax.fori_loop(0, q.shape[0] * parts, row, state)


def absorb(here: State, scores: jax.Array, weigh: Callable[[jax.Array], Any]) -> State:
    """The state of some queries after more keys.

    Args:
        here: its output may be any tree of arrays [.., queries, columns].
        scores: [.., queries, keys], -inf where a pair is not allowed.
        weigh: the products, like the output, of weights [.., queries, keys] with the values.
    """
    peak = jnp.maximum(here.peak, scores.max(-1))
    shift = jnp.where(peak == -jnp.inf, 0, peak)  # a row without a key so far: exp(-inf - 0) = 0
    p = jnp.exp(scores - shift[..., None])
    decay = jnp.exp(here.peak - shift)
    output = jax.tree.map(lambda old, new: old * decay[..., None] + new, here.output, weigh(p))
    return State(output, peak, here.total * decay + p.sum(-1))


def finish(state: State, sinks: jax.Array | None) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Output, peak and total over all keys. A query that met no key has output 0, and a peak that makes its p 0.

    `sinks` [K, G] are one more score per head, without a value.
    """
    if sinks is not None:
        sinks = sinks[:, :, None]
        peak = jnp.maximum(state.peak, sinks)
        shift = jnp.where(peak == -jnp.inf, 0, peak)
        decay = jnp.exp(state.peak - shift)
        total = state.total * decay + jnp.exp(sinks - shift)
        state = State(state.output * decay[..., None], peak, total)
    some = state.total > 0
    total = jnp.where(some, state.total, 1)
    # Two numbers rather than their log-sum-exp, which would round away log(total) beside a large peak.
    return state.output / total[..., None], jnp.where(some, state.peak, jnp.inf), total


def backward(
    dq: jax.Array,
    q: jax.Array,
    kv: jax.Array,
    grad: jax.Array,
    peak: jax.Array,
    total: jax.Array,
    delta: jax.Array,
    queries: Tokens,
    keys: Tokens,
    rule: Rule,
) -> tuple[jax.Array, jax.Array]:
    """Gradients of attention, the part that is due to these keys.

    Args:
        dq: [n, B, K, D, G, t] the sum so far, TRANSPOSED: then no product below has to transpose a tile of scores.
        grad: cotangent of the output.
        peak, total: softmax statistics over ALL keys, from `finish`.
        delta: sum of output x grad over Dv.

    Returns:
        dq with this part added, and dkv, both in the accumulation dtype.
    """
    dtype = accumulation_dtype(q)
    product = functools.partial(_product, dtype=dtype)
    width, heads = q.shape[-1], _heads_at_once(q)
    parts = q.shape[2] // heads

    def row(n, carry):
        dq, dkv = carry
        i, head = n // parts, n % parts * heads
        q_tile, grad_tile, *statistics = (_take(x, i, head, heads) for x in (q, grad, peak, total, delta))
        peak_tile, total_tile, delta_tile = (x[:, :, None] for x in statistics)
        weight = 1 / total_tile

        def visit(j, mask, carry):  # tiles of scores are [B, K, keys, G, queries] here
            dq_tile, dkv = carry
            kv_tile = _take(kv, j, head, heads)
            k, v = kv_tile[..., :width], kv_tile[..., rule.values :]
            scores, slope = rule.score(product(k, q_tile, (3,), (4,)))
            p = jnp.exp(scores - peak_tile) * weight
            p = jnp.where(mask.swapaxes(1, 2)[:, None, :, None], p, 0)
            ds = p * (product(v, grad_tile, (3,), (4,)) - delta_tile) * slope
            dk = product(ds.astype(q.dtype), q_tile, (3, 4), (2, 3))
            dv = product(p.astype(q.dtype), grad_tile, (3, 4), (2, 3))
            part = jnp.concatenate([dk, dv], -1) if rule.values else dk + dv
            dkv = _put(dkv, _take(dkv, j, head, heads) + part, j, head)  # at once: of two updates, one may copy dkv
            # Not in bfloat16: XLA's CPU backend has no such product with the contracted axis first.
            return dq_tile + product(k.astype(dtype), ds, (2,), (2,)), dkv

        dq_tile, dkv = pairs.visit(i, visit, (_take(dq, i, head, heads), dkv))
        return _put(dq, dq_tile, i, head), dkv

    pairs = _Pairs(queries, keys, rule.reach)
    return lax.fori_loop(0, q.shape[0] * parts, row, (dq, vary_over(jnp.zeros(kv.shape, dtype), varying_axes(q))))


def partners(some: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Of every tile the tiles with which it has work, in order, and how many: bool [.., n, m] -> [.., n, m], [.., n].

    Behind these come the others.
    """
    return jnp.argsort(~some, axis=-1, stable=True).astype(jnp.int32), some.sum(-1, dtype=jnp.int32)


class _Pairs:
    """The pairs of tiles that have work."""

    def __init__(self, queries: Tokens, keys: Tokens, reach: Reach) -> None:
        self.queries, self.keys, self.reach = queries, keys, reach
        self.columns, self.counts = partners(tile_mask(queries, keys, reach).any(-1))

    def visit(self, i: jax.Array, step: Callable[..., Any], carry: Any) -> Any:
        """Folds `step(j, mask, carry)` over the key tiles j with which query tile i has work, and over no others."""
        queries = jax.tree.map(lambda x: x[i], self.queries)

        def body(n, carry):
            j = self.columns[i, n]
            keys = jax.tree.map(lambda x: x[j], self.keys)
            return step(j, pair_mask(queries, keys, self.reach), carry)

        return lax.fori_loop(0, self.counts[i], body, carry)


def _product(x: jax.Array, y: jax.Array, x_axes: Any, y_axes: Any, dtype: Any) -> jax.Array:
    """Contraction of two tiles [B, K, ..]: [B, K, rest of x, rest of y]. (An einsum may swap them and transpose.)"""
    return lax.dot_general(x, y, ((x_axes, y_axes), ((0, 1), (0, 1))), preferred_element_type=dtype)


def _heads_at_once(q: jax.Array) -> int:
    """Key heads whose tiles are computed together: all, but on CPUs only so many that a core's cache holds the scores.

    (Measured: 8 to 11 % less time of forward and backward for 8 heads, see `benchmarks`.)
    """
    _, batch, kv_heads, group, length, _ = q.shape
    if device_platform() != "cpu":
        return kv_heads
    most = max(1, CACHED_SCORES // (batch * group * length**2))
    return max(heads for heads in range(1, kv_heads + 1) if heads <= most and kv_heads % heads == 0)


def _take(x: jax.Array, i: jax.Array, head: jax.Array, heads: int) -> jax.Array:
    """`heads` heads of tile i: [n, B, K, ..] -> [B, heads, ..]."""
    return lax.dynamic_slice_in_dim(lax.dynamic_index_in_dim(x, i, 0, keepdims=False), head, heads, 1)


def _put(x: jax.Array, tile: jax.Array, i: jax.Array, head: jax.Array) -> jax.Array:
    """Inverse of `_take`."""
    start = [jnp.int32(s) for s in (i, 0, head, *[0] * (x.ndim - 3))]
    return lax.dynamic_update_slice(x, tile[None], start)
