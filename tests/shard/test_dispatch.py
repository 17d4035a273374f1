"""Dispatched chunks: areas, the solver, its bound, and the sharder of its table (census 1b, 5; F23, U4)."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

from benchmarks.layouts import MIXED_MASKS, image_groups, prefix_and_windows
from cpjax.shard import Dispatched, Packed, Sharder, SliceKind, dispatch, make_batch, pack
from tests.shard.common import mesh_of

FULL, CAUSAL, INVERSE, BOTH = SliceKind


def pairs(slices, length: int) -> np.ndarray:
    """int [S, S]: in how many slices a query (row) sees a key, pair by pair."""
    count = np.zeros((length, length), int)
    for q_start, q_end, k_start, k_end, kind in slices:
        for q, k in itertools.product(range(q_start, q_end), range(k_start, k_end)):
            i, j, slack = q - q_start, k - k_start, (k_end - k_start) - (q_end - q_start)
            below, above = j <= i + slack, j >= i
            count[q, k] += {FULL: True, CAUSAL: below, INVERSE: above, BOTH: below and above}[kind]
    return count


@st.composite
def masks(draw: st.DrawFn, longest: int = 24) -> tuple[list[list[int]], int]:
    length = draw(st.integers(1, longest))
    span = st.tuples(st.integers(0, length), st.integers(0, length)).map(sorted)
    one = st.tuples(span, span, st.sampled_from(list(SliceKind))).map(lambda s: [*s[0], *s[1], int(s[2])])
    return draw(st.lists(one, min_size=1, max_size=6)), length


@given(masks(), st.integers(1, 4), st.integers(1, 5))
def test_areas_are_exact_and_every_rank_gets_as_many_chunks(case, cp, chunk_size):
    slices, length = case
    sharder, balance = dispatch(slices, length, Dispatched(cp, chunk_size=chunk_size))
    owned = sharder.indices(np.arange(cp))
    assert owned.dtype == np.int32 and owned.shape == (cp, sharder.padded_length // cp)
    np.testing.assert_array_equal(np.sort(owned.ravel()), np.arange(sharder.padded_length))
    assert (np.diff(owned, axis=1) > 0).all()
    chunks = owned.reshape(cp, -1, chunk_size)
    np.testing.assert_array_equal(chunks, chunks[..., :1] + np.arange(chunk_size))
    assert (chunks[..., 0] % chunk_size == 0).all()

    rows = np.pad(pairs(slices, length).sum(1), (0, sharder.padded_length - length))
    wanted = rows[owned].sum(1)
    np.testing.assert_array_equal(balance.areas, wanted)
    total = wanted.sum()
    assert balance.imbalance == pytest.approx(wanted.max() * cp / total if total else 1.0, rel=1e-12)
    assert 1 <= balance.bound <= balance.imbalance


@settings(max_examples=30)
@given(st.lists(st.integers(0, 12), min_size=1, max_size=6), st.integers(2, 3))
def test_the_bound_is_below_the_best_assignment_and_the_solver_near_it(sizes, cp):
    """Against all assignments of up to six chunks of one query, which n slices let see one key each."""
    length = -(-len(sizes) // cp) * cp
    sizes = sizes + [0] * (length - len(sizes))
    slices = [[chunk, chunk + 1, 0, 1, FULL] for chunk, n in enumerate(sizes) for _ in range(n)]
    slices = np.reshape(slices, (-1, 5))
    _, balance = dispatch(slices, length, Dispatched(cp, chunk_size=1))
    best = min(
        max(sum(n for n, r in zip(sizes, ranks, strict=True) if r == rank) for rank in range(cp))
        for ranks in itertools.product(range(cp), repeat=length)
        if all(ranks.count(rank) == length // cp for rank in range(cp))
    )
    assert balance.bound * sum(sizes) / cp <= best * (1 + 1e-12)
    assert best <= balance.areas.max() <= best * 4 / 3


def test_the_masks_are_what_they_are_called():
    position = np.arange(40)
    causal = position <= position[:, None]
    wanted = ((position < 3) | (causal & (position[:, None] - position < 8))).astype(int)
    np.testing.assert_array_equal(pairs(prefix_and_windows(40, 3, 8), 40), wanted)
    group = np.where(position % 13 < 6, position // 13, -1)
    wanted = causal | ((group == group[:, None]) & (group >= 0))
    np.testing.assert_array_equal(pairs(image_groups(40, 13, 6), 40), wanted)


@pytest.mark.quick
@pytest.mark.parametrize("length", [32768, 50000, 65536])
@pytest.mark.parametrize("mask", MIXED_MASKS)
def test_three_mixed_masks_are_balanced_within_five_per_cent(mask, length):
    """512-token chunks over 8 ranks; the whole sequence cut contiguously is far off."""
    slices = mask(length)
    _, balance = dispatch(slices, length, Dispatched(8, chunk_size=512))
    print(f"{mask.__name__} {length}: imbalance {balance.imbalance:.5f}, bound {balance.bound:.5f}")
    assert balance.bound <= balance.imbalance <= 1.05


def test_an_indivisible_chunk_is_told_by_the_bound():
    """The prefix sees everything too: with 512 tokens a chunk, the one that holds it outweighs a rank's share."""
    length = 65536
    slices = [*prefix_and_windows(length), [0, 128, 128, length, FULL]]
    _, balance = dispatch(slices, length, Dispatched(8, chunk_size=512))
    assert balance.imbalance > 1.5 and balance.imbalance == pytest.approx(balance.bound, rel=1e-12)
    _, finer = dispatch(slices, length, Dispatched(8, chunk_size=16))
    assert finer.imbalance <= 1.05


def test_a_million_tokens():
    """Nothing overflows, and memory does not grow with slices times chunks."""
    length = 1 << 20
    _, causal = dispatch([[0, length, 0, length, CAUSAL]], length, Dispatched(8))
    assert causal.areas.sum() == length * (length + 1) // 2 and causal.imbalance < 1 + 1e-9
    cuts = np.arange(0, length + 1, 16)
    slices = np.stack([cuts[:-1], cuts[1:], 0 * cuts[1:], cuts[1:], 0 * cuts[1:] + CAUSAL], 1)
    _, same = dispatch(slices, length, Dispatched(8))
    assert same.areas.sum() == causal.areas.sum()


def test_an_empty_mask_is_balanced():
    _, balance = dispatch(np.zeros((0, 5)), 5, Dispatched(2, chunk_size=2))
    assert balance.imbalance == balance.bound == 1 and balance.areas.tolist() == [0, 0]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: dispatch([[0, 1, 0, 1]], 4, Dispatched(2)), r"\[N, 5\]"),
        (lambda: dispatch([[0, 1, 0, 1, 0], [3, 2, 0, 1, 0]], 4, Dispatched(2)), "slice 1 is"),
        (lambda: dispatch([[0, 5, 0, 1, 0]], 4, Dispatched(2)), "end <= 4"),
        (lambda: dispatch([[0, 1, -1, 1, 0]], 4, Dispatched(2)), "0 <= start"),
        (lambda: dispatch([[0, 1, 0, 1, 4]], 4, Dispatched(2)), "kind"),
        (lambda: dispatch([[0, 1, 0, 1, 0]], 0, Dispatched(2)), "at least one token"),
        (lambda: Dispatched(2, chunk_size=0), "chunk_size=0"),
        (lambda: pack([0, 4], Dispatched(2)), "use Packed"),
        (lambda: make_batch({"input_ids": np.ones((1, 4), int)}, Dispatched(2)), "depends on the batch"),
    ],
)
def test_misuse_raises_one_sentence(make, message):
    with pytest.raises(ValueError, match=message) as error:
        make()
    assert "\n" not in str(error.value)


def test_rows_are_padded_for_the_sharder_of_a_mask():
    ids = np.arange(1, 15).reshape(2, 7)
    sharder, _ = dispatch([[0, 7, 0, 7, CAUSAL]], 7, Dispatched(2, chunk_size=2))
    batch, same = make_batch({"input_ids": ids, "labels": ids}, sharder, pad_id=99)
    assert same is sharder
    np.testing.assert_array_equal(batch["input_ids"], np.pad(ids, ((0, 0), (0, 1)), constant_values=99))
    np.testing.assert_array_equal(batch["document_ids"], [[1] * 7 + [0]] * 2)
    for other, extra in ((sharder, {"cu_seqlens": [0, 14]}), (pack([0, 7], Packed(2)), {})):
        with pytest.raises(ValueError, match="was given a sharder"):
            make_batch({"input_ids": ids, **extra}, other)
    for wrong in ({"batch": {"input_ids": ids[:, :6]}}, {"batch": {"input_ids": ids}, "padded_length": 12}):
        with pytest.raises(ValueError, match="lengths must agree"):
            make_batch(**wrong, layout=sharder)


def test_u2_the_row_of_the_table_is_the_cp_coordinate_not_the_device_number():
    mesh = jax.make_mesh((2, 4), ("dp", "cp"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    sharder, _ = dispatch([[0, 16, 0, 16, CAUSAL]], 16, Dispatched(4, chunk_size=2))
    x = jnp.stack([jnp.arange(16.0), 100 + jnp.arange(16.0)])
    body = jax.shard_map(sharder.take_local, mesh=mesh, in_specs=P(), out_specs=P(None, "cp"), axis_names={"cp"})
    out = jax.jit(body)(jax.device_put(x, jax.NamedSharding(mesh, P("dp"))))
    np.testing.assert_array_equal(out, x[:, sharder.indices(np.arange(4)).ravel()])


@jax.jit
def _verbs(x, sharder: Sharder):
    def body(x):
        local = sharder.shard(x, fill=-1.0)
        loss = lambda local: jnp.sum(jnp.arange(22.0)[:, None] * sharder.gather(local))  # noqa: E731
        return local[None], sharder.gather(local)[None], jax.grad(loss)(local)[None]

    return jax.shard_map(body, mesh=mesh_of(4), in_specs=P(), out_specs=P("cp"), axis_names={"cp"})(x)


@settings(max_examples=15)
@given(masks(22))
def test_verbs_round_trip_for_every_mask_without_compiling_again(case):
    slices, _ = case
    sharder, _ = dispatch(slices, 22, Dispatched(4, chunk_size=2))
    x = np.arange(44.0, dtype=np.float32).reshape(1, 22, 2)
    local, back, grad = _verbs(x, sharder)
    padded = np.pad(x, ((0, 0), (0, 2), (0, 0)), constant_values=-1)
    for rank in range(4):
        mine = sharder.indices(rank)
        np.testing.assert_array_equal(local[rank], padded[:, mine])
        np.testing.assert_array_equal(back[rank], x)
        wanted = np.where(mine < 22, 4.0 * mine, 0)[None, :, None]  # the sum over 4 consumers
        np.testing.assert_array_equal(grad[rank], np.broadcast_to(wanted, (1, 6, 2)))
    assert _verbs._cache_size() == 1


@settings(max_examples=20)
@given(masks(), st.integers(1, 4))
def test_u4_f23_shards_of_any_slice_mask_are_the_mask_and_attention_equals_the_dense_one(case, cp):
    """The reference mask is built pair by pair, not from the solver's arithmetic; rows may see no key."""
    slices, length = case
    sharder, _ = dispatch(slices, length, Dispatched(cp, chunk_size=2))
    rng = np.random.default_rng(0)
    q, k, v = rng.normal(size=(3, length, 3))

    def attend(q, k, v, mask):
        weights = np.exp(q @ k.T) * mask
        return weights / np.maximum(weights.sum(-1, keepdims=True), 1e-300) @ v

    mask = pairs(slices, length) > 0
    pad = sharder.padded_length - length
    full = np.pad(mask, (0, pad))
    everyone = sharder.indices(np.arange(cp)).ravel()
    q2, k2, v2 = (np.pad(x, ((0, pad), (0, 0))) for x in (q, k, v))
    parts = [
        attend(q2[mine], k2[everyone], v2[everyone], full[mine][:, everyone]) for mine in sharder.indices(np.arange(cp))
    ]
    back = np.concatenate(parts)[sharder.inverse()][:length]
    np.testing.assert_allclose(back, attend(q, k, v, mask), rtol=1e-12, atol=1e-14)
