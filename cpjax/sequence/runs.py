"""Runs: the stretches of consecutive tokens a rank holds, and how they hand things on in global order."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from cpjax.shard import Sharder


def check_tokens(caller: str, sharder: Sharder, **streams: jax.Array | None) -> None:
    """Raises ValueError unless the layout holds runs and every stream [B, L, ...] has this rank's tokens."""
    if sharder.layout.runs == 0:
        raise ValueError(
            f"{caller} was given {sharder.layout}, whose ranks do not hold equal runs of consecutive tokens: use a "
            "contiguous or zigzag layout, or cpjax.shard.convert to contiguous order before the layer and back after it"
        )
    batch = None
    for name, x in streams.items():
        if x is None:
            continue
        batch = x.shape[0] if batch is None and x.ndim else batch
        if x.ndim < 2 or x.shape[:2] != (batch, sharder.local_length):
            raise ValueError(
                f"{caller} was given {name} of shape {x.shape}, but it must start with [B={batch}, "
                f"L={sharder.local_length}], the local tokens of {sharder.layout} over T={sharder.padded_length}: "
                "give this rank's own tokens"
            )


def check_one_map(caller: str, sharder: Sharder) -> None:
    """Raises ValueError if rows of the batch are laid out in different ways."""
    if sharder.by_row:
        raise ValueError(
            f"{caller} was given {sharder.layout} with a map for each of {len(sharder.table)} rows: give it one row, "
            "or use a layout that is the same for all"
        )


def split_runs(x: jax.Array, sharder: Sharder) -> jax.Array:
    """[B, L, ...] -> [B, runs, L / runs, ...]."""
    runs = sharder.layout.runs
    return x.reshape(x.shape[0], runs, sharder.local_length // runs, *x.shape[2:])


def shift_runs(x: jax.Array, distance: int, sharder: Sharder) -> jax.Array:
    """Gives run n of the global order what run n - distance holds; zeros where there is no such run; differentiable.

    A negative distance looks ahead.
    A run's entry must not grow with the sequence length. Made of `ppermute`, not `all_gather`: the partitioner keeps
    rows that are sharded over other, automatic, mesh axes where they are for the former only.

    Args:
        x: [B, runs, ...].

    Returns:
        [B, runs, ...].
    """
    if distance == 0:
        return x
    cp, runs = sharder.cp, sharder.layout.runs
    starts = sharder.layout.run_starts(sharder.padded_length, np.arange(cp))
    numbers = starts // (sharder.local_length // runs)  # [cp, runs]
    home = {int(number): place for place, number in np.ndenumerate(numbers)}
    shifted = []
    for slot in range(runs):
        sources = [home.get(int(number) - distance) for number in numbers[:, slot]]
        total = jnp.zeros_like(x[:, slot])
        for source in range(runs):
            pairs = [(place[0], rank) for rank, place in enumerate(sources) if place and place[1] == source]
            if pairs:  # ranks that receive nothing get zeros
                total += x[:, source] if cp == 1 else jax.lax.ppermute(x[:, source], sharder.axis_name, pairs)
        shifted.append(total)
    return jnp.stack(shifted, axis=1)


def prefix_runs(maps: jax.Array, compose: Callable[[jax.Array, jax.Array], jax.Array], sharder: Sharder) -> jax.Array:
    """The affine map of a state over all runs up to each local one; not for the last of all, which nothing follows.

    A parallel prefix in log2(cp runs) exchanges (Hillis and Steele, 1986), whose size is that of one map.

    Args:
        maps: [B, runs, ...], the map over each run by itself; all zeros must be the map to the zero state.
        compose: (later, earlier) -> the map that applies `earlier` first.

    Returns:
        [B, runs, ...].
    """
    distance = 1  # how many runs, up to and including itself, each map stands for
    while distance < sharder.cp * sharder.layout.runs - 1:
        maps = compose(maps, shift_runs(maps, distance, sharder))  # before the sequence: zeros
        distance *= 2
    return maps
