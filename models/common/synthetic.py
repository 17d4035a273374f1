"""What the families' rows that stand in for data share: text with media in it, to check programs and to plan them."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from cpjax.shard import IGNORE


def square_images(length: int, patches: int, documents: int, merge: int) -> tuple[int, int]:
    """Patches along a side, and number, of equal square images of up to 32 x 32 patches.

    Args:
        length: of the row, which has a token for each merge x merge patches and one more for each image.
        patches: that the images have together, or as many as the row has room for.
        documents: of the row, each of which has room for an image, or else there are none.
    """
    side = merge * (math.isqrt(min(patches // 2, 1024)) // merge)
    tokens = (side // merge) ** 2 + 1
    count = min(patches // side**2, length // tokens) if side else 0
    return side, count if tokens <= length // documents else 0


def synthetic_text(
    length: int, runs: Sequence[tuple[int, int]], documents: int, tokens: np.ndarray, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Random text, half of it targets, with runs of placeholders spread evenly over it.

    Args:
        length: of the row.
        runs: placeholder token and length of each.
        documents: that the row consists of; a run lies in one of them.
        tokens: what to draw from.

    Returns:
        input_ids, labels and document_ids, [length] each, as a family's `Row` takes them.
    """
    pieces = max(len(runs), documents)
    ids = rng.choice(tokens, length).astype(np.int32)
    piece = np.arange(length) * pieces // length
    labels = np.where(rng.random(length) < 0.5, ids, IGNORE)
    for number, (token, run) in enumerate(runs):
        places = np.flatnonzero(piece == number)
        start = places[0] + (len(places) - run) // 2
        ids[start : start + run] = token
        labels[start : start + run] = IGNORE
    return ids, labels, 1 + piece * documents // pieces
