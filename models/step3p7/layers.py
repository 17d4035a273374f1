"""What sets the decoder layers of Step 3.7 apart from each other, and how they repeat."""

from __future__ import annotations

from typing import NamedTuple

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
