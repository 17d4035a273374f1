"""Layouts: balance of the work, the host's time for it, and what it takes to change from one to another."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks.common import Row, Settings, make_mesh, timed
from cpjax.plan import find_collectives
from cpjax.shard import (
    Dispatched,
    Packed,
    Sharder,
    SliceKind,
    convert,
    dispatch,
    layout_from_name,
    make_sharder,
    pack,
)

FULL, CAUSAL, INVERSE, BOTH = SliceKind

LENGTH, RANKS = 65536, 8
"""Of the rows that need no devices."""


def documents(length: int) -> list[list[int]]:
    """Causal documents of very different length: log-normal, the longest about a sixth of the tokens."""
    rng, cuts = np.random.default_rng(0), [0]
    while cuts[-1] < length:
        cuts.append(min(cuts[-1] + 1 + int(rng.lognormal(6, 1.7)), length))
    return [[a, b, a, b, CAUSAL] for a, b in itertools.pairwise(cuts)]


def prefix_and_windows(length: int, prefix: int = 128, window: int = 1024) -> list[list[int]]:
    """All see the prefix; after it everybody sees the last `window` tokens."""
    full = prefix + window
    return [
        [0, length, 0, prefix, FULL],
        [prefix, full, prefix, full, CAUSAL],
        [full, length, prefix + 1, length, BOTH],
    ]


def image_groups(length: int, every: int = 1500, size: int = 700) -> list[list[int]]:
    """Causal text; the tokens of an image see each other both ways."""
    slices = []
    for start in range(0, length, every):
        image = min(start + size, length)
        end = min(start + every, length)
        slices += [[start, image, 0, image, FULL], [image, end, 0, end, CAUSAL]]
    return [s for s in slices if s[0] < s[1]]


MIXED_MASKS = (documents, prefix_and_windows, image_groups)


def run(settings: Settings) -> Iterator[list[Row]]:
    """The rows of one problem after the other."""
    yield _causal(LENGTH)
    for mask in MIXED_MASKS:
        yield _dispatched(mask, LENGTH)
    yield _conversions(settings.lengths[-1], settings.cp)


def _causal(length: int) -> list[Row]:
    """Pairs of the fullest rank / mean over ranks."""
    rows = []
    for name in ("zigzag", "striped", "contiguous"):
        mine = make_sharder(length, layout_from_name(name, RANKS)).indices(np.arange(RANKS))
        work = (mine + 1.0).sum(1)
        rows.append({"name": name, "imbalance": float(work.max() / work.mean()), "note": ""})
    return [{"part": "layouts", "problem": f"causal, S={length}, {RANKS} ranks"} | row for row in rows]


def _dispatched(mask: Callable[[int], list[list[int]]], length: int) -> list[Row]:
    slices = mask(length)
    runs = [timed(lambda: dispatch(slices, length, Dispatched(RANKS, chunk_size=512))) for _ in range(3)]
    seconds, balance = min(seconds for _, seconds in runs), runs[0][0][1]
    _, cut = dispatch(slices, length, Dispatched(RANKS, chunk_size=length // RANKS))  # one chunk a rank
    row = {"part": "layouts", "problem": f"{mask.__name__.replace('_', ' ')}, S={length}, {RANKS} ranks"}
    return [
        row | {"name": "dispatched, chunks of 512", "seconds": seconds, "imbalance": balance.imbalance,
               "bound": balance.bound, "note": f"on the host, {len(slices)} slices"},
        row | {"name": "contiguous", "imbalance": cut.imbalance, "note": ""},
    ]  # fmt: skip


def _conversions(length: int, cp: int) -> list[Row]:
    """Bytes that the compiled program sends from a rank, beside those of the tokens it holds."""
    mesh, spec = make_mesh(cp), P(None, "cp")
    documents = np.array([0, length // 16, length // 4, length])
    sharders: dict[str, Sharder] = {n: make_sharder(length, layout_from_name(n, cp)) for n in ("zigzag", "striped")}
    sharders["packed"] = pack(documents, Packed(cp))
    x = jax.ShapeDtypeStruct((1, length, 64), np.float32, sharding=NamedSharding(mesh, spec))
    rows = []
    for name, sharder in sharders.items():

        def to_contiguous(x: jax.Array, sharder: Sharder = sharder) -> jax.Array:
            return convert(x, sharder, sharder.contiguous())

        body = jax.shard_map(to_contiguous, mesh=mesh, in_specs=spec, out_specs=spec, axis_names={"cp"})
        text = jax.jit(body).lower(x).compile().as_text() or ""
        sent = sum(c.times * c.bytes for c in find_collectives(text))
        row = {"part": "layouts", "problem": f"to contiguous, S={length}, cp={cp}, 256 bytes a token", "name": name}
        rows.append(row | {"sent_bytes": sent, "sent_of_held": sent / (length // cp * 256), "note": ""})
    return rows
