"""Global selection of keys and blocks against a dense one that sorts every score."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from cpjax.sequence import pool, select, take_keys, top_k_blocks, top_k_keys
from cpjax.shard import Contiguous, Identity, Layout, Striped, Zigzag, make_sharder
from tests.sequence.common import (
    Scattered,
    allowed_pairs,
    any_documents,
    best,
    dense_blocks,
    documents,
    in_order,
    mesh_of,
    on_ranks,
)


def dense_keys(q, k, weights, count, causal, ids):
    scores = np.einsum("bth,bthn->btn", weights, np.maximum(np.einsum("bthd,bnd->bthn", q, k), 0))
    return best(np.where(allowed_pairs(q.shape[1], causal, ids), scores, -np.inf), count)


LAYOUTS = [Identity(), Contiguous(3), Contiguous(8), Zigzag(4), Striped(2), Scattered(3)]


def index_inputs(length, ties, heads=2, width=4, dtype=np.float32):
    """q, k, weights; with `ties` small integers: exact in any precision, most scores occur many times, many are 0."""
    rng = np.random.default_rng(length)
    shapes = (1, length, heads, width), (1, length, width), (1, length, heads)
    draw = (lambda shape: rng.integers(-1, 2, size=shape)) if ties else (lambda shape: rng.normal(size=shape))
    return tuple(draw(shape).astype(dtype) for shape in shapes)


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    """Several tiles of queries and keys a rank, the last ones not full."""
    monkeypatch.setattr(select, "_TILE", 5)


MASKS = [(True, True), (True, False), (False, True)]  # causal, documents


@functools.cache
def keys_program(layout, causal, length=21):
    def op(sharder, q, k, weights, ids):
        return top_k_keys(q, k, weights, 4, sharder=sharder, causal=causal, document_ids=ids)

    return on_ranks(op, layout, length)


@settings(max_examples=50)
@given(st.sampled_from(LAYOUTS), any_documents(21), st.sampled_from(MASKS), st.booleans())
def test_keys_are_the_dense_selection(layout, ids, mask, ties):
    inputs = index_inputs(21, ties, dtype=np.float64)
    causal, ids = mask[0], ids if mask[1] else None
    with jax.enable_x64(True):
        got = in_order(keys_program(layout, causal)(*inputs, ids), layout, 21)
    assert got.dtype == np.int32
    np.testing.assert_array_equal(got, dense_keys(*inputs, 4, causal, ids))


BLOCKS = [(4, 1, 3), (3, 2, 9)]  # block, local, count: 21 tokens are 7 blocks of 3


@functools.cache
def blocks_program(layout, causal, length=21):
    def op(sharder, q, k, ids):
        options = {"sharder": sharder, "causal": causal, "document_ids": ids}
        return [top_k_blocks(q, k, count, block=block, local=local, **options) for block, local, count in BLOCKS]

    return on_ranks(op, layout, length)


@settings(max_examples=40)
@given(
    st.sampled_from([Identity(), Contiguous(3), Contiguous(8), Zigzag(4)]),
    any_documents(21),
    st.sampled_from(MASKS),
    st.booleans(),
)
def test_blocks_are_the_dense_selection(layout, ids, mask, ties):
    """Blocks that straddle ranks and runs included."""
    q, k, _ = index_inputs(21, ties, dtype=np.float64)
    causal, ids = mask[0], ids if mask[1] else None
    with jax.enable_x64(True):
        outs = blocks_program(layout, causal)(q, k, ids)
    for (block, local, count), out in zip(BLOCKS, outs, strict=True):
        np.testing.assert_array_equal(in_order(out, layout, 21), dense_blocks(q, k, count, block, local, causal, ids))


@pytest.mark.parametrize("layout", [Identity(), Contiguous(4), Zigzag(4), Striped(4)], ids=str)
def test_float32_ties_go_to_the_lower_position(layout):
    """Scores of 0, of which ReLU makes many, and of a few small integers: the dense order on every layout."""
    inputs = index_inputs(40, ties=True)
    got = on_ranks(lambda s, *x: top_k_keys(*x, 16, sharder=s), layout, 40)(*inputs)
    wanted = dense_keys(*inputs, 16, True, None)
    np.testing.assert_array_equal(in_order(got, layout, 40), wanted)
    scores = np.einsum("bth,bthn->btn", inputs[2], np.maximum(np.einsum("bthd,bnd->bthn", *inputs[:2]), 0))
    assert len(np.unique(scores[0, -1])) < 20, "the case must hold ties"


@pytest.mark.parametrize("layout", [Contiguous(4), Zigzag(2)], ids=str)
def test_pools_of_keys_are_selected_from_their_last_token_on(layout):
    """DeepSeek-V4: entry w of ratio 4 is seen from token 4 (w + 1) - 1 on; incomplete ones never."""
    length, ratio = 26, 4
    q, k, weights = index_inputs(length, ties=False, dtype=np.float64)
    ids = documents([13, 13])

    def op(sharder, q, k, weights, ids):
        pools = pool(k, ratio, ratio, sharder=sharder, document_ids=ids)
        chosen = top_k_keys(q, pools, weights, 3, sharder=sharder, document_ids=ids)
        return chosen, take_keys(pools, chosen, sharder=sharder)

    with jax.enable_x64(True):
        chosen, rows = (in_order(x, layout, length) for x in on_ranks(op, layout, length)(q, k, weights, ids))
    firsts = np.arange(0, length, ratio)
    pooled = np.stack(
        [k[0, [t for t in range(f, min(f + ratio, length)) if ids[0, t] == ids[0, f]]].mean(0) for f in firsts]
    )
    scores = np.einsum("bth,bthn->btn", weights, np.maximum(np.einsum("bthd,nd->bthn", q, pooled), 0))
    seen = (firsts + ratio - 1 <= np.arange(length)[:, None]) & (ids[0, firsts] == ids[0][:, None])
    wanted = best(np.where(seen, scores, -np.inf), 3)
    np.testing.assert_array_equal(chosen, np.where(wanted < 0, -1, wanted * ratio))
    np.testing.assert_allclose(rows, np.where(wanted[..., None] < 0, 0, pooled[wanted]), rtol=1e-12)


@pytest.mark.parametrize("layout", [Contiguous(3), Zigzag(2), Striped(2)], ids=str)
def test_rows_at_given_positions_and_their_gradient(layout):
    rng = np.random.default_rng(5)
    x, cotangent = rng.normal(size=(1, 12, 2)).astype(np.float32), rng.normal(size=(1, 12, 4, 2)).astype(np.float32)
    positions = rng.integers(-1, 12, size=(1, 12, 4)).astype(np.int32)

    def op(sharder, x, positions, cotangent):
        out, pull = jax.vjp(lambda x: take_keys(x, positions, sharder=sharder), x)
        return out, pull(cotangent)[0]

    out, grad = (in_order(a, layout, 12) for a in on_ranks(op, layout, 12)(x, positions, cotangent))
    np.testing.assert_array_equal(out[0], np.where(positions[0, ..., None] < 0, 0, x[0, positions[0]]))
    wanted = np.zeros((13, 2))
    np.add.at(wanted, positions[0], cotangent[0])
    np.testing.assert_allclose(grad[0], wanted[:12], rtol=1e-5, atol=1e-6)


def compiled(layout: Layout, length, count=4):
    sharder = make_sharder(length, layout)
    spec, mesh = P(None, "cp"), mesh_of(layout)

    @functools.partial(jax.shard_map, mesh=mesh, in_specs=spec, out_specs=spec, axis_names={"cp"})
    def run(q, k, weights, ids):
        return top_k_keys(q, k, weights, count, sharder=sharder, document_ids=ids)

    shapes = ((1, length, 2, 4), (1, length, 4), (1, length, 2), (1, length))
    dtypes = (jnp.float32, jnp.float32, jnp.float32, jnp.int32)
    args = [jax.ShapeDtypeStruct(s, d, sharding=NamedSharding(mesh, spec)) for s, d in zip(shapes, dtypes, strict=True)]
    return jax.jit(run).lower(*args).compile()


def test_scores_of_all_pairs_are_never_held(monkeypatch):
    """At L = 480 of T = 1920, tiles of 40: arrays of some L (heads width + count) entries; keys go round once."""
    monkeypatch.setattr(select, "_TILE", 40)
    program = compiled(Zigzag(4), 1920)
    text = program.as_text()
    sizes = [int(np.prod([int(n) for n in dims.split(",")])) for dims in re.findall(r"\b[fsp]\w*\[([\d,]+)\]", text)]
    assert max(sizes) <= 2 * 480 * (2 * 4 + 4), max(sizes)
    assert not re.search("all-gather|all-reduce|all-to-all", text)
    moved = re.findall(r"= \(?(\w+\[[\d,]*\]).*? collective-permute(?:-start)?\(", text)
    assert sorted(moved) == ["f32[1,480,4]", "s32[1,480]", "s32[480]", "s32[480]"]
    grown = [compiled(Zigzag(4), length).memory_analysis().temp_size_in_bytes for length in (1920, 3840)]
    assert grown[1] < 2.1 * grown[0], "linear in L"


def test_batch_rows_stay_where_they_are():
    """Two rows over an automatic axis dp: only rows of one token's owner travel, between cp ranks."""
    mesh = jax.make_mesh((2, 2), ("dp", "cp"), devices=jax.devices()[:4], axis_types=(jax.sharding.AxisType.Auto,) * 2)
    sharder, spec = make_sharder(40, Zigzag(2)), P(None, "cp")

    @functools.partial(jax.shard_map, mesh=mesh, in_specs=spec, out_specs=spec, axis_names={"cp"})
    def run(q, k, weights, ids):
        pools = pool(k, 4, 4, sharder=sharder, document_ids=ids)
        chosen = top_k_keys(q, pools, weights, 3, sharder=sharder, document_ids=ids)
        return take_keys(k, chosen, sharder=sharder), top_k_blocks(q, k, 2, block=4, sharder=sharder, document_ids=ids)

    shapes = ((2, 40, 2, 4), (2, 40, 4), (2, 40, 2), (2, 40))
    where = NamedSharding(mesh, P("dp", "cp"))
    args = [jax.ShapeDtypeStruct(s, jnp.int32 if len(s) == 2 else jnp.float32, sharding=where) for s in shapes]
    text = jax.jit(run).lower(*args).compile().as_text()
    assert not re.search("all-gather|all-reduce|all-to-all|reduce-scatter", text)
    moved = re.findall(r"= \(?\w+\[([\d,]*)\].*? collective-permute(?:-start)?\(", text)
    assert moved and not any(shape.startswith("2,") for shape in moved), moved


def test_what_does_not_fit_is_refused():
    sharder = make_sharder(16, Zigzag(2))
    q, k, weights = (jnp.asarray(x) for x in index_inputs(8, ties=False))
    ids = jnp.ones((1, 8), jnp.int32)
    with pytest.raises(ValueError, match=r"k \(1, 7, 4\).*L=8"):
        top_k_keys(q, k[:, :7], weights, 2, sharder=sharder)
    with pytest.raises(ValueError, match=r"weights \(1, 8, 1\)"):
        top_k_keys(q, k, weights[..., :1], 2, sharder=sharder)
    with pytest.raises(ValueError, match="count=0"):
        top_k_keys(q, k, weights, 0, sharder=sharder)
    with pytest.raises(ValueError, match=r"document_ids of shape \(1, 4\)"):
        top_k_keys(q, k, weights, 2, sharder=sharder, document_ids=ids[:, :4])
    with pytest.raises(ValueError, match=r"Striped\(cp=2.*use a contiguous or zigzag layout"):
        top_k_blocks(q, k, 2, block=4, sharder=make_sharder(16, Striped(2)))
    pools = pool(k[:, :16], 4, 4, sharder=make_sharder(8, Identity()))
    with pytest.raises(ValueError, match="queries with document_ids and pools without"):
        top_k_keys(q, pools, weights, 2, sharder=make_sharder(8, Identity()), document_ids=ids)
    with pytest.raises(ValueError, match="ranks hold 8 rows"):
        take_keys(k[:, :4], jnp.zeros((1, 8, 2), jnp.int32), sharder=sharder)
