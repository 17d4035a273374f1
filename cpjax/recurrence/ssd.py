"""The state space recurrence of Mamba2 over a sharded sequence, in chunks (state space duality, arXiv 2405.21060).

With decay exp(a dt_t), a scalar per head, the state of one head obeys H_t = exp(a dt_t) H_{t-1} + b_t (dt_t x_t)^T and
y_t = H_t^T c_t. Over a chunk entered with state H, with D_ij the product of the decays after j up to i and e_i that of
all decays up to i:

    y = (D c b^T) dt x + (e c) H,   H' = e_last H + (D_last b)^T dt x

so a chunk, and a run of chunks, multiplies the state by one number and adds to it. Every rank scans its runs once from
a zero state; number and sum of each run, whose size does not depend on the sequence, are composed in global order by a
parallel prefix; the state each run really starts from then corrects its outputs in parallel.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from cpjax.recurrence.chunks import chunk_length, chunk_resets, decays, join_chunks, split_chunks
from cpjax.sequence.runs import check_tokens, prefix_runs, shift_runs
from cpjax.shard import Sharder
from cpjax.varying import vary_over, varying_axes


def ssd(
    x: jax.Array,
    dt: jax.Array,
    a: jax.Array,
    b: jax.Array,
    c: jax.Array,
    *,
    sharder: Sharder,
    skip: jax.Array | None = None,
    document_ids: jax.Array | None = None,
    chunk_size: int = 64,
) -> jax.Array:
    """y_t = H_t^T c_t + skip x_t with H_t = exp(a dt_t) H_{t-1} + b_t (dt_t x_t)^T, per head.

    Head h reads b and c of group h // (H / G). The state is zero before the sequence and before each document.

    Args:
        x: [B, L, H, P], this rank's tokens.
        dt: [B, L, H], the step sizes, >= 0: after bias, softplus and limits.
        a: [H], < 0 (minus the exponential of the published parameter A_log).
        b, c: [B, L, G, N], G a divisor of H.
        skip: [H], the published parameter D.
        document_ids: int [B, L]; a document starts wherever the id changes.
        chunk_size: tokens per chunk; it does not change the result.

    Returns:
        [B, L, H, P] in the dtype of x; computed in float32 or wider.

    Raises:
        ValueError: a layout without runs (striped), or a shape that does not fit.
    """
    check_tokens("ssd", sharder, x=x, dt=dt, b=b, c=c, document_ids=document_ids)
    heads = x.shape[2:3]
    if (
        not x.ndim == b.ndim == 4
        or not heads == dt.shape[2:] == a.shape == (a if skip is None else skip).shape
        or b.shape != c.shape
        or not b.shape[2]
        or heads[0] % b.shape[2]
    ):
        raise ValueError(
            f"ssd was given x {x.shape}, dt {dt.shape}, a {a.shape}, b {b.shape}, c {c.shape}, skip "
            f"{None if skip is None else skip.shape}: it needs x [B, L, H, P], dt [B, L, H], a and skip [H], b and c "
            "[B, L, G, N] with G a divisor of H"
        )
    size = chunk_length("ssd", chunk_size, sharder)
    resets = chunk_resets(document_ids, size, sharder)
    if resets is not None:
        resets = resets[:, :, :, None]
    dtype = jnp.promote_types(jnp.result_type(x, dt, a, b, c), jnp.float32)
    by_group = (b.shape[2], heads[0] // b.shape[2])  # heads [H] as [G, R]
    xs, steps = (split_chunks(v, size, sharder) for v in (x, dt))
    xs, steps = (v.reshape(*v.shape[:3], *by_group, *v.shape[4:]) for v in (xs, steps))
    bs, cs = (split_chunks(v, size, sharder) for v in (b, c))

    chunks = _chunks(xs, steps, a.astype(dtype).reshape(*by_group, 1), bs, cs, resets)
    states, total = _scan_states(chunks)
    first = None if sharder.cp * sharder.layout.runs == 1 else _first_states(total, sharder)
    out = chunks.out + _outputs(cs, chunks.entry, states, first)
    out = join_chunks(out.reshape(*out.shape[:3], *heads, *out.shape[5:]), sharder)
    if skip is not None:
        out += skip.astype(dtype)[:, None] * x.astype(dtype)
    return out.astype(x.dtype)


class _Chunks(NamedTuple):
    """Every chunk by itself, entered with a zero state; see the module's text."""

    out: jax.Array  # [N, B, runs, G, R, C, P]
    state: jax.Array  # what it adds to the state, [N, B, runs, G, R, S, P]
    entry: jax.Array  # the decays from its entry to each token, [N, B, runs, G, R, C]


class _State(NamedTuple):
    """The state before a chunk of a run entered with a zero state, and the factor of any other state on the way."""

    value: jax.Array  # [.., B, runs, G, R, S, P]
    decay: jax.Array  # [.., B, runs, G, R]


@jax.checkpoint  # recomputes the C x C matrices
def _chunks(x: jax.Array, dt: jax.Array, a: jax.Array, b: jax.Array, c: jax.Array, resets: jax.Array | None) -> _Chunks:
    x, dt, b, c = (v.astype(a.dtype) for v in (x, dt, b, c))
    entry, decay = decays(a * dt, resets)
    x = dt[..., None] * x
    scores = decay * jnp.matmul(c, jnp.swapaxes(b, -1, -2))[..., None, :, :]  # once per group
    state = jnp.einsum("...gcs,...grcp->...grsp", b, decay[..., -1, :, None] * x)
    return _Chunks(jnp.matmul(scores, x), state, entry)


def _scan_states(chunks: _Chunks) -> tuple[_State, _State]:
    """The state that enters each chunk, [N, ...], and that after the last one, of each run by itself."""

    @functools.partial(jax.checkpoint, prevent_cse=False)  # keeps one state a chunk
    def step(before: _State, chunk: tuple[jax.Array, jax.Array]) -> tuple[_State, _State]:
        own, decay = chunk
        return _State(decay[..., None, None] * before.value + own, decay * before.decay), before

    last = chunks.entry[..., -1]
    axes = varying_axes(chunks.state) | varying_axes(last)
    start = _State(jnp.zeros_like(chunks.state[0]), jnp.ones_like(last[0]))
    final, states = jax.lax.scan(step, jax.tree.map(lambda v: vary_over(v, axes), start), (chunks.state, last))
    return states, final


def _first_states(total: _State, sharder: Sharder) -> jax.Array:
    """The state each local run starts from, [B, runs, G, R, S, P]."""
    value, decay = total

    def compose(later: jax.Array, earlier: jax.Array) -> jax.Array:
        return later.at[..., -1].set(0) + later[..., -1:] * earlier

    # The state and its factor travel as one array.
    maps = jnp.concatenate([value.reshape(*decay.shape, -1), decay[..., None]], axis=-1)
    first = shift_runs(prefix_runs(maps, compose, sharder)[..., :-1], 1, sharder)
    return first.reshape(value.shape)


@jax.checkpoint  # recomputes the corrected states
def _outputs(c: jax.Array, entry: jax.Array, states: _State, first: jax.Array | None) -> jax.Array:
    """What the states that enter the chunks add to their outputs; `first` None for zero."""
    value = states.value
    if first is not None:
        value = value + states.decay[..., None, None] * first
    return entry[..., None] * jnp.einsum("...gcs,...grsp->...grcp", c.astype(value.dtype), value)
