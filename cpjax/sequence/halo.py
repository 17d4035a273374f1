"""Neighbours in global order: windows around the runs a rank holds, and the token a fixed distance away."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from cpjax.sequence.runs import check_tokens, shift_runs, split_runs
from cpjax.shard import Sharder, Striped
from cpjax.shard.sharder import take


def halo(x: jax.Array, before: int, after: int, *, sharder: Sharder) -> jax.Array:
    """Each local run with the tokens around it in global order, wherever they live; differentiable.

    Only the `before` and `after` tokens at the edges of runs travel (whole runs where these are shorter).

    Args:
        x: [B, L, ...], this rank's tokens.
        before, after: how many tokens to add to each run.

    Returns:
        [B, runs, before + L / runs + after, ...]; zeros outside the padded sequence.

    Raises:
        ValueError: a layout without runs (striped), a shape that does not fit, or a negative count.
    """
    check_tokens("halo", sharder, x=x)
    if before < 0 or after < 0:
        raise ValueError(f"halo was given before={before}, after={after}: both must be at least 0")
    runs = split_runs(x, sharder)
    length = runs.shape[2]
    parts = [runs]
    if before:
        edge = min(before, length)  # a run shorter than the halo is sent whole, and several are needed
        tails = [shift_runs(runs[:, :, length - edge :], hop, sharder) for hop in range(-(-before // edge), 0, -1)]
        parts.insert(0, jnp.concatenate(tails, axis=2)[:, :, -before:])
    if after:
        edge = min(after, length)
        heads = [shift_runs(runs[:, :, :edge], -hop, sharder) for hop in range(1, -(-after // edge) + 1)]
        parts.append(jnp.concatenate(heads, axis=2)[:, :, :after])
    return jnp.concatenate(parts, axis=2)


def shift(x: jax.Array, depth: int, *, sharder: Sharder, fill: Any, document_ids: jax.Array | None = None) -> jax.Array:
    """For each local token t of the global order the value of token t + depth; differentiable.

    What multi-token prediction at depth k needs of tokens, positions or labels; negative depths look back. Under
    layouts of runs (contiguous, zigzag) only min(|depth|, L / runs) tokens a run travel, from the run that holds them.
    Striped ranks receive the whole part of another rank, as no two neighbours live together. Other layouts gather
    the stream, which must then be [B, L].

    Args:
        x: [B, L, ...], this rank's tokens.
        depth: how many tokens ahead.
        fill: the value where there is no such token: it or t lies outside the sequence or is a pad (id 0), or it
            belongs to another document.
        document_ids: int [B, L], 1-based, 0 = pad. Without them the sequence is what is before
            `sharder.end`.

    Returns:
        [B, L, ...] in the dtype of x.

    Raises:
        ValueError: a shape that does not fit, or features [B, L, ...] on a layout that must gather.
    """
    layout = sharder.layout
    for name, stream in (("x", x), ("document_ids", document_ids)):
        if stream is not None and (stream.ndim < 2 or stream.shape[:2] != (x.shape[0], sharder.local_length)):
            raise ValueError(
                f"shift was given {name} of shape {stream.shape}, but it must start with [B={x.shape[0]}, "
                f"L={sharder.local_length}], the local tokens of {layout} over T={sharder.padded_length}: "
                "give this rank's own tokens"
            )
    if layout.runs == 0 and not isinstance(layout, Striped) and x.ndim > 2:
        raise ValueError(
            f"shift was given x of shape {x.shape} on {layout}, which would gather all features: shift a [B, L] stream "
            "(token ids) and compute features from it, or use a contiguous or zigzag layout"
        )
    here = sharder.positions()
    there = here + depth
    valid = (here < sharder.end) & (there >= 0) & (there < sharder.end)
    valid = jnp.atleast_2d(valid)
    if document_ids is not None:
        valid = valid & (document_ids != 0) & (_moved(document_ids, depth, sharder) == document_ids)
    moved = _moved(x, depth, sharder)
    return jnp.where(valid.reshape(*valid.shape, *[1] * (x.ndim - 2)), moved, jnp.asarray(fill, x.dtype))


def _moved(x: jax.Array, depth: int, sharder: Sharder) -> jax.Array:
    """`shift` with anything where there is no token t + depth."""
    if sharder.layout.runs:
        runs = split_runs(x, sharder)
        ahead, rest = divmod(depth, runs.shape[2])
        moved = shift_runs(runs[:, :, rest:], -ahead, sharder)
        if rest:
            moved = jnp.concatenate([moved, shift_runs(runs[:, :, :rest], -ahead - 1, sharder)], axis=2)
        return moved.reshape(x.shape)
    if isinstance(sharder.layout, Striped):
        ahead, rest = divmod(depth, sharder.cp)
        if rest:  # the ranks past the last one hold it one slot later
            pairs = [((rank + rest) % sharder.cp, rank) for rank in range(sharder.cp)]
            x = jax.lax.ppermute(x, sharder.axis_name, pairs)
            return jnp.where(sharder.rank() + rest >= sharder.cp, _ahead(x, ahead + 1), _ahead(x, ahead))
        return _ahead(x, ahead)
    full = sharder.gather(x, trim=False)
    return take(full, sharder.positions() + depth, 1)


def _ahead(x: jax.Array, slots: int) -> jax.Array:
    """x[:, i + slots] at i; zeros outside."""
    slots = max(-x.shape[1], min(x.shape[1], slots))
    kept = x[:, slots:] if slots >= 0 else x[:, :slots]
    widths = [(0, 0), (max(-slots, 0), max(slots, 0)), *[(0, 0)] * (x.ndim - 2)]
    return jnp.pad(kept, widths)
