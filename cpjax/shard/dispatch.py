"""Dispatched chunks: a host-side solver that balances the area of an arbitrary slice mask over the ranks.

Slices, their kinds and the idea of equal chunk counts are those of MagiAttention (github.com/SandAI-org/MagiAttention).
"""

from __future__ import annotations

import enum
import heapq
from typing import Any, NamedTuple

import numpy as np

from cpjax.shard.layout import Dispatched
from cpjax.shard.sharder import Sharder


class SliceKind(enum.IntEnum):
    """Which pairs of a slice attend, for the i-th of its m queries and the j-th of its n keys."""

    FULL = 0
    """All."""
    CAUSAL = 1
    """j <= i + n - m: the last query sees the last key."""
    INVERSE_CAUSAL = 2
    """j >= i: the first query sees the first key."""
    BI_CAUSAL = 3
    """i <= j <= i + n - m, both."""


class Balance(NamedTuple):
    """How evenly a mask is spread.

    Attributes:
        areas: int64 [cp], allowed pairs of each rank's queries (pairs in two slices count twice).
        imbalance: largest area / mean area; 1 for an empty mask.
        bound: no way of giving every rank the same number of chunks has a smaller imbalance than this.
    """

    areas: np.ndarray
    imbalance: float
    bound: float


def dispatch(slices: Any, length: int, layout: Dispatched, *, axis_name: str = "cp") -> tuple[Sharder, Balance]:
    """Gives every rank the same number of chunks, so that the largest mask area of a rank is small.

    The largest chunks are given out first, each to the rank with the least area so far; then chunks of the rank with
    the largest area are swapped for others as long as that makes it smaller. Host arithmetic only, O(chunks log chunks)
    a swap; areas are exact.

    Args:
        slices: int [N, 5] of q_start, q_end, k_start, k_end and `SliceKind`, in the caller's positions 0 .. S.
        length: S.

    Raises:
        ValueError: slices of another shape, outside of 0 .. S, or of an unknown kind.
    """
    padded_length = layout.pad_length(length)
    areas = chunk_areas(slices, length, padded_length, layout.chunk_size)
    owner = _assign(areas, layout.cp)
    chunks = np.argsort(owner, kind="stable").reshape(layout.cp, -1)  # each rank's, ascending
    table = chunks[..., None] * layout.chunk_size + np.arange(layout.chunk_size)
    table = table.reshape(layout.cp, -1).astype(np.int32)

    by_rank = areas[chunks].sum(1)
    total = int(areas.sum())
    largest = [int(by_rank.max()), _lower_bound(areas, layout.cp)]
    ratios = (value * layout.cp / total if total else 1.0 for value in largest)
    return Sharder(layout, length, padded_length, axis_name, table=table), Balance(by_rank, *ratios)


def chunk_areas(slices: Any, length: int, padded_length: int, chunk_size: int) -> np.ndarray:
    """int64 [T / chunk_size]: allowed pairs of the queries of each chunk."""
    slices = np.asarray(slices)
    if slices.size and slices.dtype.kind not in "iu":
        raise ValueError(f"slices have dtype {slices.dtype}: they must be integers")
    slices = slices.astype(np.int64)
    if slices.ndim != 2 or slices.shape[1] != 5:
        raise ValueError(
            f"slices have shape {slices.shape}: they must be [N, 5] of q_start, q_end, k_start, k_end and kind"
        )
    starts, ends = slices[:, 0:4:2], slices[:, 1:4:2]
    wrong = ((starts < 0) | (starts > ends) | (ends > length)).any(1) | ~np.isin(slices[:, 4], list(SliceKind))
    if wrong.any():
        bad = int(np.argmax(wrong))
        raise ValueError(
            f"slice {bad} is {slices[bad].tolist()}: it needs 0 <= start <= end <= {length} for q and k, and a "
            f"kind of {[int(kind) for kind in SliceKind]}"
        )
    areas = np.zeros(padded_length // chunk_size, np.int64)
    slices = slices[slices[:, 0] < slices[:, 1]]
    met = (slices[:, 1] - 1) // chunk_size - slices[:, 0] // chunk_size + 1  # chunks with queries of each slice
    for block in np.array_split(np.arange(len(slices)), 1 + met.sum() // (1 << 22)):  # so that memory stays bounded
        number = np.repeat(block, met[block])
        step = np.arange(number.size) - np.repeat(np.cumsum(met[block]) - met[block], met[block])
        q_start, q_end, k_start, k_end, kind = slices[number].T
        chunk = q_start // chunk_size + step
        queries, keys = q_end - q_start, k_end - k_start
        first = np.maximum(chunk * chunk_size - q_start, 0)
        last = np.minimum((chunk + 1) * chunk_size - q_start, queries)
        area = _area_before(last, queries, keys, kind) - _area_before(first, queries, keys, kind)
        np.add.at(areas, chunk, area)
    return areas


def _area_before(i: np.ndarray, queries: np.ndarray, keys: np.ndarray, kind: np.ndarray) -> np.ndarray:
    """Allowed pairs of the first i queries of slices."""

    def triangle(n: np.ndarray) -> np.ndarray:  # 1 + 2 + ... + n
        return np.maximum(n, 0) * (np.maximum(n, 0) + 1) // 2

    offset = keys - queries
    causal = triangle(i + offset) - triangle(offset)  # query i sees max(0, i + 1 + offset) keys
    inverse = triangle(keys) - triangle(keys - i)  # max(0, keys - i)
    return np.choose(kind, [i * keys, causal, inverse, i * np.maximum(offset + 1, 0)])


def _assign(areas: np.ndarray, cp: int) -> np.ndarray:
    """int [chunks]: the rank of each chunk, the same number for each rank."""
    each = areas.size // cp
    owner = np.empty(areas.size, np.int64)
    room = np.full(cp, each)
    heap = [(0, rank) for rank in range(cp)]
    for chunk in np.argsort(-areas, kind="stable"):
        load, rank = heapq.heappop(heap)
        owner[chunk] = rank
        room[rank] -= 1
        if room[rank]:
            heapq.heappush(heap, (load + int(areas[chunk]), rank))

    loads = np.zeros(cp, np.int64)
    np.add.at(loads, owner, areas)
    order = np.argsort(areas, kind="stable")
    while (swap := _best_swap(areas, owner, order, loads)) is not None:
        here, there = swap
        change = areas[here] - areas[there]
        loads[owner[here]] -= change
        loads[owner[there]] += change
        owner[[here, there]] = owner[[there, here]]
    return owner


def _best_swap(
    areas: np.ndarray, owner: np.ndarray, order: np.ndarray, loads: np.ndarray
) -> tuple[np.int64, np.int64] | None:
    """The swap, of a chunk of the fullest rank, that leaves the smaller of two loads; None if none is smaller than it.

    Every swap makes the sorted loads smaller, so there is an end to them.
    """
    fullest = int(loads.argmax())
    mine = order[owner[order] == fullest]
    best, swap = loads[fullest], None
    for rank in range(loads.size):
        theirs = order[owner[order] == rank]
        wanted = areas[mine] - (loads[fullest] - loads[rank]) // 2  # would leave both ranks alike
        near = np.searchsorted(areas[theirs], wanted)
        for place in (near - 1, near):
            place = place.clip(0, theirs.size - 1)
            change = areas[mine] - areas[theirs[place]]
            larger = np.maximum(loads[fullest] - change, loads[rank] + change)
            at = int(larger.argmin())
            if larger[at] < best and rank != fullest:
                best, swap = larger[at], (mine[at], theirs[place[at]])
    return swap


def _lower_bound(areas: np.ndarray, cp: int) -> int:
    """An area that the fullest of `cp` ranks has under every assignment of equally many chunks.

    The mean; and, for every k: of the k cp + 1 largest chunks some rank has k + 1, and its others are not smaller than
    the smallest ones.
    """
    each = areas.size // cp
    ascending = np.sort(areas)
    smallest = np.concatenate([[0], np.cumsum(ascending)])  # of the n smallest
    bounds = [-(-int(areas.sum()) // cp)]
    for k in range(each):
        top = ascending[areas.size - k * cp - 1 :]
        bounds.append(int(top[: k + 1].sum() + smallest[each - k - 1]))
    return max(bounds)
