"""Who may attend to whom: the mask description, and its two readings, per pair of tokens and per pair of tiles."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["document_ids", "padding_mask"], meta_fields=["causal"]
)
@dataclasses.dataclass(frozen=True)
class Mask:
    """What a query may attend to; the parts are combined with "and".

    Attributes:
        causal: only keys whose global position is not after the query's.
        document_ids: int [B, L], this rank's tokens: only keys of the query's own document. Ids are 1-based; id 0
            is padding, to which nothing attends.
        padding_mask: bool [B, L], True for a pad: no query attends to it. A pad query is computed like any other.
    """

    causal: bool = True
    document_ids: Any = None
    padding_mask: Any = None


NO_KEY = jnp.iinfo(jnp.int32).max
"""Position of an empty key slot: after every query."""


class Tokens(NamedTuple):
    """What masks need to know of a row of tokens.

    Attributes:
        positions: int32 [..., t] global positions, NO_KEY for a slot that holds no key.
        segments: int32 [..., B, t], or None if all tokens are of one segment. A query sees the keys of its own
            segment; segment 0 (queries) and -1 (keys) have no partner.
    """

    positions: Any
    segments: Any = None


def segments_of(mask: Mask) -> tuple[Any, Any]:
    """Query and key segments [B, L] that express document ids and padding together (None, None without either)."""
    if mask.document_ids is None and mask.padding_mask is None:
        return None, None
    if mask.document_ids is None:
        queries = jnp.ones_like(mask.padding_mask, dtype=jnp.int32)
    else:
        queries = jnp.maximum(mask.document_ids, 0).astype(jnp.int32)
    absent = queries == 0
    if mask.padding_mask is not None:
        absent |= mask.padding_mask
    return queries, jnp.where(absent, -1, queries)


def pair_mask(queries: Tokens, keys: Tokens, *, causal: bool) -> jax.Array:
    """Which query of a tile sees which key of another: bool [B or 1, tq, tk]. Segments here are [B, t]."""
    if causal:
        mask = keys.positions <= queries.positions[:, None]
    else:
        mask = jnp.broadcast_to(keys.positions != NO_KEY, (queries.positions.size, keys.positions.size))
    mask = mask[None]
    if queries.segments is not None:
        mask = mask & (queries.segments[:, :, None] == keys.segments[:, None, :])
    return mask


def tile_mask(queries: Tokens, keys: Tokens, *, causal: bool) -> jax.Array:
    """`pair_mask` for whole tiles, from the bounds of their positions and segments.

    Args:
        queries, keys: positions [n, t] and segments [n, B, t] of n tiles.

    Returns:
        bool [nq, nk]. Where it is False no pair of the two tiles is allowed, in any row of the batch; where it is True
        there is one, unless only a segment number between the bounds suggests it.
    """
    some = jnp.ones((queries.positions.shape[0], keys.positions.shape[0]), bool)
    if causal:
        some &= keys.positions.min(-1) <= queries.positions.max(-1)[:, None]
    if queries.segments is not None:
        (q_low, q_high), (k_low, k_high) = map(_segment_bounds, (queries.segments, keys.segments))
        some &= ((q_low[:, None] <= k_high) & (k_low <= q_high[:, None])).any(-1)
    return some


def _segment_bounds(segments: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Least and greatest segment that can have a partner, [n, B] each; (greatest integer, <= 0) if there is none."""
    return jnp.where(segments <= 0, jnp.iinfo(jnp.int32).max, segments).min(-1), segments.max(-1)
