"""Who may attend to whom: the mask description, and its two readings, per pair of tokens and per pair of tiles."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from cpjax.shard import SliceKind


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["document_ids", "padding_mask", "vision_group_ids", "prefix", "slices"],
    meta_fields=["causal", "window", "windowed_groups", "longest_document"],
)
@dataclasses.dataclass(frozen=True)
class Mask:
    """What a query at global position i may attend to: the keys at j for which

        same document and not padding and ((causal and window and slices) or same vision group or prefix)

    Parts that are not given do not restrict, and the last two then add nothing. With `windowed_groups` a vision group
    ends at the window's left bound.

    Attributes:
        causal: j <= i.
        document_ids: int [B, L], this rank's tokens: only keys of the query's own document. Ids are 1-based; id 0
            is padding, to which nothing attends.
        padding_mask: bool [B, L], True for a pad: no query attends to it. A pad query is computed like any other.
        window: static (left, right), i - left <= j <= i + right; None is no bound. A sliding window of n tokens that
            counts the query itself, as most models do, is (n - 1, 0).
        vision_group_ids: int [B, L], below 0 for text: tokens of one group see each other both ways, at any distance.
        windowed_groups: static: i - left <= j holds for tokens of one group as well, whose right stays open.
        prefix: bool [B, L]: a key that every query of its document sees.
        slices: int32 [N, 5], the same on all ranks and for all rows: (q_start, q_end, k_start, k_end, kind) in global
            positions, `cpjax.shard.SliceKind` (which kinds there are is checked where the array is NumPy's). A pair is
            allowed if any slice allows it: causal ones are aligned at the bottom right, j - k_end <= i - q_end, inverse
            causal ones at the top left, j - k_start >= i - q_start. An empty slice allows nothing, so that batches with
            fewer slices share a program. Slices restrict a causal mask; for slices alone say causal=False.
        longest_document: static, the caller's promise that documents are contiguous and none is longer: the ring then
            skips hops that are too far for any document.
    """

    causal: bool = True
    document_ids: Any = None
    padding_mask: Any = None
    window: tuple[int | None, int | None] = (None, None)
    vision_group_ids: Any = None
    windowed_groups: bool = False
    prefix: Any = None
    slices: Any = None
    longest_document: int | None = None

    def __post_init__(self) -> None:
        window, longest = self.window, self.longest_document
        if not isinstance(window, tuple) or len(window) != 2 or not all(w is None or _is_count(w) for w in window):
            raise ValueError(f"mask.window={window!r}: give (left, right), each an integer >= 0 or None for no bound")
        for name in ("causal", "windowed_groups"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"mask.{name}={getattr(self, name)!r}: give True or False")
        if longest is not None and not (_is_count(longest) and longest > 0):
            raise ValueError(f"mask.longest_document={longest!r}: give an integer of at least 1, or None")

    def reach(self, length: int) -> Reach:
        """How far from itself a query sees, as far as that is static, in a sequence of `length` tokens."""
        left, right = (None if w is None else min(w, length) for w in self.window)
        return Reach(left, 0 if self.causal else right, left if self.windowed_groups else None)


def _is_count(value: Any) -> bool:
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool) and bool(value >= 0)


class Reach(NamedTuple):
    """Keys from `left` before the query to `right` after it, from `group_left` in its group; None is no bound."""

    left: int | None
    right: int | None
    group_left: int | None = None


NO_KEY = jnp.iinfo(jnp.int32).max
"""Position of an empty key slot: after every query."""


class Streams(NamedTuple):
    """Numbers per token that decide who sees whom, int32 [.., B, t], or None where they play no part.

    Attributes:
        segments: documents and padding together. A query sees keys of its own segment only; segment 0 (queries) and
            -1 (keys) have no partner.
        groups: vision groups, from 0 on; -1 (queries) and -2 (keys) for text.
        prefix: 1 for a key that all queries of its segment see; None for queries.
    """

    segments: Any = None
    groups: Any = None
    prefix: Any = None


NO_PARTNER = Streams(-1, -2, 0)
"""Streams of an empty key slot."""


class Tokens(NamedTuple):
    """What masks need to know of tiles of tokens.

    Attributes:
        positions: int32 [.., B or 1, t] global positions, NO_KEY for a slot that holds no key.
        streams: each [.., B, t].
        slices: of queries, int32 [.., N, 5]: the slices, those that hold queries of the tile first.
        count: int32 [..], how many do.
    """

    positions: Any
    streams: Streams = Streams()
    slices: Any = None
    count: Any = None


def streams_of(mask: Mask) -> tuple[Streams, Streams]:
    """The streams [B, L] of queries and of keys."""
    q_segments = k_segments = q_groups = k_groups = prefix = None
    if mask.document_ids is not None or mask.padding_mask is not None:
        if mask.document_ids is None:
            q_segments = jnp.ones_like(mask.padding_mask, dtype=jnp.int32)
        else:
            q_segments = jnp.maximum(mask.document_ids, 0).astype(jnp.int32)
        absent = q_segments == 0
        if mask.padding_mask is not None:
            absent |= mask.padding_mask
        k_segments = jnp.where(absent, -1, q_segments)
    if mask.vision_group_ids is not None:
        q_groups = jnp.maximum(mask.vision_group_ids, -1)
        k_groups = jnp.where(q_groups < 0, -2, q_groups)
    if mask.prefix is not None:
        prefix = mask.prefix.astype(jnp.int32)
    return Streams(q_segments, q_groups), Streams(k_segments, k_groups, prefix)


def with_slices(queries: Tokens, slices: jax.Array | None) -> Tokens:
    """Query tiles that know the slices [N, 5] which hold some of their queries."""
    if slices is None:
        return queries
    slices = jnp.asarray(slices)
    low, high = (bound((1, 2))[:, None] for bound in (queries.positions.min, queries.positions.max))
    touches = (slices[:, 0] <= high) & (low < slices[:, 1]) & (slices[:, 2] < slices[:, 3])
    order = jnp.argsort(~touches, axis=1, stable=True)
    return queries._replace(slices=slices[order], count=touches.sum(1, dtype=jnp.int32))


def pair_mask(queries: Tokens, keys: Tokens, reach: Reach) -> jax.Array:
    """Which query of a tile sees which key of another: bool [B or 1, tq, tk]. Tokens of one tile each."""
    left, right, group_left = reach
    i, j = queries.positions[:, :, None], keys.positions[:, None, :]
    mask = jnp.broadcast_to(j != NO_KEY, jnp.broadcast_shapes(i.shape, j.shape)) if right is None else j <= i + right
    if left is not None:
        mask &= j >= i - left
    if queries.slices is not None:
        mask &= _in_slices(queries, j)
    q, k = queries.streams, keys.streams
    if q.groups is not None:
        same = q.groups[:, :, None] == k.groups[:, None, :]
        mask = mask | (same if group_left is None else same & (j >= i - group_left))
    if k.prefix is not None:
        mask = mask | (k.prefix[:, None, :] > 0)
    if q.segments is not None:
        mask = mask & (q.segments[:, :, None] == k.segments[:, None, :])
    return mask


def _in_slices(queries: Tokens, j: jax.Array) -> jax.Array:
    """Pairs [B or 1, tq, tk] in the union of slices; j [B or 1, 1, tk]. In each a query sees an interval of keys."""
    i = queries.positions[:, :, None]

    def add(n, mask):
        q_start, q_end, k_start, k_end, kind = (queries.slices[n, column] for column in range(5))
        low = jnp.where(kind >= SliceKind.INVERSE_CAUSAL, jnp.maximum(k_start, i - q_start + k_start), k_start)
        high = jnp.where(kind % 2 == SliceKind.CAUSAL, jnp.minimum(k_end, i - q_end + k_end + 1), k_end)
        high = jnp.where((q_start <= i) & (i < q_end), high, low)
        return mask | ((low <= j) & (j < high))

    nothing = (i < 0) & (j < 0) & (queries.count < 0)  # varies over the mesh like the operands
    return jax.lax.fori_loop(0, queries.count, add, nothing)


def tile_mask(queries: Tokens, keys: Tokens, reach: Reach) -> jax.Array:
    """`pair_mask` for whole tiles, from the bounds of their positions, streams and slices.

    Args:
        queries, keys: n tiles each, of t tokens.

    Returns:
        bool [nq, nk, B], or [nq, nk, 1] where all rows are alike. Where it is False no pair of the two tiles is
        allowed. Where it is True there mostly is one: bounds may touch where no number, or no pair that every part of
        the mask allows, does.
    """
    left, right, group_left = reach
    q_low, q_high = queries.positions.min(-1)[:, None], queries.positions.max(-1)[:, None]
    k_low, k_high = keys.positions.min(-1), jnp.where(keys.positions == NO_KEY, -1, keys.positions).max(-1)
    some = jnp.ones(jnp.broadcast_shapes(q_low.shape, k_low.shape), bool)  # [nq, nk, B or 1]
    if right is not None:
        some &= k_low <= q_high + right
    if left is not None:
        some &= k_high >= q_low - left
    if queries.slices is not None:
        bounds = q_low.min(-1), q_high.max(-1), k_low.min(-1), k_high.max(-1)  # of all rows, as slices are
        some &= _slices_meet(queries.slices, *bounds)[..., None]
    q, k = queries.streams, keys.streams
    if q.groups is not None:
        same = _meet(q.groups, k.groups, 0)
        some = some | (same if group_left is None else same & (k_high >= q_low - group_left))
    if k.prefix is not None:
        some = some | (k.prefix > 0).any(-1)
    if q.segments is not None:
        some = some & _meet(q.segments, k.segments, 1)
    return some


def _meet(queries: jax.Array, keys: jax.Array, least: int) -> jax.Array:
    """Whether the bounds of the numbers >= least of two tiles [.., B, t] overlap: [nq, nk, B]."""
    (q_low, q_high), (k_low, k_high) = (
        (jnp.where(x < least, jnp.iinfo(jnp.int32).max, x).min(-1), x.max(-1)) for x in (queries, keys)
    )
    return (q_low[:, None] <= k_high) & (k_low <= q_high[:, None])


def _slices_meet(slices: jax.Array, q_low: Any, q_high: Any, k_low: Any, k_high: Any) -> jax.Array:
    """Whether a slice of the query tile [nq, N, 5] meets the rectangle of two tiles: [nq, nk]."""
    q_start, q_end, k_start, k_end, kind = jnp.moveaxis(slices, -1, 0)[:, :, None]  # [nq, 1, N] each
    q_low, q_high = jnp.maximum(q_low[..., None], q_start), jnp.minimum(q_high[..., None], q_end - 1)
    k_low, k_high = jnp.maximum(k_low[:, None], k_start), jnp.minimum(k_high[:, None], k_end - 1)
    some = (q_low <= q_high) & (k_low <= k_high)
    # Inside the rectangle j - i runs over an interval; so do the differences that the kind allows.
    least, most = k_start - q_start, k_end - q_end
    some &= (kind % 2 != SliceKind.CAUSAL) | (k_low - q_high <= most)
    some &= (kind < SliceKind.INVERSE_CAUSAL) | (k_high - q_low >= least)
    some &= (kind != SliceKind.BI_CAUSAL) | (least <= most)
    return some.any(-1)


def check_mask(mask: Mask, shape: tuple[int, int]) -> None:
    """Raises ValueError unless the streams are [B, L] = `shape` and the slices [N, 5]."""
    for name in ("document_ids", "padding_mask", "vision_group_ids", "prefix"):
        stream = getattr(mask, name)
        if stream is not None and np.shape(stream) != shape:
            raise ValueError(
                f"mask.{name} has shape {np.shape(stream)}, but the local tokens are [B, L] = {shape}: shard it like "
                "q (sharder.take_local)"
            )
        kind = "bool" if name in ("padding_mask", "prefix") else "int32"
        if stream is not None and stream.dtype != kind:
            raise ValueError(f"mask.{name} has dtype {stream.dtype}: it must be {kind}, so convert it first")
    if mask.longest_document is not None and mask.document_ids is None:
        raise ValueError("mask.longest_document was given without document_ids: give both or neither")
    slices = mask.slices
    if slices is not None and (
        slices.ndim != 2 or slices.shape[0] == 0 or slices.shape[1] != 5 or slices.dtype != jnp.int32
    ):
        raise ValueError(
            f"mask.slices has shape {slices.shape} and dtype {slices.dtype}: it must be int32 [N, 5], one row "
            "(q_start, q_end, k_start, k_end, kind) a slice, and at least one"
        )
    if isinstance(slices, np.ndarray) and not np.isin(slices[:, 4], list(SliceKind)).all():
        raise ValueError(f"mask.slices has kinds {sorted(set(slices[:, 4].tolist()))}: they must be 0 to 3, SliceKind")
