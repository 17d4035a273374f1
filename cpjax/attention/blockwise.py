"""Blockwise attention in plain XLA: a loop over the pairs of tiles that hold an allowed pair of tokens.

Formulas: the online softmax of FlashAttention (arXiv 2205.14135) and its backward (arXiv 2307.08691, algorithm 2).

Tiled operands, n tiles of t tokens each, every tile one contiguous slice:

    q, output   [n, B, K, G, t, D]     G = H / K query heads share a key head
    kv, dkv     [n, B, K, t, D + Dv]   keys and values side by side, so that they travel as one array
    lse, delta  [n, B, K, G, t]
    tokens      positions [n, t], segments [n, B, t]
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from cpjax.attention.mask import Tokens, pair_mask, tile_mask
from cpjax.attention.varying import vary_over, varying_axes

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


def forward(
    state: State, q: jax.Array, kv: jax.Array, queries: Tokens, keys: Tokens, *, causal: bool, scale: float
) -> State:
    """The state after meeting these keys too; each key is to be met once, in any order."""
    product = functools.partial(_product, dtype=accumulation_dtype(q))
    width = q.shape[-1]

    def visit(i, j, mask, state):
        k, v = kv[j][..., :width], kv[j][..., width:]
        scores = product(q[i], k, (4,), (3,)) * scale
        scores = jnp.where(mask[:, None, None], scores, -jnp.inf)
        peak = jnp.maximum(state.peak[i], scores.max(-1))
        shift = jnp.where(peak == -jnp.inf, 0, peak)  # a row without a key so far: exp(-inf - 0) = 0
        p = jnp.exp(scores - shift[..., None])
        decay = jnp.exp(state.peak[i] - shift)
        output = state.output[i] * decay[..., None] + product(p.astype(v.dtype), v, (4,), (2,))
        total = state.total[i] * decay + p.sum(-1)
        return State(_put(state.output, i, output), _put(state.peak, i, peak), _put(state.total, i, total))

    return _visit_pairs(visit, queries, keys, causal, state)


def finish(state: State) -> tuple[jax.Array, jax.Array]:
    """Output and log-sum-exp of the scores; 0 and -inf for a query that met no key."""
    some = state.total > 0
    total = jnp.where(some, state.total, 1)
    return state.output / total[..., None], jnp.where(some, state.peak + jnp.log(total), -jnp.inf)


def backward(
    dq: jax.Array,
    q: jax.Array,
    kv: jax.Array,
    grad: jax.Array,
    lse: jax.Array,
    delta: jax.Array,
    queries: Tokens,
    keys: Tokens,
    *,
    causal: bool,
    scale: float,
) -> tuple[jax.Array, jax.Array]:
    """Gradients of attention, the part that is due to these keys.

    Args:
        dq: [n, B, K, D, G, t] the sum so far, TRANSPOSED: then no product below has to transpose a tile of scores.
        grad: cotangent of the output.
        lse: log-sum-exp over ALL keys.
        delta: sum of output x grad over Dv.

    Returns:
        dq with this part added, and dkv, both in the accumulation dtype.
    """
    dtype = accumulation_dtype(q)
    product = functools.partial(_product, dtype=dtype)
    width = q.shape[-1]
    lse = jnp.where(lse == -jnp.inf, jnp.inf, lse)  # exp(score - inf) = 0: no gradient for rows without a key

    def visit(i, j, mask, carry):  # score tiles are [B, K, keys, G, queries] here
        dq, dkv = carry
        k, v = kv[j][..., :width], kv[j][..., width:]
        p = jnp.exp(product(k, q[i], (3,), (4,)) * scale - lse[i][:, :, None])
        p = jnp.where(mask.swapaxes(1, 2)[:, None, :, None], p, 0)
        ds = p * (product(v, grad[i], (3,), (4,)) - delta[i][:, :, None]) * scale
        p, ds = p.astype(q.dtype), ds.astype(q.dtype)
        dk, dv = product(ds, q[i], (3, 4), (2, 3)), product(p, grad[i], (3, 4), (2, 3))
        dq = _put(dq, i, dq[i] + product(k, ds, (2,), (2,)))
        return dq, _put(dkv, j, dkv[j] + jnp.concatenate([dk, dv], -1))

    return _visit_pairs(visit, queries, keys, causal, (dq, vary_over(jnp.zeros(kv.shape, dtype), varying_axes(q))))


def _visit_pairs(visit: Callable[..., Any], queries: Tokens, keys: Tokens, causal: bool, carry: Any) -> Any:
    """Folds `visit(i, j, mask, carry)` over the pairs of tiles that have work, and over no others."""
    some = tile_mask(queries, keys, causal=causal)
    order = jnp.argsort(~some.reshape(-1), stable=True).astype(jnp.int32)

    def step(index, carry):
        i, j = order[index] // some.shape[1], order[index] % some.shape[1]
        rows, columns = jax.tree.map(lambda x: x[i], queries), jax.tree.map(lambda x: x[j], keys)
        return visit(i, j, pair_mask(rows, columns, causal=causal), carry)

    return lax.fori_loop(0, some.sum(dtype=jnp.int32), step, carry)


def _product(x: jax.Array, y: jax.Array, x_axes: Any, y_axes: Any, dtype: Any) -> jax.Array:
    """Contraction of two tiles [B, K, ..]: [B, K, rest of x, rest of y]. (An einsum may swap them and transpose.)"""
    return lax.dot_general(x, y, ((x_axes, y_axes), ((0, 1), (0, 1))), preferred_element_type=dtype)


def _put(x: jax.Array, i: jax.Array, tile: jax.Array) -> jax.Array:
    return lax.dynamic_update_index_in_dim(x, tile, i, 0)
