"""Chunks of the runs a rank holds, and the decays inside them: what the chunk-parallel recurrences share."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from cpjax.sequence import halo
from cpjax.sequence.runs import split_runs
from cpjax.shard import Sharder


def chunk_length(caller: str, chunk_size: int, sharder: Sharder) -> int:
    """Tokens per chunk: `chunk_size`, or a whole run if that is shorter."""
    if chunk_size < 1:
        raise ValueError(f"{caller} was given chunk_size={chunk_size}: it must be at least 1")
    return min(chunk_size, sharder.local_length // sharder.layout.runs)


def split_chunks(x: jax.Array, size: int, sharder: Sharder) -> jax.Array:
    """[B, L, H, ...] -> [N, B, runs, H, C, ...]: N chunks of C = `size` tokens a run; zeros pad the last one."""
    x = split_runs(x, sharder)
    x = jnp.pad(x, [(0, 0), (0, 0), (0, -x.shape[2] % size)] + [(0, 0)] * (x.ndim - 3))
    x = x.reshape(*x.shape[:2], -1, size, *x.shape[3:])
    return jnp.transpose(x, (2, 0, 1, 4, 3, *range(5, x.ndim)))


def join_chunks(x: jax.Array, sharder: Sharder) -> jax.Array:
    """[N, B, runs, H, C, D] -> [B, L, H, D], the inverse of `split_chunks`."""
    x = jnp.transpose(x, (1, 2, 0, 4, 3, 5))  # [B, runs, N, C, H, D]
    x = x.reshape(*x.shape[:2], -1, *x.shape[4:])[:, :, : sharder.local_length // sharder.layout.runs]
    return x.reshape(x.shape[0], -1, *x.shape[3:])


def chunk_resets(document_ids: jax.Array | None, size: int, sharder: Sharder) -> jax.Array | None:
    """Which tokens start a document, bool [N, B, runs, 1, C]; None without documents.

    Args:
        document_ids: [B, L].
    """
    if document_ids is None:
        return None
    ids = halo(document_ids, 1, 0, sharder=sharder)
    starts = ids[:, :, 1:] != ids[:, :, :-1]
    return split_chunks(starts.reshape(document_ids.shape)[..., None], size, sharder)


def precise_matmul(a: jax.Array, b: jax.Array) -> jax.Array:
    """A product in the full precision of its operands on any device."""
    return jnp.matmul(a, b, precision=jax.lax.Precision.HIGHEST)


def decays(log_decay: jax.Array, resets: jax.Array | None) -> tuple[jax.Array, jax.Array]:
    """The decays of a chunk: from its entry to each token, [..., C], and from token j to i, [..., C (i), C (j)].

    Zero where i < j and across a document start.
    """
    size = log_decay.shape[-1]
    # Every span is summed by itself: differences of a running sum would lose small decays behind a large one.
    # exp(-1e4) is zero in any precision, and the bound keeps 0 * inf out of the sums.
    g = jnp.maximum(log_decay.astype(jnp.promote_types(log_decay.dtype, jnp.float32)), -1e4)
    token = jnp.arange(size, dtype=jnp.int32)
    after = jnp.arange(-1, size, dtype=jnp.int32)  # -1: from the entry
    spans = (token[:, None, None] > after) & (token[:, None, None] <= token[:, None])  # [C (summed), C (i), C + 1 (j)]
    sums = precise_matmul(g, spans.reshape(size, -1).astype(g.dtype)).reshape(*g.shape, size + 1)
    keep = jnp.broadcast_to(token[:, None] >= after, sums.shape)
    if resets is not None:
        segment = jnp.cumsum(resets, axis=-1, dtype=jnp.int32)
        origin = jnp.pad(segment, [(0, 0)] * (segment.ndim - 1) + [(1, 0)])  # 0 at the entry
        keep = keep & (segment[..., :, None] == origin[..., None, :])
    decay = jnp.where(keep, jnp.exp(sums), 0)
    return decay[..., 0], decay[..., 1:]
