"""Facts of the compiled program, and of the work it does; they do not vary from run to run."""

import collections
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from cpjax.attention import Mask, attention
from cpjax.attention.mask import (
    NO_KEY,
    NO_PARTNER,
    Reach,
    Streams,
    Tokens,
    pair_mask,
    streams_of,
    tile_mask,
    with_slices,
)
from cpjax.attention.tiles import Tiling
from cpjax.shard import layout_from_name, make_sharder
from tests.attention.common import documents_of, mesh_of, program


def compiled(cp, length, transport, *, documents=False, heads=2, kv_heads=None, width=8):
    layout = layout_from_name("zigzag", cp)
    sharding = NamedSharding(mesh_of(cp), P(None, "cp"))
    x, kv = (
        jax.ShapeDtypeStruct((1, length, n, width), jnp.float32, sharding=sharding) for n in (heads, kv_heads or heads)
    )
    ids = jax.ShapeDtypeStruct((1, length), jnp.int32, sharding=sharding)
    streams = {"document_ids": ids} if documents else {}
    return program(transport).lower((x, kv, kv, None), x, streams, None, make_sharder(length, layout)).compile()


def collectives(text: str | None):
    names = re.findall(
        r"= .*? (all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter)(?:-start)?\(", text or ""
    )
    return {name: names.count(name) for name in set(names)}


@pytest.mark.parametrize("documents", [False, True])
def test_collectives_the_ring(documents):
    """Forward: kv in the loop. Backward: kv before it, kv and dkv in it. The documents' ids once."""
    got = collectives(compiled(4, 64, "ring", documents=documents).as_text())
    assert got == {"collective-permute": 4, **({"all-gather": 1} if documents else {})}


def test_collectives_the_all_gather():
    assert collectives(compiled(4, 64, "allgather").as_text()) == {"all-gather": 1, "reduce-scatter": 1}


@pytest.mark.parametrize("transport", ["ring", "allgather", "ulysses", "ring_ulysses"])
def test_no_buffer_is_quadratic_in_the_length(transport):
    length, cp = 8192, 4
    shapes = re.findall(
        r"\b[a-z]+\d*\[([\d,]+)\]", compiled(cp, length, transport, documents=True, heads=4).as_text() or ""
    )
    largest = max(math.prod(map(int, shape.split(","))) for shape in shapes)
    assert largest < length * (length // cp) / 16  # linear: L H 2D, or all ranks' kv


@pytest.mark.parametrize(("heads", "kv_heads"), [(16, 2), (4, 4)])
def test_memory_is_flat_at_a_fixed_local_length(heads, kv_heads):
    programs = [compiled(cp, cp * 512, "ring", heads=heads, kv_heads=kv_heads, width=64) for cp in (1, 2, 4, 8)]
    temps = [program.memory_analysis().temp_size_in_bytes for program in programs]
    assert max(temps[1:]) <= 1.05 * min(temps[1:])
    # Ungrouped heads: one device alone has less by the keys and values of the next hop, which are as much as queries.
    in_flight = 512 * kv_heads * (64 + 64) * 4 if heads == kv_heads else 0
    assert max(temps) <= 1.05 * (temps[0] + in_flight) and temps[0] <= 1.05 * min(temps)


@pytest.mark.parametrize("heads", [1, 4])
def test_loops_over_tiles_copy_no_whole_array(heads):
    """Gradients of keys are updated in place: a copy of all of them for each pair of tiles was seen once."""
    text = compiled(1, 2048, "ring", heads=heads, width=64).as_text() or ""
    found = {name: body for name, body in re.findall(r"^%(\S+) \((.*?)^}", text, re.M | re.S) if " while(" not in body}
    inner = {name: body for name, body in found.items() if "fused" not in name and "wrapped" not in name}
    assert len(inner) > 5 and not re.findall(r"= f32\[16,1,\S* copy\(.*", "".join(inner.values()))


def test_other_mesh_axes_stay_automatic():
    """Rows over dp, heads over tp: XLA partitions the body and adds no collective but the union of the rows' tiles."""
    mesh = jax.make_mesh((2, 2, 2), ("dp", "cp", "tp"), axis_types=(jax.sharding.AxisType.Auto,) * 3)
    sharder = make_sharder(64, layout_from_name("zigzag", 2))
    documents = documents_of(*[[20, 30], [64], [5, 5], [40]], length=64)[:, sharder.layout.indices(64, [0, 1]).ravel()]
    rng = np.random.default_rng(0)
    operands = [rng.normal(size=(4, 64, heads, 8)).astype(np.float32) for heads in (4, 2, 2)]

    def loss(q, k, v, ids):
        def body(q, k, v, ids):
            return attention(q, k, v, sharder=sharder, mask=Mask(True, ids))

        cp = P(None, "cp")
        return (jax.shard_map(body, mesh=mesh, in_specs=cp, out_specs=cp, axis_names={"cp"})(q, k, v, ids) ** 2).sum()

    def run(spec):
        placed = [jax.device_put(x, NamedSharding(mesh, spec)) for x in operands]
        ids = jax.device_put(documents, NamedSharding(mesh, P(spec[0], "cp")))
        executable = jax.jit(jax.value_and_grad(loss, (0, 1, 2))).lower(*placed, ids).compile()
        return executable.as_text() or "", executable(*placed, ids)

    text, sharded = run(P("dp", "cp", "tp"))
    _, replicated = run(P(None, "cp"))
    for x, y in zip(jax.tree.leaves(sharded), jax.tree.leaves(replicated), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5)
    big = [
        line
        for line in re.findall(r"= (.*? (?:all-gather|all-to-all|all-reduce)(?:-start)?)\(", text)
        if re.search(r"f32\[\d", line)
    ]
    assert not big


def test_checkpoint_and_scan():
    """As models call it: several rematerialised layers in a scan."""
    sharder = make_sharder(32, layout_from_name("zigzag", 4))
    x = np.random.default_rng(0).normal(size=(1, 32, 2, 8)).astype(np.float32)

    def loss(x, policy):
        def layer(x, _):
            return x + attention(x, x, x, sharder=sharder, mask=Mask()), None

        def body(x):
            return jax.lax.scan(policy(layer), x, length=3)[0]

        cp = P(None, "cp")
        return (jax.shard_map(body, mesh=mesh_of(4), in_specs=cp, out_specs=cp, axis_names={"cp"})(x) ** 2).sum()

    plain = jax.jit(jax.grad(lambda x: loss(x, lambda f: f)))(x)
    rematerialised = jax.jit(jax.grad(lambda x: loss(x, jax.checkpoint)))(x)
    np.testing.assert_allclose(plain, rematerialised, rtol=1e-5, atol=1e-6)


def visited_tiles(layout_name, cp, length, mask=None):
    """Pairs of tiles that each rank visits in a whole ring; the streams of `mask` are in global order."""
    mask = mask or Mask()
    layout = layout_from_name(layout_name, cp)
    order = layout.indices(length, np.arange(cp))
    tiling = Tiling.choose(length // cp // max(layout.runs, 1), 1)
    q_streams, k_streams = streams_of(mask)

    def tokens(rank, streams, fills, empty):
        streams = Streams(*(None if x is None else tiling.cut(x[:, order[rank]], 1, fill)
                            for x, fill in zip(streams, fills, strict=True)))  # fmt: skip
        return Tokens(tiling.cut(jnp.asarray(order[rank])[None], 1, empty), streams)

    queries = [with_slices(tokens(r, q_streams, [None] * 3, None), mask.slices) for r in range(cp)]
    keys = [tokens(r, k_streams, NO_PARTNER, NO_KEY) for r in range(cp)]
    return np.array([sum(int(tile_mask(q, k, mask.reach(length)).any(-1).sum()) for k in keys) for q in queries])


def test_zigzag_does_half_the_work_evenly():
    n = 8192 // 128
    visited = visited_tiles("zigzag", 8, 8192)
    assert visited.sum() == n * (n + 1) // 2
    assert visited.max() / visited.mean() < 1.02
    assert visited_tiles("contiguous", 8, 8192).sum() == n * (n + 1) // 2
    assert visited_tiles("zigzag", 8, 8192, Mask(causal=False)).sum() == n * n


def test_tiles_of_other_documents_are_not_visited():
    documents = documents_of([1024] * 7, length=8192)  # and 1024 pads
    assert visited_tiles("zigzag", 8, 8192, Mask(document_ids=documents)).sum() == 7 * 8 * 9 // 2


@pytest.mark.parametrize("layout", ["zigzag", "contiguous", "striped"])
def test_a_window_and_documents_leave_a_seventh_of_the_causal_tiles(layout):
    length, n = 16384, 16384 // 128
    causal = visited_tiles(layout, 4, length).sum()
    window = visited_tiles(layout, 4, length, Mask(window=(511, None))).sum()
    documents = documents_of([length // 16] * 16, length=length)
    packed = visited_tiles(layout, 4, length, Mask(document_ids=documents)).sum()
    assert window <= 0.15 * causal and packed <= 0.15 * causal
    if layout != "striped":  # whose tiles are 4 x 128 positions wide
        assert causal == n * (n + 1) // 2
        assert window == 5 * n - 10  # each with the 4 before it
        assert packed == 16 * 8 * 9 // 2


def test_vision_groups_add_only_their_own_tiles():
    """Two images of 1024 tokens beyond the window, 1024 apart: the second half of their squares is added."""
    groups = np.full((1, 8192), -1, np.int32)
    groups[:, 1024:2048], groups[:, 3072:4096] = 0, 1
    window = visited_tiles("zigzag", 4, 8192, Mask(window=(127, None)))
    both = visited_tiles("zigzag", 4, 8192, Mask(window=(127, None), vision_group_ids=groups))
    assert both.sum() - window.sum() == 2 * (8 * 8 - 8 - 7)


def test_a_prefix_adds_only_its_own_tiles():
    prefix = np.arange(8192)[None] < 128
    window = visited_tiles("contiguous", 4, 8192, Mask(window=(127, None)))
    assert visited_tiles("contiguous", 4, 8192, Mask(window=(127, None), prefix=prefix)).sum() - window.sum() == 62


def test_slices_are_visited_and_nothing_else():
    """64 tiles a side: a full rectangle of 4 x 8 tiles, a causal and an inverse causal square of 4, a band of 2 x 8."""
    rows = [[0, 4, 8, 16, 0], [8, 12, 0, 4, 1], [16, 20, 0, 4, 2], [32, 34, 20, 28, 3], [40, 40, 0, 8, 0]]
    slices = jnp.asarray([[128 * x for x in row[:4]] + row[4:] for row in rows], jnp.int32)
    visited = visited_tiles("zigzag", 4, 8192, Mask(causal=False, slices=slices))
    assert visited.sum() == 4 * 8 + 10 + 10 + 2 * 7


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**32 - 1), st.booleans(), st.sampled_from([None, 0, 2, 9]), st.sampled_from([None, 0, 4]),
       st.sets(st.sampled_from(["segments", "groups", "prefix", "slices"])))  # fmt: skip
def test_a_tile_that_is_not_visited_holds_no_allowed_pair(seed, spread, left, right, parts):
    rng = np.random.default_rng(seed)

    def tokens(absent):
        positions = np.sort(rng.permutation(30)[:6]) if spread else np.arange(6) + rng.integers(0, 24)
        if absent < 0 and rng.integers(2):
            positions[-1] = NO_KEY
        least = {"segments": 1, "groups": 0}
        ids = [rng.integers(n, 5, (2, 2, 3)) if part in parts else None for part, n in least.items()]
        none = zip(ids, (absent, absent - 1), strict=True)
        ids = [None if x is None else np.where(rng.random(x.shape) < 0.4, number, x) for x, number in none]
        prefix = rng.integers(0, 2, (2, 2, 1)).repeat(3, 2) if absent < 0 and "prefix" in parts else None
        return Tokens(jnp.asarray(positions.reshape(2, 1, 3), jnp.int32), Streams(*ids, prefix))

    queries, keys = tokens(0), tokens(-1)
    empty = keys.positions == NO_KEY
    if "groups" in parts:
        groups = jnp.where(empty, NO_PARTNER.groups, keys.streams.groups)
        keys = keys._replace(streams=keys.streams._replace(groups=groups))
    if "prefix" in parts:
        prefix = jnp.where(empty, 0, keys.streams.prefix)
        keys = keys._replace(streams=keys.streams._replace(prefix=prefix))
    if "slices" in parts:
        ends = np.sort(rng.integers(0, 31, (3, 2, 2)), 2).reshape(3, 4)
        rows = np.concatenate([ends, rng.integers(0, 4, (3, 1))], 1)
        queries = with_slices(queries, jnp.asarray(rows, jnp.int32))
    reach = Reach(left, right, left if seed % 2 else None)
    some = np.asarray(tile_mask(queries, keys, reach).any(-1))
    for i in range(2):
        for j in range(2):
            pairs = pair_mask(*(jax.tree.map(lambda x, n=n: x[n], t) for t, n in ((queries, i), (keys, j))), reach)
            pairs = np.broadcast_to(pairs, (2, 3, 3))
            assert not pairs[:, :, np.asarray(empty[j, 0])].any()
            assert some[i, j] or not pairs.any()


@pytest.mark.parametrize("transport", ["ring", "allgather"])
def test_r27_every_attention_layer_has_its_collectives(transport):
    """Two layers that differ in their masks: what one of each sends is all there, none is left to its own tokens."""
    sharder = make_sharder(64, layout_from_name("zigzag", 4))
    x = jax.ShapeDtypeStruct((1, 64, 4, 8), jnp.float32)
    masks = [Mask(), Mask(window=(30, None))]

    def found(masks):
        def body(x):
            for mask in masks:
                x = attention(x, x, x, sharder=sharder, mask=mask, transport=transport)
            return x

        spec = P(None, "cp")
        run = jax.shard_map(body, mesh=mesh_of(4), in_specs=spec, out_specs=spec, axis_names={"cp"})
        return collectives(jax.jit(run).lower(x).compile().as_text())

    each = [found([mask]) for mask in masks]
    assert all(each)
    assert found(masks) == sum(map(collections.Counter, each), collections.Counter())
