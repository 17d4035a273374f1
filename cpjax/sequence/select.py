"""The best keys of the whole sequence for each query (the indexers of sparse attention), and rows at given positions.

Keys travel around the ring; every query keeps a running list of its best. Nothing holds a score for every pair.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from cpjax.sequence.pools import NEVER, Windows, windows
from cpjax.sequence.runs import check_one_map
from cpjax.shard import Sharder
from cpjax.varying import vary_over, varying_axes

_TILE = 128
"""Queries scored at a time, and keys where fewer than that are selected."""


class _Queries(NamedTuple):
    features: Any  # [B, t, H, D]
    positions: Any  # int32 [t]
    document_ids: Any = None  # [B, t]
    weights: Any = None  # [B, t, H]


class _Keys(NamedTuple):
    features: Any  # [B, n, D], or by blocks [B, n, w, D]
    first: Any  # int32 [n], -1: no key
    last: Any  # int32 [n]; a causal query sees a key from its last position on
    document_ids: Any = None  # [B, n], or [B, n, w]


_Score = Callable[[_Queries, _Keys], jax.Array]
"""Scores [B, t, n], or [B, t, H, n], with -inf for pairs that are not allowed."""


def top_k_keys(
    q: jax.Array,
    k: jax.Array | Windows,
    weights: jax.Array,
    count: int,
    *,
    sharder: Sharder,
    causal: bool = True,
    document_ids: jax.Array | None = None,
) -> jax.Array:
    """The `count` keys of the whole sequence with the greatest sum_h weights_h ReLU(q_h . k) for each local query.

    The score is that of DeepSeek's lightning indexer (arXiv 2512.02556). The selection is that of a top-k over all
    scores in global order: among equal scores the key of lower position wins. Scores are computed in float32 or wider.
    Keys whose scores differ by no more than their rounding may change places between meshes. No gradient flows.

    Args:
        q: [B, L, H, D], this rank's queries.
        k: [B, L, D], this rank's keys; or pools of keys, of which a causal query sees those that end at or before it.
        weights: [B, L, H].
        count: how many keys to select.
        document_ids: int [B, L], 1-based, 0 = pad: only keys of the query's own document; pads select nothing and are
            never selected. Pools must then have been made with them. Without them the keys are all before
            `sharder.end`.

    Returns:
        int32 [B, L, count]: global positions (of pools: `first`) by falling score; -1 where fewer keys are allowed.

    Raises:
        ValueError: shapes that do not fit each other or the sharder, or pools and queries of which only one knows its
            documents.
    """
    pools = k if isinstance(k, Windows) else None
    features = k.values if isinstance(k, Windows) else k
    if weights.shape != q.shape[:3] or features.ndim != 3:
        raise ValueError(
            f"top_k_keys was given q {q.shape}, k {features.shape}, weights {weights.shape}: it needs q [B, L, H, D], "
            "k [B, L, D] (pools [B, n, D]) and weights [B, L, H]"
        )
    _check("top_k_keys", q, features, document_ids, count, sharder, None if pools is None else pools.first.shape[0])
    if pools is None:
        positions = sharder.positions()
        exists = positions < sharder.end
        keys = _Keys(features, jnp.where(exists, positions, -1), jnp.where(exists, positions, NEVER), document_ids)
    else:
        if (pools.document_ids is None) != (document_ids is None):
            raise ValueError(
                f"top_k_keys was given queries {'with' if document_ids is not None else 'without'} document_ids and "
                f"pools {'with' if pools.document_ids is not None else 'without'}: give them to both or to none"
            )
        keys = _Keys(features, pools.first, pools.last, pools.document_ids)

    def score(q: _Queries, k: _Keys) -> jax.Array:
        scores = _dot("bthd,bnd->bthn", q.features, k.features)
        scores = (q.weights[..., None].astype(scores.dtype) * jax.nn.relu(scores)).sum(2)
        allowed = (k.last <= q.positions[:, None] if causal else k.last != NEVER)[None]
        if q.document_ids is not None:
            same = q.document_ids[:, :, None] == k.document_ids[:, None]
            allowed = allowed & same & (q.document_ids != 0)[:, :, None]
        return jnp.where(allowed, scores, -jnp.inf)

    queries = _Queries(q, sharder.positions(), document_ids, weights)
    return _top_k(queries, keys, count, score, (), _TILE, causal, sharder)


def top_k_blocks(
    q: jax.Array,
    k: jax.Array,
    count: int,
    *,
    block: int,
    local: int = 1,
    sharder: Sharder,
    causal: bool = True,
    document_ids: jax.Array | None = None,
) -> jax.Array:
    """The `count` blocks of keys with the greatest max q . k over their allowed keys, for each local query and head.

    Blocks are `block` consecutive positions of the global order from a multiple of `block` on; they may straddle
    ranks. Of the allowed blocks the query's own one and those just before it, `local` in all, come first; among equal
    scores the lower position wins. No gradient flows. The rule of MiniMax-M3's indexer, whose heads are key groups.

    Args:
        q: [B, L, H, D], this rank's queries.
        k: [B, L, D], this rank's keys.
        count: how many blocks to select.
        document_ids: int [B, L], 1-based, 0 = pad: only keys of the query's own document are allowed.

    Returns:
        int32 [B, L, H, count]: the number of each block, -1 where fewer have an allowed key.

    Raises:
        ValueError: shapes that do not fit each other or the sharder, or a layout without runs (striped).
    """
    if k.ndim != 3:
        raise ValueError(f"top_k_blocks was given q {q.shape}, k {k.shape}: it needs q [B, L, H, D] and k [B, L, D]")
    _check("top_k_blocks", q, k, document_ids, count, sharder, None)
    if not 0 <= local <= count:
        raise ValueError(f"top_k_blocks was given local={local}: it must be 0 to count={count}")
    cut = windows(k, block, block, sharder=sharder)
    ids = None if document_ids is None else windows(document_ids, block, block, sharder=sharder).values
    # A block is seen from its first key on, key by key.
    keys = _Keys(cut.values, cut.first, jnp.where(cut.first < 0, NEVER, cut.first), ids)
    offsets = jnp.arange(block, dtype=jnp.int32)

    def score(q: _Queries, k: _Keys) -> jax.Array:
        scores = _dot("bthd,bnwd->bthnw", q.features, k.features)
        place = k.first[:, None] + offsets  # [n, w]
        allowed = (place < sharder.end) & (k.first >= 0)[:, None]
        here = q.positions[:, None, None]
        allowed = (allowed & (place <= here) if causal else jnp.broadcast_to(allowed, (here.shape[0], *place.shape)))[
            None
        ]
        if q.document_ids is not None:
            same = q.document_ids[:, :, None, None] == k.document_ids[:, None]
            allowed = allowed & same & (q.document_ids != 0)[:, :, None, None]
        scores = jnp.where(allowed[:, :, None], scores, -jnp.inf).max(-1)
        back = q.positions[:, None] // block - k.first // block
        forced = allowed.any(-1) & (back >= 0) & (back < local)
        return jnp.where(forced[:, :, None], jnp.inf, scores)

    queries = _Queries(q, sharder.positions(), document_ids)
    chosen = _top_k(queries, keys, count, score, (q.shape[2],), max(1, _TILE // block), causal, sharder)
    return jnp.where(chosen < 0, -1, chosen // block)


def take_keys(x: jax.Array | Windows, positions: jax.Array, *, sharder: Sharder) -> jax.Array:
    """The rows of the whole sequence that stand at given positions, for each local query; differentiable.

    Rows travel around the ring. The result is `count` rows a query: take them for a part of the queries at a time
    where that is large.

    Args:
        x: [B, L, ...], this rank's rows, or pools [B, n, ...], known by their `first`.
        positions: int [B, Q, count] as from `top_k_keys`.

    Returns:
        [B, Q, count, ...]; zeros where no row stands, as at -1.
    """
    check_one_map("take_keys", sharder)
    rows = x.values if isinstance(x, Windows) else x
    wanted = x.first.shape[0] if isinstance(x, Windows) else sharder.local_length
    if positions.ndim != 3 or rows.ndim < 2 or rows.shape[:2] != (positions.shape[0], wanted):
        raise ValueError(
            f"take_keys was given x {rows.shape} and positions {positions.shape}, but ranks hold {wanted} rows: it "
            "needs x [B, L, ...] of this rank's own tokens, or pools, and positions [B, Q, count]"
        )
    first = x.first if isinstance(x, Windows) else sharder.positions()

    def meet(out: jax.Array, held: tuple[jax.Array, jax.Array]) -> jax.Array:
        rows, first = held
        total = sharder.padded_length
        slots = jnp.full(total, -1, jnp.int32).at[jnp.where(first < 0, total, first)]
        slot = slots.set(jnp.arange(first.shape[0], dtype=jnp.int32), mode="drop")[jnp.clip(positions, 0, total - 1)]
        found = (slot >= 0) & (positions >= 0) & (positions < total)
        taken = jax.vmap(lambda row, index: row[index])(rows, slot)
        return jnp.where(found.reshape(*found.shape, *[1] * (rows.ndim - 2)), taken, out)

    out = jnp.zeros((*positions.shape, *rows.shape[2:]), rows.dtype)
    return _around_the_ring(meet, out, (rows, first), sharder, positions)


def _dot(formula: str, a: jax.Array, b: jax.Array) -> jax.Array:
    dtype = jnp.promote_types(jnp.result_type(a, b), jnp.float32)
    return jnp.einsum(formula, a, b, precision=lax.Precision.HIGHEST, preferred_element_type=dtype)


def _top_k(
    queries: _Queries,
    keys: _Keys,
    count: int,
    score: _Score,
    heads: tuple[int, ...],
    tile: int,
    causal: bool,
    sharder: Sharder,
) -> jax.Array:
    """`first` of the best keys, int32 [B, L, *heads, count]; keys are scored `tile` or more at a time."""
    batch, length = queries.features.shape[:2]
    queries, keys = lax.stop_gradient((queries, keys))
    size = min(_TILE, length)
    # An empty query slot stands before every key, an empty key slot after every query.
    cut = queries._replace(positions=_cut(queries.positions, size, -1))
    cut = _Queries(*(x if x is None or x is cut.positions else _cut(x, size, 0, 1) for x in cut))
    tile = min(max(tile, count), keys.first.shape[0])  # a merge sorts count + tile entries for `tile` new ones

    def meet(best: Any, held: _Keys) -> Any:
        tiles = _Keys(
            features=_cut(held.features, tile, 0, 1),
            first=_cut(held.first, tile, -1),
            last=_cut(held.last, tile, NEVER),
            document_ids=None if held.document_ids is None else _cut(held.document_ids, tile, 0, 1),
        )

        def one_tile(state: tuple[_Queries, Any]) -> Any:
            q, best = state

            def step(best: Any, k: _Keys) -> tuple[Any, None]:
                merge = functools.partial(_merge, score, q, k)
                if causal:  # by positions alone, which are the same for all rows of the batch
                    return lax.cond(k.last.min() <= q.positions.max(), merge, lambda best: best, best), None
                return merge(best), None

            return lax.scan(step, best, tiles)[0]

        return lax.map(one_tile, (cut, best))

    dtype = jnp.promote_types(jnp.result_type(queries.features, keys.features), jnp.float32)
    shape = (cut.positions.shape[0], batch, size, *heads, count)
    best = (jnp.full(shape, jnp.inf, dtype), jnp.full(shape, NEVER, jnp.int32))
    best = _around_the_ring(meet, best, keys, sharder, queries)
    loss, first = (jnp.moveaxis(x, 0, 1).reshape(batch, -1, *heads, count)[:, :length] for x in best)
    return jnp.where(loss == jnp.inf, -1, first)


def _merge(score: _Score, q: _Queries, k: _Keys, best: Any) -> Any:
    """The best of a running list, sorted by negative score and position, and of one more tile of keys."""
    loss, first = best
    more = -score(q, k).astype(loss.dtype)
    places = jnp.broadcast_to(k.first, more.shape)
    both = [jnp.concatenate(pair, axis=-1) for pair in ((loss, more), (first, places))]
    return tuple(x[..., : loss.shape[-1]] for x in lax.sort(both, num_keys=2))


def _cut(x: jax.Array, size: int, fill: int, axis: int = 0) -> jax.Array:
    """[.., L, ..] -> [tiles, .., size, ..], the last tile filled up."""
    widths = [(0, -x.shape[axis] % size if a == axis else 0) for a in range(x.ndim)]
    x = jnp.pad(x, widths, constant_values=fill)
    return jnp.moveaxis(x.reshape(*x.shape[:axis], -1, size, *x.shape[axis + 1 :]), axis, 0)


def _around_the_ring(meet: Callable[[Any, Any], Any], state: Any, held: Any, sharder: Sharder, *operands: Any) -> Any:
    """Folds `meet(state, held)` over what every rank holds; `operands` are what else `meet` depends on."""
    axes = frozenset({sharder.axis_name} if sharder.cp > 1 else ())
    axes = axes.union(*map(varying_axes, jax.tree.leaves((state, held, operands))))
    state, held = jax.tree.map(lambda x: vary_over(jnp.asarray(x), axes), (state, held))
    pairs = [(rank, (rank + 1) % sharder.cp) for rank in range(sharder.cp)]

    def hop(carry: tuple[Any, Any], _: None) -> tuple[tuple[Any, Any], None]:
        state, held = carry
        following = jax.tree.map(lambda x: lax.ppermute(x, sharder.axis_name, pairs), held)  # hidden by `meet`
        return (meet(state, held), following), None

    if sharder.cp > 1:
        (state, held), _ = lax.scan(hop, (state, held), length=sharder.cp - 1)
    return meet(state, held)


def _check(
    caller: str,
    q: jax.Array,
    k: jax.Array,
    document_ids: jax.Array | None,
    count: int,
    sharder: Sharder,
    pools: int | None,
) -> None:
    check_one_map(caller, sharder)
    if count < 1:
        raise ValueError(f"{caller} was given count={count}: it must be at least 1")
    length = sharder.local_length
    if q.ndim != 4 or q.shape[1] != length or k.shape != (q.shape[0], pools or length, q.shape[3]):
        raise ValueError(
            f"{caller} was given q {q.shape} and k {k.shape}, but ranks hold L={length} tokens"
            f"{'' if pools is None else f' and {pools} pools'}: it needs q [B, L, H, D] and k [B, L, D] of this rank's "
            "own tokens with the same B and D"
        )
    if document_ids is not None and document_ids.shape != q.shape[:2]:
        raise ValueError(
            f"{caller} was given document_ids of shape {document_ids.shape}, but the local tokens are [B, L] = "
            f"{q.shape[:2]}: shard them like q"
        )
