"""Gated delta rule over a sharded sequence, in chunks (Gated DeltaNet, arXiv 2412.06464).

With decay a_t = exp(g_t), the state of one head obeys S_t = a_t S_{t-1} + k_t u_t^T and o_t = S_t^T q_t, where
u_t = beta_t (v_t - (a_t S_{t-1})^T k_t). Over a chunk entered with state S, with D_ij the product of the decays
after j up to i and e_i that of all decays up to i, all u follow from one unit lower triangular system:

    (I + A) u = beta v - (beta e k) S,   A_ij = beta_i D_ij k_i.k_j  (j < i)
    u = U - W S,   S' = e_last S + (D_last k)^T u,   o = (e q) S + (D q k^T) u

so a chunk, and a run of chunks, is an affine map of the state. Every rank scans its runs once from a zero state and,
side by side, from the identity; the maps of the runs, whose size does not depend on the sequence, are composed in
global order by a parallel prefix; the state each run really starts from then corrects its outputs in parallel.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from cpjax.recurrence.chunks import (
    chunk_length,
    chunk_resets,
    decays,
    join_chunks,
    precise_matmul,
    split_chunks,
)
from cpjax.sequence.runs import check_tokens, prefix_runs, shift_runs
from cpjax.shard import Identity, Sharder, make_sharder
from cpjax.varying import vary_over, varying_axes

_INVERSE = "delta_rule_inverse"


def gated_delta_rule(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    log_decay: jax.Array,
    beta: jax.Array,
    *,
    sharder: Sharder,
    document_ids: jax.Array | None = None,
    chunk_size: int = 64,
) -> jax.Array:
    """o_t = S_t^T q_t with S_t = exp(g_t) S_{t-1} + k_t (beta_t (v_t - (exp(g_t) S_{t-1})^T k_t))^T, per head.

    The state is zero before the sequence and before each document.

    Args:
        q, k: [B, L, H, Dk], this rank's tokens, normalised and scaled by the caller (|k| <= 1 keeps it stable).
        v: [B, L, H, Dv].
        log_decay: [B, L, H], the g above, <= 0; any size.
        beta: [B, L, H], in 0 .. 1.
        document_ids: int [B, L]; a document starts wherever the id changes.
        chunk_size: tokens per chunk; it does not change the result.

    Returns:
        [B, L, H, Dv] in the dtype of v; computed in float32 or wider.

    Raises:
        ValueError: a layout without runs (striped), or a shape that does not fit.
    """
    return _apply(q, k, v, log_decay, beta, sharder, document_ids, chunk_size, None)[0]


def continue_gated_delta_rule(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    log_decay: jax.Array,
    beta: jax.Array,
    *,
    state: jax.Array | None = None,
    document_ids: jax.Array | None = None,
    chunk_size: int = 64,
) -> tuple[jax.Array, jax.Array]:
    """`gated_delta_rule` on whole sequences, which go on from a state and return the one they end in.

    Args:
        q, k, v, log_decay, beta, document_ids, chunk_size: of `gated_delta_rule`, all tokens.
        state: [B, H, Dk, Dv] before the first token; None is zero, as it is at a start: give no document_ids with it.

    Returns:
        The output [B, L, H, Dv] in the dtype of v, and the state [B, H, Dk, Dv] in float32 or wider.

    Raises:
        ValueError: a shape that does not fit, or both a state and document_ids.
    """
    if state is not None and document_ids is not None:
        raise ValueError(
            "continue_gated_delta_rule was given a state and document_ids, whose first token starts a document: give "
            "one of them"
        )
    sharder = make_sharder(q.shape[1], Identity())
    return _apply(q, k, v, log_decay, beta, sharder, document_ids, chunk_size, state)


def _apply(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    log_decay: jax.Array,
    beta: jax.Array,
    sharder: Sharder,
    document_ids: jax.Array | None,
    chunk_size: int,
    state: jax.Array | None,
) -> tuple[jax.Array, jax.Array]:
    """The output, and where a rank holds the whole sequence the state after it, begun at `state`."""
    check_tokens("gated_delta_rule", sharder, q=q, k=k, v=v, log_decay=log_decay, beta=beta, document_ids=document_ids)
    heads = v.shape[:3]
    if q.ndim != 4 or k.shape != q.shape or v.ndim != 4 or not q.shape[:3] == log_decay.shape == beta.shape == heads:
        raise ValueError(
            f"gated_delta_rule was given q {q.shape}, k {k.shape}, v {v.shape}, log_decay {log_decay.shape}, beta "
            f"{beta.shape}: it needs q, k [B, L, H, Dk], v [B, L, H, Dv] and log_decay, beta [B, L, H] with the same "
            "H; repeat key heads onto value heads first"
        )
    if state is not None and state.shape != (q.shape[0], *q.shape[2:], v.shape[-1]):
        raise ValueError(
            f"continue_gated_delta_rule was given a state {state.shape}: q {q.shape} and v {v.shape} need [B, H, Dk, "
            f"Dv] = {(q.shape[0], *q.shape[2:], v.shape[-1])}"
        )
    size = chunk_length("gated_delta_rule", chunk_size, sharder)
    q, k, v, log_decay, beta = (split_chunks(x, size, sharder) for x in (q, k, v, log_decay, beta))
    resets = chunk_resets(document_ids, size, sharder)

    maps = _chunk_maps(k, v, log_decay, beta, resets)
    one_run = sharder.cp * sharder.layout.runs == 1  # it starts from zero: no identity to carry along
    states, final = _scan_states(maps, with_identity=not one_run, state=state)
    first = None if one_run else _first_states(final, v.shape[-1], sharder)
    out = _outputs(q, k, log_decay, resets, maps.own, maps.response, states, first)

    return join_chunks(out, sharder).astype(v.dtype), final[:, 0]


def _inverse(a: jax.Array) -> jax.Array:
    """Inverse of the unit lower triangular I + a, for a [..., n, n] strictly lower triangular.

    Inverts diagonal blocks and joins them in pairs, so it is as stable as substitution (products of powers of a are
    not: equal keys make these as large as binomial coefficients), and is made of batched matrix products.
    """
    n = a.shape[-1]
    if n > 8 and n % 2 == 0:
        h = n // 2
        top, bottom = _inverse(jnp.stack([a[..., :h, :h], a[..., h:, h:]]))
        low = -precise_matmul(bottom, precise_matmul(a[..., h:, :h], top))
        top = jnp.pad(top, [(0, 0)] * (a.ndim - 1) + [(0, h)])
        return jnp.concatenate([top, jnp.concatenate([low, bottom], -1)], -2)
    row, column = jnp.arange(n, dtype=jnp.int32)[:, None], jnp.arange(n, dtype=jnp.int32)
    # Of one token nothing is joined, and the identity would not vary over the ranks like a.
    inverse = vary_over(jnp.broadcast_to(jnp.eye(n, dtype=a.dtype), a.shape), varying_axes(a))
    block = 1
    while block < n:
        joined = (row // (2 * block) == column // (2 * block)) & (row // block > column // block)
        inverse = inverse - precise_matmul(precise_matmul(inverse, jnp.where(joined, a, 0)), inverse)
        block *= 2
    return inverse


@jax.custom_jvp
def _unit_lower_inverse(a: jax.Array) -> jax.Array:
    return _inverse(a)


@_unit_lower_inverse.defjvp
def _unit_lower_inverse_jvp(primals, tangents):
    inverse = checkpoint_name(_inverse(*primals), _INVERSE)
    return inverse, -precise_matmul(precise_matmul(inverse, tangents[0]), inverse)


class _Maps(NamedTuple):
    """The affine maps of all chunks, u = own - response S and S' = decay S + into^T u; see the module's text."""

    own: jax.Array  # U [N, B, runs, H, C, Dv]
    response: jax.Array  # W [N, B, runs, H, C, Dk]
    into: jax.Array  # keys decayed to the end of the chunk, [N, B, runs, H, C, Dk]
    decay: jax.Array  # [N, B, runs, H, 1, 1]


# Of the C x C matrices only the inverse is worth keeping for the backward pass.
@functools.partial(jax.checkpoint, policy=jax.checkpoint_policies.save_only_these_names(_INVERSE))
def _chunk_maps(k: jax.Array, v: jax.Array, log_decay: jax.Array, beta: jax.Array, resets: jax.Array | None) -> _Maps:
    dtype = jnp.promote_types(jnp.result_type(k, v, log_decay, beta), jnp.float32)
    k, v, beta = (x.astype(dtype) for x in (k, v, beta[..., None]))
    entry, decay = decays(log_decay.astype(dtype), resets)
    system = jnp.tril(beta * decay * jnp.matmul(k, jnp.swapaxes(k, -1, -2)), -1)
    inverse = _unit_lower_inverse(system)
    return _Maps(
        own=jnp.matmul(inverse, beta * v),
        response=jnp.matmul(inverse, beta * entry[..., None] * k),
        into=decay[..., -1, :, None] * k,
        decay=entry[..., -1:, None],
    )


def _scan_states(maps: _Maps, with_identity: bool, state: jax.Array | None) -> tuple[jax.Array, jax.Array]:
    """The state that enters each chunk of a run, from zero and, with_identity, from the identity beside it.

    Args:
        state: [B, H, Dk, Dv], of a single run without the identity: where it starts instead of at zero.

    Returns:
        states [N, B, runs, H, Dk, Dv (+ Dk)], and that after the last chunk, [B, runs, H, Dk, Dv (+ Dk)]: the run's
        offset and, with_identity, its transition matrix.
    """
    keys, values = maps.response.shape[-1], maps.own.shape[-1]
    extra = keys if with_identity else 0
    start = jnp.eye(keys, values + extra, values, dtype=maps.own.dtype)
    start = jnp.broadcast_to(start, (*maps.own.shape[1:4], keys, values + extra))
    if state is not None:
        start = state[:, None].astype(start.dtype)

    @functools.partial(jax.checkpoint, prevent_cse=False)  # keeps one state a chunk
    def step(state: jax.Array, chunk: _Maps) -> tuple[jax.Array, jax.Array]:
        own = jnp.pad(chunk.own, [(0, 0)] * (chunk.own.ndim - 1) + [(0, extra)])
        u = own - jnp.matmul(chunk.response, state)
        return chunk.decay * state + jnp.matmul(jnp.swapaxes(chunk.into, -1, -2), u), state

    axes = frozenset().union(*map(varying_axes, maps))
    final, states = jax.lax.scan(step, vary_over(start, axes), maps)
    return states, final


def _first_states(maps: jax.Array, values: int, sharder: Sharder) -> jax.Array:
    """The state each local run starts from, [B, runs, H, Dk, Dv]; `maps` is the `final` of `_scan_states`."""

    def compose(later: jax.Array, earlier: jax.Array) -> jax.Array:
        offset = jnp.pad(later[..., :values], [(0, 0)] * (later.ndim - 1) + [(0, later.shape[-1] - values)])
        return offset + jnp.matmul(later[..., values:], earlier)

    return shift_runs(prefix_runs(maps, compose, sharder)[..., :values], 1, sharder)


@jax.checkpoint  # recomputes the C x C matrices and the corrected states
def _outputs(
    q: jax.Array,
    k: jax.Array,
    log_decay: jax.Array,
    resets: jax.Array | None,
    own: jax.Array,
    response: jax.Array,
    states: jax.Array,
    first: jax.Array | None,
) -> jax.Array:
    """[N, B, runs, H, C, Dv]; `states` as of `_scan_states`, `first` [B, runs, H, Dk, Dv] or None for zero."""
    q, k, log_decay = (x.astype(own.dtype) for x in (q, k, log_decay))
    if first is not None:
        values = own.shape[-1]
        states = states[..., :values] + jnp.matmul(states[..., values:], first)
    entry, decay = decays(log_decay, resets)
    u = own - jnp.matmul(response, states)
    scores = decay * jnp.matmul(q, jnp.swapaxes(k, -1, -2))
    return jnp.matmul(entry[..., None] * q, states) + jnp.matmul(scores, u)
