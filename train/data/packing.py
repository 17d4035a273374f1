"""Which records share a row, and the few shapes that rows may have."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

WINDOW = 8192
"""Records that are packed together; more would fill rows hardly better, and take longer."""


def first_fit_decreasing(sizes: np.ndarray, budget: Sequence[int]) -> list[list[int]]:
    """Packs of items whose sizes add up to no more than the budget.

    Items go, largest first (by the largest share of the budget they take; ties in their order), into the first pack
    with room for them.

    Args:
        sizes: int [items, resources], each within the budget.
        budget: int [resources], what a pack may hold of each; a resource with budget 0 is used by no item.

    Returns:
        Numbers of the items of each pack; every item is in exactly one.

    Raises:
        ValueError: an item is larger than the budget.
    """
    limit = np.asarray(budget)
    if (sizes > limit).any():
        item = int(np.argmax((sizes > limit).any(axis=1)))
        raise ValueError(f"item {item} takes {sizes[item].tolist()}: the budget of a pack is {limit.tolist()}")
    order = np.argsort(-(sizes / np.maximum(limit, 1)).max(axis=1, initial=0), kind="stable")
    packs: list[list[int]] = []
    room = np.zeros((len(sizes), len(limit)), int)
    for item in order.tolist():
        fits = (room[: len(packs)] >= sizes[item]).all(axis=1)
        pack = int(np.argmax(fits)) if fits.any() else len(packs)
        if pack == len(packs):
            packs.append([])
            room[pack] = limit
        packs[pack].append(item)
        room[pack] -= sizes[item]
    return packs


def pack_records(sizes: np.ndarray, budget: Sequence[int], seed: int) -> list[list[int]]:
    """First-fit decreasing within windows of `WINDOW` records, drawn at random by the seed; see there."""
    order = np.random.default_rng(seed).permutation(len(sizes))
    windows = [order[start : start + WINDOW] for start in range(0, len(order), WINDOW)]
    return [window[pack].tolist() for window in windows for pack in first_fit_decreasing(sizes[window], budget)]


def bucket_shapes(length: int, patches: int, count: int, units: tuple[int, int]) -> list[tuple[int, int]]:
    """At most `count` shapes (tokens, patches) of a row, ascending, each half of the next.

    Args:
        length, patches: the largest shape.
        units: what tokens and patches must be multiples of.
    """
    whole = (length, patches)
    halves = [tuple(-(-(n >> i) // unit) * unit for n, unit in zip(whole, units, strict=True)) for i in range(count)]
    return sorted({(tokens, patches) for tokens, patches in halves if tokens})


def choose_bucket(shapes: Sequence[tuple[int, int]], sizes: np.ndarray) -> tuple[int, int]:
    """The smallest of the shapes that holds rows of these sizes [rows, 2]."""
    need = sizes.max(axis=0)
    return next(shape for shape in shapes if (need <= shape).all())
