"""Which transport, how many hops, how many bytes: everything about an attention call that is known before it runs."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from cpjax.attention.mask import Mask
from cpjax.shard import Sharder

TRANSPORTS = ("ring", "allgather", "ulysses", "ring_ulysses")

FLOPS_PER_BYTE = 1000
"""What a device computes while it sends one byte: 400 TFLOP/s over 400 GB/s, as in a box of H100 or H200."""


@dataclasses.dataclass(frozen=True)
class Plan:
    """How the queries of one attention call meet their keys.

    Attributes:
        transport: one of `TRANSPORTS`.
        members: neighbouring ranks that exchange heads for tokens; 1 if none do.
        held: ranks whose keys a rank holds at a time.
        hops: how often keys move on to the next group of `held` ranks, and (from home again) to the previous one.
            A hop that no rank needs, by what is static of layout and mask, is left out for all.
        forward_bytes: sent by each rank, the streams of the mask included.
        backward_bytes: the same for the backward.
        beside: the bytes of them that are under way beside each block, forward and backward: blocks hide them.
        reason: one line on what was chosen and why.
    """

    transport: str
    members: int
    held: int
    hops: tuple[int, int]
    forward_bytes: int
    backward_bytes: int
    beside: tuple[tuple[int, ...], tuple[int, ...]]
    reason: str


@dataclasses.dataclass(frozen=True)
class Heads:
    """Which key heads `members` ranks exchange when each takes an equal part of the query heads."""

    heads: int
    kv_heads: int
    members: int

    @property
    def sent(self) -> np.ndarray:
        """int [members, M], the key heads each member needs, filled up with others to the same number."""
        first, last = self._needed()
        return np.minimum(first[:, None] + np.arange((last - first).max() + 1), self.kv_heads - 1)

    @property
    def used(self) -> np.ndarray | None:
        """int [members, K'], which of them its K' groups of query heads use; None if that is all, in order."""
        own, group = self.heads // self.members, self.heads // self.kv_heads
        if own % group == 0 or group % own == 0:
            return None
        starts = np.arange(0, self.heads, math.gcd(own, group)).reshape(self.members, -1)
        return starts // group - self._needed()[0][:, None]

    def _needed(self) -> tuple[np.ndarray, np.ndarray]:
        own, group = self.heads // self.members, self.heads // self.kv_heads
        starts = np.arange(self.members) * own
        return starts // group, (starts + own - 1) // group


def plan_transport(q: Any, k: Any, v: Any = None, *, sharder: Sharder, mask: Mask, transport: str = "auto") -> Plan:
    """The plan that `attention` follows when called with the same arguments; arrays may be `jax.ShapeDtypeStruct`s.

    Bytes that each rank sends, with N = B L tokens, W = D + Dv (D where the values are the keys), e bytes an entry of
    q and k, and a those of their float32 (float64) accumulator:

    | transport | forward | backward |
    |---|---|---|
    | ring | h N K W e | N K W (g e + h a) |
    | allgather | (cp - 1) N K W e | (cp - 1) N K W e |
    | ulysses | (1 - 1/cp) N H (D + Dv) e + (cp - 1) N M W e | the same |
    | ring_ulysses, u members | ulysses's with u for cp, then h u N K' W e | ulysses's, then u N K' W (g e + h a) |

    h hops over the groups: cp - 1 (ring), cp / u - 1 (ring_ulysses), fewer under a window. In the backward keys and
    values go back where they came from: g = h + 1, or 1 of a single hop; where a window reaches both ways, those of the
    second way stop one hop before home, which is one hop less for g. M key heads go to each member: K / u, or 1 where u
    is a multiple of K (members that share a head get it each); K' of them are held, M unless u and K divide neither
    way. The masks' streams add (cp - 1) N 4 bytes each to the forward. Tokens count with the empty slots of the tiles.

    "auto" takes the least sum of computation on the busiest rank and bytes that no computation hides, at
    `FLOPS_PER_BYTE`: hops of a ring are hidden as far as the computation of a hop lasts, other bytes are not.

    Raises:
        ValueError: an unknown transport, or a number of ranks that the heads do not allow.
    """
    name, _, members = transport.partition(":")
    if name not in (*TRANSPORTS, "auto") or (members and (name != "ring_ulysses" or not members.isdecimal())):
        raise ValueError(
            f"unknown transport {transport!r}: choose one of auto, {', '.join(TRANSPORTS)}, or ring_ulysses:N with N "
            "ranks that exchange heads"
        )
    problem = _Problem.of(q, k, v, sharder, mask)
    cp, heads = sharder.cp, problem.heads
    divisors = [n for n in range(2, cp) if cp % n == 0 and heads % n == 0]
    candidates = {
        "ring": [(1, 1)],
        "ulysses": [(cp, cp)] if heads % cp == 0 else [],
        "ring_ulysses": [(n, n) for n in divisors if not members or n == int(members)],
        "allgather": [(1, cp)],
    }
    if cp == 1:
        candidates = {n: [(1, 1)] for n in candidates}
    wanted = list(candidates) if name == "auto" else [name]
    if not any(candidates[n] for n in wanted):
        sizes = [n for n in (*divisors, cp) if heads % n == 0 and (name == "ulysses" or n < cp)]
        raise ValueError(
            f"transport {transport!r} was given {heads} query heads on {cp} ranks: the ranks that exchange heads must "
            f"divide both{'' if name == 'ulysses' else ' and be fewer than all'}, "
            f"{'which ' + ' or '.join(map(str, sizes)) + ' would' if sizes else 'which none does'}; "
            "use the transport ring or allgather, or another number of ranks"
        )
    plans = [problem.plan(n, *shape) for n in wanted for shape in candidates[n]]
    costs = [problem.cost(plan) for plan in plans]
    best = min(range(len(plans)), key=costs.__getitem__)
    plan = plans[best]
    text = f"{plan.transport}{f' over {plan.members} ranks' if plan.transport == 'ring_ulysses' else ''}"
    text += f": each rank sends {_mib(plan.forward_bytes)} forward and {_mib(plan.backward_bytes)} backward"
    if plan.held < cp:
        text += f" in {sum(plan.hops)} hop{'s' * (sum(plan.hops) != 1)}"
    if name == "auto":
        text = f"auto chose {text}; cost " + ", ".join(
            f"{_mib(cost)} {p.transport}{f':{p.members}' if p.transport == 'ring_ulysses' else ''}"
            for cost, p in sorted(zip(costs, plans, strict=True), key=lambda pair: pair[0])
        )
    return dataclasses.replace(plan, reason=text)


def _mib(size: float) -> str:
    return f"{size / 2**20:.3g} MiB"


@dataclasses.dataclass(frozen=True)
class _Problem:
    sharder: Sharder
    mask: Mask
    tokens: int  # B L
    heads: int
    kv_heads: int
    width: int  # of a query and a key
    v_width: int
    kv_width: int  # of what travels
    dtype: Any

    @classmethod
    def of(cls, q: Any, k: Any, v: Any, sharder: Sharder, mask: Mask) -> _Problem:
        v_width = (k if v is None else v).shape[3]
        kv_width = k.shape[3] + (0 if v is None else v_width)
        return cls(
            sharder, mask, q.shape[0] * q.shape[1], q.shape[2], k.shape[2], q.shape[3], v_width, kv_width, q.dtype
        )

    def plan(self, transport: str, members: int, held: int) -> Plan:
        cp, entry = self.sharder.cp, jnp.dtype(self.dtype).itemsize
        wide = jnp.promote_types(self.dtype, jnp.float32).itemsize
        hops = self.hops(held)
        row = self.tokens * self.kv_width
        if members > 1:
            heads = Heads(self.heads, self.kv_heads, members)
            each = heads.sent.shape[1]
            kept = each if heads.used is None else heads.used.shape[1]
            exchanged = (members - 1) * each * row * entry
            exchanged += self.tokens * self.heads * (self.width + self.v_width) * entry * (members - 1) // members
        else:
            kept = self.kv_heads
            exchanged = (held - 1) * kept * row * entry
        hop = held * kept * row
        forward, backward = _beside(hops, hop * entry, hop * wide)
        streams = 4 * (cp - 1) * self.tokens * self._streams(members)
        sent = exchanged + sum(forward) + streams, exchanged + sum(backward)
        return Plan(transport, members, held, hops, *sent, (forward, backward), "")

    def _streams(self, members: int) -> int:
        mask = self.mask
        pairs = (mask.document_ids is not None or mask.padding_mask is not None) + (mask.vision_group_ids is not None)
        return pairs * (2 if members > 1 else 1) + (mask.prefix is not None)

    def _bounds(self) -> tuple[int | None, int | None]:
        """How far from a query its keys can be, as far as that is static."""
        if self.mask.vision_group_ids is None and self.mask.prefix is None:
            bounds = self.mask.reach(self.sharder.padded_length)[:2]
        else:
            bounds = None, None
        if self.mask.longest_document is None:
            return bounds
        longest = self.mask.longest_document - 1
        left, right = (longest if bound is None else min(bound, longest) for bound in bounds)
        return left, right

    def _positions(self) -> np.ndarray | None:
        """[cp, L], or None if only the running program knows them or each row has others."""
        positions = self.sharder.indices(np.arange(self.sharder.cp))
        return None if isinstance(positions, jax.Array) or self.sharder.by_row else np.asarray(positions, np.int64)

    def hops(self, held: int) -> tuple[int, int]:
        """The shortest walk ahead and back that passes every group with a key for anyone."""
        groups = self.sharder.cp // held
        positions = self._positions()
        if positions is None:
            return groups - 1, 0
        left, right = self._bounds()
        runs = positions.reshape(groups, held * max(self.sharder.layout.runs, 1), -1)
        low, high = runs.min(-1), runs.max(-1)
        needed = [0]
        for step in range(1, groups):
            k_low, k_high = (np.roll(x, step, 0)[:, None] for x in (low, high))
            near = np.ones((groups, runs.shape[1], runs.shape[1]), bool)
            if right is not None:
                near &= k_low <= high[..., None] + right
            if left is not None:
                near &= k_high >= low[..., None] - left
            if near.any():
                needed.append(step)
        walks = [(a, groups - b) for a, b in zip(needed, [*needed[1:], groups], strict=True)]
        return min(walks, key=lambda walk: (sum(walk), walk[1]))

    def cost(self, plan: Plan) -> float:
        """Seconds of the busiest rank, forward and backward, in units of one byte sent."""
        positions, length = self._positions(), self.sharder.padded_length
        left, right = (length if bound is None else bound for bound in self._bounds())
        every = np.arange(length) if positions is None else positions
        seen = np.minimum(every + right, length - 1) - np.maximum(every - left, 0) + 1  # keys per query
        groups = self.sharder.cp // plan.members
        busy = 1.0 if positions is None else seen.reshape(groups, -1).mean(1).max() / seen.mean()
        products = 2 * self.tokens * self.heads * (self.width + self.v_width)  # per key
        compute = products * seen.mean() * np.array([1, 2.5]) / FLOPS_PER_BYTE  # forward, backward
        blocks = zip(plan.beside, compute, strict=True)
        hidden = sum(np.minimum(beside, work / len(beside)).sum() for beside, work in blocks)
        return float(compute.sum() * busy + plan.forward_bytes + plan.backward_bytes - hidden)


def _beside(hops: tuple[int, int], kv: int, dkv: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """What a ring has under way beside each block, forward and backward, if keys with values and their gradients take
    `kv` and `dkv` bytes: the walk of `cpjax.attention.transport`."""
    ahead, back = hops

    def home(n: int) -> list[int]:
        return [kv, dkv] if n == 1 else [kv] + n * [kv + dkv] if n else [0]

    forward = sum(hops) * [kv] + [0]
    if not (ahead and back):
        return tuple(forward), tuple(home(ahead + back))
    first, *others = home(ahead)
    return tuple(forward), (*home(back - 1), first + dkv, *others)
