"""What sets the decoder layers of Step 3.7 apart from each other, and how they repeat."""

from __future__ import annotations

import dataclasses
import math
from typing import NamedTuple

import numpy as np

from cpjax.models.common.layers import rope_frequencies

FULL, SLIDING = "full_attention", "sliding_attention"
DENSE, SPARSE = "dense", "sparse"


class Layer(NamedTuple):
    """What sets a decoder layer apart from others.

    Attributes:
        sliding: attention sees a window, with its own number of heads and rope.
        sparse: routed experts and a shared one in place of a dense MLP.
        limit: bound of the routed experts' activations, None for no bound.
        shared_limit: that of the shared expert or the dense MLP.
    """

    sliding: bool
    sparse: bool
    limit: float | None = None
    shared_limit: float | None = None


class Stack(NamedTuple):
    """Consecutive layers: a pattern, repeated."""

    start: int
    pattern: tuple[Layer, ...]
    repeats: int


@dataclasses.dataclass(frozen=True)
class Rope:
    """Rotary positions of one kind of layers.

    Attributes:
        theta: base of the wavelengths.
        partial: share of a head's features that turns.
        llama3: Llama 3.1's stretching for long contexts (factor, low_freq_factor, high_freq_factor,
            original_max_position_embeddings), or None.
    """

    theta: float = 10000.0
    partial: float = 1.0
    llama3: tuple[float, float, float, float] | None = None

    def frequencies(self, head_dim: int) -> np.ndarray:
        """Angle by which each pair of features turns per position.

        Under Llama 3.1's rule (arXiv 2407.21783, section 3.4.2, and its code) pairs slower than the original context
        divided by `low_freq_factor` are slowed down by the factor, those faster than that divided by `high_freq_factor`
        keep their pace, and those between are blended.
        """
        plain = rope_frequencies(int(head_dim * self.partial), self.theta)
        if self.llama3 is None:
            return plain
        factor, low, high, context = self.llama3
        turns = context * plain / (2 * math.pi)  # in the original context
        kept = np.clip((turns - low) / (high - low), 0, 1)
        return plain * (kept + (1 - kept) / factor)


def stack(layers: tuple[Layer, ...]) -> tuple[Stack, ...]:
    """Cuts layers into repeated patterns, the lengths of the patterns being as short as possible together."""
    best: list[tuple[int, int, tuple[Stack, ...]]] = [(0, 0, ())]  # for the first n layers: length, number, stacks
    for end in range(1, len(layers) + 1):
        options = []
        for start in range(end):
            size = end - start
            whole = layers[start:end]
            period = next(p for p in range(1, size + 1) if size % p == 0 and whole == whole[:p] * (size // p))
            length, number, stacks = best[start]
            options.append((length + period, number + 1, (*stacks, Stack(start, whole[:period], size // period))))
        best.append(min(options, key=lambda option: option[:2]))
    return best[-1][2]
