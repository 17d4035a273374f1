"""Runs: the stretches of consecutive tokens a rank holds, and what precedes each of them in global order."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from cpjax.shard import Sharder


def check_tokens(caller: str, sharder: Sharder, **streams: jax.Array | None) -> None:
    """Raises ValueError unless the layout holds runs and every stream [B, L, ...] has this rank's tokens."""
    if sharder.layout.runs == 0:
        raise ValueError(
            f"{caller} was given {sharder.layout}, whose ranks do not hold consecutive tokens: "
            "use a contiguous or zigzag layout for recurrent layers"
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


def split_runs(x: jax.Array, sharder: Sharder) -> jax.Array:
    """[B, L, ...] -> [B, runs, L / runs, ...]."""
    runs = sharder.layout.runs
    return x.reshape(x.shape[0], runs, sharder.local_length // runs, *x.shape[2:])


def run_numbers(sharder: Sharder) -> jax.Array:
    """int32 [runs]: the place of each local run among all runs in global order."""
    starts = sharder.layout.run_starts(sharder.padded_length, sharder.rank())
    return jnp.asarray(starts) // (sharder.local_length // sharder.layout.runs)


def gather_runs(x: jax.Array, sharder: Sharder, axis: int) -> jax.Array:
    """Something about every local run -> the same about all runs in global order; differentiable.

    Args:
        x: [..., runs, ...] along `axis`, the same size for any sequence length.

    Returns:
        [..., cp runs, ...].
    """
    if sharder.cp > 1:
        x = jax.lax.all_gather(x, sharder.axis_name, axis=axis, tiled=True)
    starts = sharder.layout.run_starts(sharder.padded_length, np.arange(sharder.cp)).reshape(-1)
    order = np.argsort(starts).astype(np.int32)
    if (order == np.arange(order.size)).all():
        return x
    return jnp.take(x, order, axis=axis, mode="clip", unique_indices=True)


def before_runs(x: jax.Array, count: int, sharder: Sharder, fill: float = 0) -> jax.Array:
    """The `count` tokens before each local run in global order; only run tails travel.

    Args:
        x: [B, runs, L / runs, ...], from `split_runs`.
        fill: what precedes the sequence.

    Returns:
        [B, runs, count, ...].
    """
    # Runs shorter than `count` are their own tails: the tails of all runs are then the whole, short, sequence.
    tail = min(count, x.shape[2])
    tails = gather_runs(x[:, :, x.shape[2] - tail :], sharder, axis=1)
    tails = tails.reshape(x.shape[0], -1, *x.shape[3:])
    tails = jnp.pad(tails, [(0, 0), (count, 0)] + [(0, 0)] * (x.ndim - 3), constant_values=fill)
    slots = run_numbers(sharder)[:, None] * tail + jnp.arange(count, dtype=jnp.int32)
    return jnp.take(tails, slots, axis=1, mode="clip")


def continues(document_ids: jax.Array, before: jax.Array) -> jax.Array:
    """Whether each token is of the same document as the one before it.

    Args:
        document_ids: [B, runs, M] of the run's tokens.
        before: [B, runs, count >= 1] of the tokens before the run.

    Returns:
        bool [B, runs, count - 1 + M], for the last count - 1 tokens before the run and the run's own.
    """
    ids = jnp.concatenate([before, document_ids], axis=2)
    return ids[:, :, 1:] == ids[:, :, :-1]
