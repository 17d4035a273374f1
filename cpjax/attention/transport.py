"""How queries meet the keys of other ranks. Runs inside `shard_map`, or with cp = 1 anywhere.

Every transport is the same walk: a rank holds the keys of a group of ranks, and groups pass theirs on around a ring.

| transport | queries of | keys held at a time |
|---|---|---|
| ring | this rank | one rank |
| all-gather | this rank | all ranks: a ring of one group |
| ulysses | all ranks, some of the heads | all ranks |
| ring x ulysses | a group of ranks, some of the heads | that group |
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from cpjax.attention import blockwise
from cpjax.attention.mask import NO_KEY, NO_PARTNER, Streams, Tokens, with_slices
from cpjax.attention.plan import Heads, Plan
from cpjax.attention.tiles import Tiling
from cpjax.exchange import all_gather, all_to_all, permute
from cpjax.mesh import device_platform
from cpjax.shard import Sharder
from cpjax.varying import vary_over, varying_axes


@dataclasses.dataclass(frozen=True)
class Setup:
    """Static facts of one attention call."""

    plan: Plan
    tiling: Tiling
    rule: blockwise.Rule
    kernel: ModuleType  # `forward` and `backward` of a block


def to_heads(q: jax.Array, kv: jax.Array, sharder: Sharder, members: int) -> tuple[jax.Array, jax.Array]:
    """This rank's tokens with all heads, to the tokens of all members of its group with this member's heads.

    Args:
        q: [B, L, H, D].
        kv: [B, L, K, W]. A key head that several members need is sent to each of them once.

    Returns:
        [B, members L, H / members, D] and [B, members L, K', W], where K' divides H / members.
    """
    heads, kv_heads = Heads(q.shape[2], kv.shape[2], members), kv.shape[2]
    if members % kv_heads == 0:
        kv = jnp.repeat(kv, members // kv_heads, axis=2)
    elif kv_heads % members:
        kv = jnp.take(kv, heads.sent.reshape(-1), axis=2)
    kv = _swap(kv, sharder, members)
    if heads.used is not None:
        kv = jnp.take(kv, jnp.asarray(heads.used)[sharder.rank() % members], axis=2)
    return _swap(q, sharder, members), kv


def _swap(x: jax.Array, sharder: Sharder, members: int) -> jax.Array:
    """[B, L, members h, D] -> [B, members L, h, D]."""
    batch, length, _, width = x.shape
    x = jnp.moveaxis(x.reshape(batch, length, members, -1, width), 2, 0)
    x = all_to_all(x, sharder.axis_name, sharder.cp)
    return jnp.moveaxis(x, 0, 1).reshape(batch, members * length, -1, width)


def to_tokens(x: jax.Array, sharder: Sharder, members: int) -> jax.Array:
    """Inverse of what `to_heads` does to q: [B, members L, h, D] -> [B, L, members h, D]."""
    batch, length, _, width = x.shape
    x = jnp.moveaxis(x.reshape(batch, members, length // members, -1, width), 1, 0)
    x = all_to_all(x, sharder.axis_name, sharder.cp)
    return jnp.moveaxis(x, 0, 2).reshape(batch, length // members, -1, width)


def gather_keys(kv: jax.Array, sharder: Sharder) -> jax.Array:
    """[B, L, K, W] -> [B, T, K, W], ranks one after the other."""
    kv = jnp.moveaxis(all_gather(kv, sharder.axis_name, sharder.cp), 0, 1)
    return kv.reshape(kv.shape[0], -1, *kv.shape[3:])


def place_streams(queries: Streams, keys: Streams, sharder: Sharder, setup: Setup) -> tuple[Streams, Streams]:
    """Streams [B, L] as `attend` wants them: tiled, those of the group's queries and those of all ranks' keys.

    Four bytes a token: gathered once, as one array, rather than sent along with every hop.
    """
    cut, members = setup.tiling.cut, setup.plan.members
    queries = Streams(*(None if x is None else cut(x, 1, None) for x in queries))
    keys = Streams(*(None if x is None else cut(x, 1, fill) for x, fill in zip(keys, NO_PARTNER, strict=True)))
    leaves, structure = jax.tree.flatten((queries, keys) if members > 1 else keys)
    if sharder.cp > 1 and leaves:
        gathered = all_gather(jnp.stack(leaves), sharder.axis_name, sharder.cp)
        leaves = [gathered[:, i] for i in range(len(leaves))]
    else:
        leaves = [x[None] for x in leaves]
    if members == 1:
        return queries, jax.tree.unflatten(structure, leaves)
    queries, keys = jax.tree.unflatten(structure, leaves)
    first = sharder.rank() // members * members
    return jax.tree.map(lambda x: _flat(lax.dynamic_slice_in_dim(x, first, members)), queries), keys


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def attend(
    setup: Setup, q: Any, kv: Any, sinks: Any, sharder: Sharder, q_streams: Streams, k_streams: Streams, slices: Any
) -> jax.Array:
    """Attention by the walk; what travels hops while the rank computes (arXiv 2310.01889).

    Args:
        q, kv: tiles of the group's queries and of the keys held first, see `cpjax.attention.blockwise`.
        sinks: [K, G] or None.
        q_streams: [n, B, t]; k_streams: [cp, n, B, t].
        slices: int32 [N, 5] or None.

    Returns:
        The output, tiled like q.
    """
    return _forward(setup, q, kv, sinks, sharder, q_streams, k_streams, slices)[0]


def _forward(setup: Setup, q: Any, kv: Any, sinks: Any, *where: Any) -> tuple[Any, Any]:
    walk = _Walk(setup, *where)
    state = blockwise.start(q, kv.shape[-1] - setup.rule.values)

    def meet(step, state, kv):
        return setup.kernel.forward(state, q, kv, *walk.tokens(step), setup.rule)

    def way(direction, first, hops, kv, state):
        def hop(n, carry):
            kv, state = carry
            following = walk.permute(kv, direction)  # before the computation, which hides it
            return following, meet(n * direction, state, kv)

        kv, state = _loop(first, hops, hop, (kv, state))
        return kv, meet(hops * direction, state, kv)

    ahead, back = setup.plan.hops
    last, state = way(1, 0, ahead, kv, state)
    last_back = None
    if back:
        last_back, state = way(-1, 1, back, walk.permute(kv, -1), state)
    output, *statistics = blockwise.finish(state, sinks)
    output = output.astype(q.dtype)
    return output, (q, (last, last_back), sinks, output, *statistics, where)


def _backward(setup: Setup, residuals: Any, grad: jax.Array) -> tuple[Any, ...]:
    q, last, sinks, output, peak, total, where = residuals
    walk = _Walk(setup, *where)
    dtype = blockwise.accumulation_dtype(output)
    delta = (output.astype(dtype) * grad.astype(dtype)).sum(-1)

    def meet(step, dq, kv):
        return setup.kernel.backward(dq, q, kv, grad, peak, total, delta, *walk.tokens(step), setup.rule)

    def way(direction, hops, end, dq, kv):
        """Walks back: from the keys that came last to those at step `end`, with the gradients of keys behind them."""

        def hop(n, carry):
            kv, dq, dkv = carry
            # Both start before this hop's computation, which hides them: that is why the gradients sent are those of
            # the hop before, and why one kv too many is sent (to leave it out costs a third copy of the kernel).
            arrived, following = walk.permute(dkv, -direction), kv if count == 1 else walk.permute(kv, -direction)
            dq, dkv = meet((hops - n) * direction, dq, kv)
            return following, dq, arrived + dkv

        count = hops - end
        dq, dkv = meet(hops * direction, dq, kv)
        carry = walk.permute(kv, -direction) if count else kv, dq, dkv
        return _loop(1, count + 1, hop, carry)[1:]

    dq = vary_over(jnp.zeros((*q.shape[:3], q.shape[5], *q.shape[3:5]), dtype), varying_axes(q))
    (ahead, back), dkv = setup.plan.hops, None
    if ahead and back:
        dq, dkv = way(-1, back, 1, dq, last[1])
        dkv = walk.permute(dkv, 1)  # home
    dq, home = way(1, ahead, 0, dq, last[0]) if ahead or not back else way(-1, back, 0, dq, last[1])
    dkv = home if dkv is None else dkv + home
    dsinks = None
    if sinks is not None:
        weight = jnp.exp(sinks[:, :, None] - peak) / total
        dsinks = -(weight * delta).sum((0, 1, 4)).astype(sinks.dtype)
    return jnp.moveaxis(dq, 3, -1).astype(q.dtype), dkv.astype(q.dtype), dsinks, None, None, None, None


attend.defvjp(_forward, _backward)


class _Walk:
    """Where things are: at step s a rank holds the keys of the group s before its own in the ring."""

    def __init__(self, setup: Setup, sharder: Sharder, q_streams: Streams, k_streams: Streams, slices: Any) -> None:
        self.setup, self.sharder, self.streams = setup, sharder, k_streams
        members = setup.plan.members
        ranks = sharder.rank() // members * members + jnp.arange(members, dtype=jnp.int32)
        self.queries = with_slices(Tokens(self.positions(ranks, None), q_streams), slices)

    def tokens(self, step: Any) -> tuple[Tokens, Tokens]:
        """The queries, and the keys held at `step`."""
        held = self.setup.plan.held
        first = (self.sharder.rank() // held - jnp.int32(step)) % (self.sharder.cp // held) * held
        positions = self.positions(first + jnp.arange(held, dtype=jnp.int32), NO_KEY)
        streams = jax.tree.map(lambda x: _flat(lax.dynamic_slice_in_dim(x, first, held)), self.streams)
        return self.queries, Tokens(positions, streams)

    def positions(self, ranks: jax.Array, fill: float | None) -> jax.Array:
        """Those of the ranks' tokens, tiled: [n, B or 1, t]."""
        positions = self.sharder.indices(ranks).reshape(-1, len(ranks) * self.sharder.local_length)
        return self.setup.tiling.cut(positions, 1, fill)

    def permute(self, x: jax.Array, groups: int) -> jax.Array:
        return permute(x, self.sharder.axis_name, self.sharder.cp, groups * self.setup.plan.held)


def _loop(first: int, end: Any, body: Callable[..., Any], carry: Any) -> Any:
    if first == end:
        return carry
    if end - first == 1 and device_platform() == "cpu":
        # XLA inlines a loop of one step; on CPUs it then permutes long before the result is used, and keeps it.
        end = lax.optimization_barrier(jnp.int32(end))
    return lax.fori_loop(first, end, body, carry)


def _flat(x: jax.Array) -> jax.Array:
    return x.reshape(-1, *x.shape[2:])
