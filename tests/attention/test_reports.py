"""Faults that users of other systems met, and wrong calls."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from cpjax.attention import Mask, attention, plan_transport
from cpjax.shard import Packed, Zigzag, layout_from_name, make_sharder, pack
from tests.attention.common import assert_equal, documents_of, mesh_of, problem, solve, solve_numpy

pytestmark = pytest.mark.usefixtures("short_tiles")

WHERE = [
    (1, "identity", "ring"), (4, "zigzag", "ring"), (4, "zigzag", "allgather"), (2, "contiguous", "ring"),
    (4, "zigzag", "ulysses"),
]  # fmt: skip


@pytest.mark.parametrize(("cp", "layout", "transport"), WHERE)
def test_rows_without_a_key_are_zero(cp, layout, transport):
    """Row 0: a document of pads only; row 1: nothing but pads, so whole ranks have no key."""
    documents = documents_of([16, 16, 16], [48], length=48)
    padding = np.zeros((2, 48), bool)
    padding[0, 16:32] = padding[1] = True
    p = problem(48, documents=documents, padding=padding)
    output, dq, dk, dv = solve(p, cp, layout, transport)  # finite, it checks
    assert not output[padding].any() and not dq[padding].any()
    assert not dk[padding].any() and not dv[padding].any()
    assert_equal((output, dq, dk, dv), solve_numpy(p))


@pytest.mark.parametrize(("cp", "layout", "transport"), [*WHERE, (4, "packed", "ring"), (4, "packed", "ulysses")])
def test_r16_documents_are_isolated_bitwise(cp, layout, transport):
    documents = documents_of([9, 12, 4, 14, 9], length=48)
    p = problem(48, batch=1, documents=documents)
    changed = p._replace(q=p.q.copy(), k=p.k.copy(), v=p.v.copy())
    for x in (changed.q, changed.k, changed.v):
        x[:, 3] += 100.0
    before, after = solve(p, cp, layout, transport), solve(changed, cp, layout, transport)
    for x, y in zip(before, after, strict=True):
        np.testing.assert_array_equal(x[:, 9:], y[:, 9:])
    assert (before[0][:, 3:9] != after[0][:, 3:9]).any(-1).all()


@pytest.mark.parametrize("transport", ["ring", "allgather", "ulysses"])
def test_r17_rows_of_a_batch_are_independent(transport):
    rows = ([5, 40], [45], [20, 1, 13])
    documents = documents_of(*rows, length=48)
    p = problem(48, batch=3, documents=documents)
    together = solve(p, 2, "zigzag", transport)
    for row in range(3):
        alone = solve(type(p)(*(None if x is None else x[row : row + 1] for x in p)), 2, "zigzag", transport)
        assert_equal([x[row : row + 1] for x in together], alone)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize(("cp", "layout", "transport"), WHERE[:3])
def test_r20_scores_may_be_a_million_below_zero(cp, layout, transport, dtype):
    """Softmax does not see a shift of all scores; -1e6 = -2000 x 500 is exact, and so are the scores, in each type."""
    p = problem(48, kv_heads=4, width=4, v_width=4, documents=documents_of([20, 28], [48], length=48))
    q, k = (np.rint(x) for x in (p.q, p.k))
    q[..., 3], k[..., 3] = 2000, 0
    shifted = k.copy()
    shifted[..., 3] = -500 if dtype != jnp.bfloat16 else -512
    plain, low = p._replace(q=q, k=k), p._replace(q=q, k=shifted)
    for x, y in zip(
        solve(plain, cp, layout, transport, dtype, scale=1.0)[::3],
        solve(low, cp, layout, transport, dtype, scale=1.0)[::3],
        strict=True,
    ):
        np.testing.assert_allclose(x.astype(np.float64), y.astype(np.float64), atol=1e-6)


@pytest.mark.parametrize(("layout", "transport"), [
    ("zigzag", "ring"), ("contiguous", "ring"), ("striped", "allgather"), ("zigzag", "ulysses"),
])  # fmt: skip
def test_r14_the_window_is_kept(layout, transport):
    """Window 8: query 40 sees the keys 33 .. 40 and no other."""
    p = problem(64, batch=1)
    p.g[:] = 0
    p.g[:, 40] = 1
    got = solve(p, 4, layout, transport, window=(7, None))
    assert_equal(got, solve_numpy(p, window=(7, None)))
    seen = got[3].any((0, 2, 3))
    assert seen[33:41].all() and not seen[:33].any() and not seen[41:].any()


@pytest.mark.parametrize("layout", ["zigzag", "contiguous", "packed"])
def test_r31_documents_shorter_than_a_rank(layout):
    """Documents of 1, 2, 3 and 38 tokens on 8 ranks."""
    p = problem(44, batch=1, documents=documents_of([1, 2, 3, 38], length=44))
    assert_equal(solve(p, 8, layout, "ring"), solve_numpy(p))


@pytest.mark.parametrize("transport", ["ulysses", "ring_ulysses:2"])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "cp", "allowed"), [(28, 7, 2, "28 would|14"), (40, 8, 16, "2 or 4 or 8"), (6, 2, 4, "2")]
)
def test_r29_head_counts_that_do_not_divide(heads, kv_heads, cp, allowed, transport):
    """As dense, or a sentence with the numbers that would do, before anything is compiled."""
    p = problem(16 * cp, batch=1, heads=heads, kv_heads=kv_heads, width=2, v_width=2)
    if transport == "ulysses" and heads % cp == 0:
        assert_equal(solve(p, cp, "zigzag", transport), solve_numpy(p))
        return
    sharder = make_sharder(16 * cp, layout_from_name("zigzag", cp))
    q, k = (jax.ShapeDtypeStruct((1, 16, n, 2), jnp.float32) for n in (heads, kv_heads))
    if cp > 2 and transport == "ring_ulysses:2":
        assert plan_transport(q, k, k, sharder=sharder, mask=Mask(), transport=transport).members == 2
        return
    with pytest.raises(ValueError, match=f"{heads} query heads on {cp} ranks.*use the transport ring"):
        plan_transport(q, k, k, sharder=sharder, mask=Mask(), transport=transport)


@pytest.mark.parametrize("layout", ["zigzag", "contiguous", "striped"])
def test_r24_masks_follow_global_positions(layout):
    """No positions are passed: they come from the layout. Query 40 sees key 39 and not key 41."""
    p = problem(64, batch=1, documents=documents_of([64], length=64))
    p.g[:] = 0
    p.g[:, 40] = 1
    dv = solve(p, 4, layout, "ring")[3]
    assert dv[:, :41].any((-1, -2)).all() and not dv[:, 41:].any()


def call(
    q=(2, 8, 4, 8), k=(2, 8, 2, 8), v=(2, 8, 2, 6), dtypes=(jnp.float32,) * 3, cp=2, transport="ring",
    sinks=None, softcap=None, scale=None, length=16, **mask,
):  # fmt: skip
    arrays = [x if isinstance(x, list) else jnp.zeros(x, dtype) for x, dtype in zip((q, k, v), dtypes, strict=True)]
    sharder = make_sharder(length if cp == 2 else 8, layout_from_name("zigzag", cp))
    options = {"transport": transport, "sinks": sinks, "softcap": softcap, "scale": scale}
    return attention(*arrays, sharder=sharder, mask=Mask(**mask), **options)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"transport": "star"}, "unknown transport 'star': choose one of auto, ring, allgather"),
        ({"transport": "star", "cp": 1}, "unknown transport"),
        ({"q": (2, 8, 3, 8)}, "3 query heads and 2 key heads"),
        ({"q": (8, 4, 8)}, r"q \(8, 4, 8\).* must be \[B, L, heads, width\]"),
        ({"k": (2, 7, 2, 8)}, r"k \(2, 7, 2, 8\).*batch and length"),
        ({"k": (2, 8, 2, 7)}, "the width in q and k"),
        ({"v": (2, 8, 4, 6)}, "the heads in k and v"),
        ({"dtypes": (jnp.float32, jnp.bfloat16, jnp.float32)}, "convert them to one dtype"),
        ({"q": (2, 16, 4, 8), "k": (2, 16, 2, 8), "v": (2, 16, 2, 6)}, "16 tokens, but each of the 2 ranks .* holds 8"),
        ({"document_ids": jnp.ones((2, 16), int)}, r"mask.document_ids has shape \(2, 16\)"),
        ({"padding_mask": jnp.ones((1, 8), bool)}, r"mask.padding_mask has shape \(1, 8\)"),
        ({"vision_group_ids": jnp.ones((8,), int)}, r"mask.vision_group_ids has shape \(8,\)"),
        ({"prefix": jnp.ones((2, 16), bool)}, r"mask.prefix has shape \(2, 16\)"),
        ({"slices": jnp.ones((3, 4), jnp.int32)}, r"mask.slices has shape \(3, 4\) and dtype int32"),
        ({"slices": jnp.ones((3, 5))}, r"mask.slices has shape \(3, 5\) and dtype float32"),
        ({"window": 8}, r"mask.window=8: give \(left, right\)"),
        ({"window": (-1, None)}, r"mask.window=\(-1, None\)"),
        ({"window": (2.5, 0)}, r"mask.window=\(2.5, 0\)"),
        ({"window": (True, 0)}, r"mask.window=\(True, 0\)"),
        ({"causal": "no"}, "mask.causal='no'"),
        ({"longest_document": 0, "document_ids": np.ones((2, 8), np.int32)}, "mask.longest_document=0"),
        ({"document_ids": np.ones((2, 8), np.int64)}, "mask.document_ids has dtype int64: it must be int32"),
        ({"prefix": np.ones((2, 8), np.int32)}, "mask.prefix has dtype int32: it must be bool"),
        ({"slices": np.array([[0, 8, 0, 8, 4]], np.int32)}, r"mask.slices has kinds \[4\]"),
        ({"slices": jnp.zeros((0, 5), jnp.int32)}, r"mask.slices has shape \(0, 5\)"),
        ({"dtypes": (jnp.int32,) * 3}, "given int32 arrays: convert them to a floating dtype"),
        ({"causal": False, "length": 13}, "13 tokens padded to 16, and nothing says which are pads"),
        ({}, "outside of a shard_map that is manual over the mesh axis 'cp'"),
        ({"longest_document": 4}, "longest_document was given without document_ids"),
        ({"sinks": jnp.ones(2)}, r"sinks \(2,\) for 4 query heads"),
        ({"sinks": [1.0] * 4}, "sinks of type list: it must be an array"),
        ({"softcap": 0.0}, "softcap=0.0"),
        ({"softcap": np.inf}, "softcap=inf: give a finite number"),
        ({"scale": np.nan}, "scale=nan: give a finite number"),
        ({"q": [1.0]}, "q of type list: it must be an array"),
        ({"q": (0, 8, 4, 8), "k": (0, 8, 2, 8), "v": (0, 8, 2, 8)}, r"q \(0, 8, 4, 8\).*no size may be 0"),
        ({"transport": "ring:2"}, "unknown transport 'ring:2'"),
        ({"transport": "ring_ulysses:3"}, r"3.* 4 query heads on 2 ranks"),
    ],
)
def test_wrong_calls_raise_before_compute(arguments, message):
    with pytest.raises(ValueError, match=message):
        call(**arguments)  # outside shard_map: any collective would raise something else


def test_a_traced_scale_raises():
    with pytest.raises(ValueError, match="a traced scale: it is static"):
        jax.jit(lambda scale: call(scale=scale))(1.0)


def test_pads_of_packed_documents_must_be_known():
    x = jnp.zeros((1, 10, 2, 4))
    with pytest.raises(ValueError, match=r"padded one by one.*give mask.document_ids"):
        attention(x, x, x, sharder=pack([0, 11, 16, 32], Packed(4)), mask=Mask())


def test_a_mesh_of_another_size_raises():
    sharder = make_sharder(16, Zigzag(2))
    on_four = jax.shard_map(sharder.take_local, mesh=mesh_of(4), in_specs=P(), out_specs=P(None, "cp"))
    with pytest.raises(ValueError, match="a sharder of 2 ranks was used on a mesh whose axis 'cp' has 4"):
        on_four(jnp.zeros((1, 16)))
    gather = jax.shard_map(sharder.gather, mesh=mesh_of(4), in_specs=P(None, "cp"), out_specs=P(None, "cp"))
    with pytest.raises(ValueError, match="a sharder of 2 ranks was used on a mesh whose axis 'cp' has 4"):
        gather(jnp.zeros((1, 32)))
    with pytest.raises(ValueError, match="outside of a shard_map"):
        sharder.gather(jnp.zeros((1, 8)))


def test_wrong_layout_length_raises():
    with pytest.raises(ValueError, match="multiple of 8"):
        Zigzag(4).indices(36, 0)
