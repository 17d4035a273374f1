"""The context-parallel acceptance tests of NeMo Automodel that concern attention, by the names they have in this
project's census, on this engine and to float64 tolerances."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from cpjax.attention import Mask, attention, dense_attention, plan_transport
from cpjax.attention.mask import Tokens, pair_mask, streams_of, with_slices
from cpjax.shard import layout_from_name, make_sharder
from tests.attention.common import (
    allowed,
    assert_equal,
    documents_of,
    mesh_of,
    problem,
    shard,
    solve,
    solve_dense,
    solve_numpy,
    x64,
)  # fmt: skip

pytestmark = pytest.mark.usefixtures("short_tiles")


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(("cp", "layout", "transport"), [(2, "zigzag", "ring"), (4, "contiguous", "ring_ulysses")])
def test_f1_an_attention_layer_and_all_its_parameters(cp, layout, transport, packed):
    """Output, input gradient and every parameter's gradient, summed over the ranks, are those of one device."""
    sharder = make_sharder(32, layout_from_name(layout, cp))
    documents = documents_of([7, 11, 14], [32], length=32) if packed else None
    rng = np.random.default_rng(0)
    shapes = {"q": (16, 4, 8), "k": (16, 2, 8), "v": (16, 2, 6), "o": (4, 6, 16), "sinks": (4,)}
    params = {name: rng.normal(size=shape) for name, shape in shapes.items()}
    x, g = rng.normal(size=(2, 2, 32, 16))

    def layer(params, x, attend):
        q, k, v = (jnp.einsum("ble,ehd->blhd", x, params[name]) for name in "qkv")
        return x + jnp.einsum("blhd,hde->ble", attend(q, k, v, sinks=params["sinks"]), params["o"])

    def split(params, x):
        def body(params, x, documents):
            local = None if documents is None else sharder.take_local(documents)
            mask = Mask(document_ids=local)
            run = lambda q, k, v, sinks: attention(  # noqa: E731
                q, k, v, sinks=sinks, sharder=sharder, mask=mask, transport=transport
            )
            return layer(params, sharder.take_local(x), run)

        out = jax.shard_map(body, mesh=mesh_of(cp), in_specs=P(), out_specs=P(None, "cp"), axis_names={"cp"})
        return out(params, x, documents)[:, sharder.layout.inverse(32)]

    def whole(params, x):
        mask = Mask(document_ids=documents)
        return layer(params, x, lambda q, k, v, sinks: dense_attention(q, k, v, sinks=sinks, mask=mask))

    def results(function):
        def run(params, x):
            out, pull = jax.vjp(function, params, x)
            return out, pull(jnp.asarray(g))

        return jax.tree.map(np.asarray, jax.jit(run)(params, x))

    with x64(jnp.float64):
        jax.tree.map(
            lambda x, y: np.testing.assert_allclose(x, y, rtol=0, atol=1e-12 * np.abs(y).max()),
            results(split), results(whole),
        )  # fmt: skip


def test_f8_packed_documents_equal_the_documents_alone():
    lengths = [7, 11, 14]
    p = problem(32, batch=1, documents=documents_of(lengths, length=32))
    packed = solve(p, 4, "zigzag", "ring", jnp.float64)
    for end, length in zip(np.cumsum(lengths), lengths, strict=True):
        rows = slice(end - length, end)
        alone = solve_numpy(type(p)(*(x[:, rows] for x in p[:4])))
        assert_equal([x[:, rows] for x in packed], alone, jnp.float64)


@pytest.mark.parametrize("transport", ["ring", "allgather", "ulysses"])
def test_f9_block_diagonal(transport):
    """A document across the ranks' edge, a rank of pads only, one document of all tokens: all with one program."""
    for lengths in ([10, 12, 10], [16], [5, 11], [32]):
        p = problem(32, batch=1, documents=documents_of(lengths, length=32))
        assert_equal(solve(p, 2, "contiguous", transport, jnp.float64), solve_numpy(p), jnp.float64)


def test_f10_every_boundary():
    for length in range(33):
        p = problem(32, batch=1, documents=documents_of([length, 32 - length], length=32), seed=length)
        assert_equal(solve(p, 2, "contiguous", "ring", jnp.float64), solve_numpy(p), jnp.float64)


@pytest.mark.parametrize("form", [{"window": (7, None)}, {"window": (7, None), "longest_document": 9}, {}])
def test_f22_sliding_and_global_layers_of_one_ring(form):
    """Packed rows with images: a sliding layer makes all hops, as the images may cross, unless documents forbid it."""
    documents = documents_of([9, 8, 8, 7], [9, 9, 6], length=32)
    groups = np.where(np.arange(32) % 8 < 5, np.arange(32) // 8, -1)[None].repeat(2, 0).astype(np.int32)
    p = problem(32, documents=documents, vision_group_ids=groups)
    expected = solve_numpy(p, window=form.get("window", (None, None)))
    assert_equal(solve(p, 4, "contiguous", "ring", jnp.float64, **form), expected, jnp.float64)
    sharder = make_sharder(32, layout_from_name("contiguous", 4))
    x = jax.ShapeDtypeStruct((2, 8, 2, 8), jnp.float32)
    mask = Mask(document_ids=documents, vision_group_ids=groups, **form)
    hops = plan_transport(x, x, x, sharder=sharder, mask=mask, transport="ring").hops
    assert hops == ((1, 1) if "longest_document" in form else (3, 0))


@pytest.mark.parametrize(("layout", "transport"), [("zigzag", "ring"), ("contiguous", "ulysses")])
def test_f23_a_prefix_tree_equals_its_rollouts(layout, transport):
    """Nodes that rollouts share are computed once; the expected values are those of the rollouts, one by one."""
    lengths, paths = [8, 5, 9, 4, 6], [(0, 1, 3), (0, 1, 4), (0, 2)]
    ends = np.cumsum(lengths)
    tokens = [np.arange(end - n, end) for end, n in zip(ends, lengths, strict=True)]
    slices = []
    for path in paths:
        for depth, node in enumerate(path):
            own = tokens[node][0], tokens[node][-1] + 1
            slices += [(*own, tokens[a][0], tokens[a][-1] + 1, 0) for a in path[:depth]] + [(*own, *own, 1)]
    p = problem(32, batch=1, sinks=True, slices=np.array(sorted(set(slices)), np.int32))
    output = solve(p, 4, layout, transport, jnp.float64, causal=False)[0]
    for path in paths:
        rows = np.concatenate([tokens[node] for node in path])
        alone = solve_numpy(type(p)(*(x[:, rows] for x in p[:4]), p.sinks))[0]
        np.testing.assert_allclose(output[:, rows], alone, rtol=0, atol=1e-12)


@pytest.mark.parametrize("layout", ["contiguous", "zigzag", "striped", "packed", "dispatched"])
def test_u4_the_ranks_masks_make_up_the_whole(layout):
    rng = np.random.default_rng(0)
    p = problem(
        48, batch=1 if layout == "packed" else 2,
        documents=documents_of(*[[20, 28], [7, 30]][layout == "packed" :], length=48),
        vision_group_ids=rng.integers(-1, 3, (2, 48), np.int32)[layout == "packed" :],
    )  # fmt: skip
    form: dict = {}
    if layout != "packed":  # which drops pads and moves documents: what is said in positions does not apply
        slices = np.array([[0, 30, 4, 40, 3], [10, 48, 0, 48, 1]], np.int32)
        padding, prefix = rng.random((2, 48)) < 0.2, rng.random((2, 48)) < 0.1
        p, form = p._replace(slices=slices, padding_mask=padding, prefix=prefix), {"causal": False, "window": (30, 8)}
    batch, sharder = shard(p, 4, layout)
    mask = Mask(slices=p.slices, **{name: batch[name] for name in p.streams()}, **form)
    q_streams, k_streams = streams_of(mask)
    order, length = sharder.indices(np.arange(4)), sharder.padded_length
    found = np.zeros((len(p.q), length, length), bool)
    for mine in order:
        for theirs in order:
            (queries, keys) = (
                Tokens(jnp.asarray(own)[None], jax.tree.map(lambda x, own=own: x[:, own], streams))
                for own, streams in ((mine, q_streams), (theirs, k_streams))
            )
            queries = jax.tree.map(lambda x: x[0], with_slices(jax.tree.map(lambda x: x[None], queries), p.slices))
            found[:, mine[:, None], theirs] = pair_mask(queries, keys, mask.reach(length))
    if layout == "packed":
        tokens = p.document_ids[0] > 0
        where = sharder.places[tokens]
        assert found.sum() == found[:, where[:, None], where].sum()
        np.testing.assert_array_equal(found[:, where[:, None], where], allowed(p)[:, tokens][:, :, tokens])
    else:
        np.testing.assert_array_equal(found, allowed(p, **form))


def test_u4_one_device_equals_the_dense_formula():
    p = problem(48, heads=6, kv_heads=2, documents=documents_of([20, 28], [7, 30], length=48))
    assert_equal(solve(p, 1, "identity", "ring"), solve_dense(p))
