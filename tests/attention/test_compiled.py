"""Facts of the compiled program, and of the work it does; they do not vary from run to run."""

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
from cpjax.attention.mask import Tokens, pair_mask, tile_mask
from cpjax.attention.tiles import Tiling
from cpjax.attention.transport import Setup
from cpjax.shard import layout_from_name, make_sharder
from tests.attention.common import documents_of, mesh_of, program


def compiled(cp, length, transport, *, documents=False, heads=2, width=8):
    layout = layout_from_name("zigzag", cp)
    sharding = NamedSharding(mesh_of(cp), P(None, "cp"))
    x = jax.ShapeDtypeStruct((1, length, heads, width), jnp.float32, sharding=sharding)
    ids = jax.ShapeDtypeStruct((1, length), jnp.int32, sharding=sharding) if documents else None
    return program(layout, length, length, transport, True, None).lower(x, x, x, x, (ids, None)).compile()


def collectives(text: str | None):
    names = re.findall(
        r"= .*? (all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter)(?:-start)?\(", text or ""
    )
    return {name: names.count(name) for name in set(names)}


@pytest.mark.parametrize("documents", [False, True])
def test_collectives_of_the_ring(documents):
    """Forward: kv in the loop. Backward: kv before it, kv and dkv in it, dkv home after it. The documents' ids once."""
    got = collectives(compiled(4, 64, "ring", documents=documents).as_text())
    assert got == {"collective-permute": 5, **({"all-gather": 1} if documents else {})}


def test_collectives_of_the_all_gather():
    assert collectives(compiled(4, 64, "allgather").as_text()) == {"all-gather": 1, "reduce-scatter": 1}


@pytest.mark.parametrize("transport", ["ring", "allgather"])
def test_no_buffer_is_quadratic_in_the_length(transport):
    length, cp = 8192, 4
    shapes = re.findall(
        r"\b(?:f32|s32|pred)\[([\d,]+)\]", compiled(cp, length, transport, documents=True).as_text() or ""
    )
    largest = max(math.prod(map(int, shape.split(","))) for shape in shapes)
    assert largest < (length // cp) ** 2 / 8  # linear: L H 2D, or all ranks' kv


def test_memory_is_flat_at_a_fixed_local_length():
    temps = []
    for cp in (1, 2, 4, 8):
        memory = compiled(cp, cp * 512, "ring").memory_analysis()
        assert memory is not None
        temps.append(memory.temp_size_in_bytes)
    assert max(temps[1:]) <= 1.05 * min(temps[1:])  # the ring's
    assert temps[3] <= 2 * temps[0]  # what travels: kv and dkv, and those of the next hop


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


def visited_tiles(layout_name, cp, length, causal=True, documents=None):
    """Pairs of tiles that each rank visits in a whole ring."""
    sharder = make_sharder(length, layout_from_name(layout_name, cp))
    layout = sharder.layout
    setup = Setup(sharder, Tiling.choose(length // cp // max(layout.runs, 1), 1), causal, 1.0)
    order = layout.indices(length, np.arange(cp))

    def tokens(rank):
        segments = None if documents is None else setup.tiling.cut(jnp.asarray(documents)[:, order[rank]], 1, None)
        return setup.keys(rank, segments)

    return np.array([
        sum(int(tile_mask(tokens(rank), tokens(source), causal=causal).sum()) for source in range(cp))
        for rank in range(cp)
    ])  # fmt: skip


def test_zigzag_does_half_the_work_evenly():
    n = 8192 // 128
    visited = visited_tiles("zigzag", 8, 8192)
    assert visited.sum() == n * (n + 1) // 2
    assert visited.max() / visited.mean() < 1.02
    assert visited_tiles("contiguous", 8, 8192).sum() == n * (n + 1) // 2
    assert visited_tiles("zigzag", 8, 8192, causal=False).sum() == n * n


def test_tiles_of_other_documents_are_not_visited():
    documents = documents_of([1024] * 7, length=8192)  # and 1024 pads
    assert visited_tiles("zigzag", 8, 8192, documents=documents).sum() == 7 * 8 * 9 // 2


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_a_tile_that_is_not_visited_holds_no_allowed_pair(data):
    def tokens(padding):
        numbers = st.lists(st.integers(padding, 5), min_size=12, max_size=12)
        positions = np.array(data.draw(st.lists(st.integers(0, 30), min_size=6, max_size=6)), np.int32).reshape(2, 3)
        return Tokens(positions, np.array(data.draw(numbers), np.int32).reshape(2, 2, 3))

    queries, keys, causal = tokens(0), tokens(-1), data.draw(st.booleans())
    some = tile_mask(queries, keys, causal=causal)
    for i in range(2):
        for j in range(2):
            pairs = pair_mask(
                *(Tokens(t.positions[n], t.segments[n]) for t, n in ((queries, i), (keys, j))), causal=causal
            )
            assert some[i, j] or not (pairs & (queries.segments[i] > 0)[:, :, None]).any()
