"""What the families' counts of floating-point operations share: lengths, and pairs that attend."""

from __future__ import annotations

import numpy as np


def run_lengths(ids: np.ndarray) -> np.ndarray:
    """How often each id [B, N] > 0 is there, row by row: float64 [runs], for instance the lengths of documents."""
    keyed = ids.astype(np.int64) + np.arange(len(ids))[:, None] * (int(ids.max(initial=0)) + 1)
    counts = np.bincount(keyed[ids > 0])
    return counts[counts > 0].astype(np.float64)


def causal_pairs(lengths: np.ndarray, window: int | None = None) -> float:
    """Pairs of a query and a key of documents of these lengths: the query's own, and those before it.

    Args:
        window: the most keys that a query sees.
    """
    filled = lengths if window is None else np.minimum(lengths, window)
    pairs = filled * (filled + 1) / 2
    if window is not None:
        pairs += (lengths - filled) * window
    return float(pairs.sum())
