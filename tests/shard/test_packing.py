"""Packed documents: partition, position map, verbs, batches (census F11, U1, U4; reports R16, R31, R33, R42)."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

from cpjax.recurrence import causal_conv
from cpjax.shard import (
    IGNORE,
    Contiguous,
    Packed,
    Sharder,
    Stream,
    Striped,
    Zigzag,
    layout_from_name,
    make_batch,
    make_sharder,
    pack,
)
from tests.shard.common import assert_every_other_length_raises, mesh_of, on_ranks

LENGTHS = st.lists(st.one_of(st.integers(0, 3), st.integers(0, 40)), min_size=1, max_size=6).filter(any)


def boundaries(lengths) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(lengths)])


@st.composite
def packings(draw: st.DrawFn, names=("packed",)) -> tuple[Sharder, np.ndarray, np.ndarray]:
    """A sharder of documents (short, single tokens, empty, all pads), their boundaries, and which tokens are pads."""
    cp, multiple = draw(st.integers(1, 9)), draw(st.sampled_from((1, 2, 3, 4)))
    layout = {"packed": Packed}.get(name := draw(st.sampled_from(names))) or type(layout_from_name(name, 2))
    cu = boundaries(draw(LENGTHS))
    pads = draw(
        st.one_of(
            st.just(np.zeros(cu[-1], bool)),
            st.just(np.ones(cu[-1], bool)),
            st.lists(st.booleans(), min_size=int(cu[-1]), max_size=int(cu[-1])).map(np.array),
        )
    )
    sharder = pack(cu, layout(cp, multiple), padding_mask=pads)
    if draw(st.booleans()):
        longer = sharder.padded_length + draw(st.integers(0, 2)) * sharder.layout.divisor
        sharder = pack(cu, layout(cp, multiple), padding_mask=pads, padded_length=longer)
    return sharder, cu, pads


@given(packings())
def test_ranks_partition_the_padded_sequence_in_ascending_order(case):
    sharder, _, _ = case
    owned = sharder.indices(np.arange(sharder.cp))
    assert owned.dtype == np.int32 and owned.shape == (sharder.cp, sharder.local_length)
    np.testing.assert_array_equal(np.sort(owned.ravel()), np.arange(sharder.padded_length))
    assert (np.diff(owned, axis=1) > 0).all()
    np.testing.assert_array_equal(owned.ravel()[sharder.inverse()], np.arange(sharder.padded_length))
    assert sharder.local_length % sharder.layout.multiple == 0


@given(packings(names=("packed", "contiguous", "zigzag", "striped")))
def test_every_document_is_padded_by_itself_and_the_position_map_says_where_tokens_went(case):
    sharder, cu, pads = case
    unit = sharder.layout.divisor if isinstance(sharder.layout, Packed) else sharder.layout.multiple
    wanted, start = [], 0
    for first, end in itertools.pairwise(cu):
        kept = 0
        for token in range(first, end):
            wanted.append(-1 if pads[token] else start + kept)
            kept += not pads[token]
        start += -(-kept // unit) * unit
    np.testing.assert_array_equal(sharder.places, wanted)
    assert sharder.places.dtype == np.int32 and start <= sharder.padded_length
    shortest = pack(cu, sharder.layout, padding_mask=pads).padded_length
    assert shortest <= sharder.layout.pad_length(int(cu[-1]) + (len(cu) - 1) * (unit - 1)), "as its docstring says"
    there = sharder.sources() >= 0
    np.testing.assert_array_equal(sharder.sources()[there], np.flatnonzero(~pads))
    np.testing.assert_array_equal(sharder.places[sharder.sources()[there]], np.flatnonzero(there))


@given(packings())
def test_packed_is_zigzag_inside_each_document(case):
    sharder, cu, pads = case
    start = 0
    spans = []
    for first, end in itertools.pairwise(cu):
        spans.append((start, -(-int((~pads[first:end]).sum()) // sharder.layout.divisor) * sharder.layout.divisor))
        start += spans[-1][1]
    for rank in range(sharder.cp):
        owned = sharder.indices(rank)
        for begin, length in spans:
            inside = owned[(owned >= begin) & (owned < begin + length)] - begin
            wanted = Zigzag(sharder.cp, sharder.layout.multiple).indices(length, rank) if length else []
            np.testing.assert_array_equal(inside, wanted)


def test_packed_balances_the_causal_work_of_every_document():
    """Of each document every rank computes the same number of pairs, which zigzag over the whole stream does not do."""
    sharder = pack(boundaries([1000, 24, 4000, 512]), Packed(4))
    owned = sharder.indices(np.arange(4))
    starts = boundaries([1000, 24, 4000, 512])[:-1]  # multiples of 8: nothing moves
    for start, length in zip(starts, [1000, 24, 4000, 512], strict=True):
        mine = (owned >= start) & (owned < start + length)
        work = ((owned - start + 1) * mine).sum(1)
        assert np.ptp(work) == 0


# A fixed S and T: one program for all batches.
S, T, CP = 24, 64, 4


def program():
    """Gradients of a shard and of a gather; every rank's shard; the tensor gathered back, padded and not."""

    @jax.jit
    def run(x, sharder):
        def body(x, sharder):
            local = sharder.shard(x, fill=-1.0)
            weights = 1 + jnp.arange(x.size, dtype=x.dtype).reshape(x.shape)
            mine = sharder.shard(weights, fill=0)
            varying = jax.lax.pcast(x, "cp", to="varying")
            return (
                jax.grad(lambda x: jnp.sum(mine * sharder.shard(x, fill=-1.0)))(varying)[None],
                jax.grad(lambda local: jnp.sum(weights * sharder.gather(local, fill=-2.0)))(local)[None],
                local[None],
                sharder.gather(local, trim=False)[None],
                sharder.gather(local, fill=-2.0)[None],
                sharder.shard(sharder.gather(local, trim=False))[None],
            )

        return jax.shard_map(body, mesh=mesh_of(CP), in_specs=P(), out_specs=P("cp"), axis_names={"cp"})(x, sharder)

    return run


RUN = {rows: program() for rows in (1, 2)}


@settings(max_examples=25)
@given(
    st.sampled_from((1, 2)), st.lists(st.integers(0, 12), min_size=2, max_size=4), st.integers(0, 2**24 - 1), st.data()
)
def test_verbs_round_trip_in_the_callers_coordinates_without_compiling_again(rows, sizes, bits, data):
    sizes = np.minimum(np.cumsum(sizes), 12)
    cu = np.unique([0, *(sizes if rows == 2 else []), 12, 24, *(12 + sizes[: rows - 1])])
    pads = np.array([bits >> i & 1 for i in range(S)], bool)
    sharder = pack(cu, Packed(CP), padding_mask=pads, rows=rows, padded_length=T)
    x = np.arange(2.0 * S, dtype=np.float32).reshape(rows, S // rows, 2)
    grad_shard, grad_gather, local, padded, back, again = RUN[rows](x, sharder)
    assert RUN[rows]._cache_size() == 1, "tables are data"
    flat = x.reshape(S, 2)
    wanted = np.full((T, 2), -1.0)
    wanted[sharder.places[~pads]] = flat[~pads]
    for rank in range(CP):
        np.testing.assert_array_equal(local[rank, 0], wanted[sharder.indices(rank)])
        np.testing.assert_array_equal(padded[rank, 0], wanted)
        np.testing.assert_array_equal(back[rank], np.where(pads[:, None], -2.0, flat).reshape(x.shape))
        np.testing.assert_array_equal(again[rank], local[rank])

    weights = 1 + np.arange(2.0 * S).reshape(S, 2)
    np.testing.assert_array_equal(grad_shard.sum(0).reshape(S, 2), weights * ~pads[:, None])
    source = sharder.sources()[sharder.indices(np.arange(CP))]
    wanted = np.where((source < 0)[..., None], 0, CP * weights[source])  # the sum over the consumers
    np.testing.assert_array_equal(grad_gather[:, 0], wanted)


def test_where_both_lengths_are_the_same_the_callers_is_meant():
    """Two pads dropped and two added: 8 tokens become 8."""
    pads = np.array([0, 0, 0, 1, 1, 0, 0, 0], bool)
    sharder = pack([0, 4, 8], Packed(2), padding_mask=pads)
    assert sharder.length == sharder.padded_length == 8
    out = on_ranks(2, lambda x: sharder.gather(sharder.shard(x, fill=-1), trim=False)[None], jnp.arange(8)[None])
    np.testing.assert_array_equal(out[0, 0], [0, 1, 2, -1, 5, 6, 7, -1])


def test_a_flat_tensor_without_rows_comes_back_flat():
    sharder = pack([0, 3, 5, 8], Packed(2), rows=1)

    def body(x):
        return sharder.gather(sharder.shard(x, fill=0, axis=0), axis=0, fill=0)[None]

    out = on_ranks(2, body, jnp.arange(8.0))
    np.testing.assert_array_equal(out, np.broadcast_to(np.arange(8.0), (2, 8)))


def test_f11_gather_of_packed_documents_sums_the_gradients_of_its_consumers():
    """A replicated loss sum_i (i + 1) x_i on every rank gives cp (i + 1) at tokens, and 0 at pads."""
    cp, sharder = 2, pack([0, 3, 4, 9], Packed(2))
    weights = jnp.arange(1.0, 10.0)

    def body(x):
        local = sharder.shard(x, fill=9.0, axis=0)
        return jax.grad(lambda local: jnp.sum(weights * sharder.gather(local, axis=0, fill=0)))(local)[None]

    grads = np.asarray(on_ranks(cp, body, jnp.ones(9)))
    for rank in range(cp):
        source = sharder.sources()[sharder.indices(rank)]
        np.testing.assert_array_equal(grads[rank], np.where(source >= 0, cp * (source + 1.0), 0.0))


@pytest.mark.parametrize("rows", [1, 2])
def test_u1_gradient_of_a_replicated_input_is_the_dense_one(rows):
    """Dropped pads get none."""
    pads = np.arange(12) % 5 == 4
    sharder = pack([0, 6, 7, 12], Packed(4), padding_mask=pads, rows=rows)
    weights = jnp.linspace(0.5, 2.0, 12).reshape(rows, -1)

    def loss(x):
        def body(x):
            parts = sharder.shard(x * x, fill=0) * sharder.shard(weights, fill=0)
            return jax.lax.psum(jnp.sum(parts), "cp")

        return jax.shard_map(body, mesh=mesh_of(4), in_specs=P(), out_specs=P(), axis_names={"cp"})(x)

    x = jnp.linspace(-1.0, 1.0, 12).reshape(rows, -1)
    wanted = 2 * x * weights * ~pads.reshape(rows, -1)
    np.testing.assert_allclose(jax.jit(jax.grad(loss))(x), wanted, rtol=1e-6)


def test_a_table_closed_over_by_shard_map_is_data_too():
    """As the train step does: the sharder is an argument of jit, and the body of shard_map closes over it."""
    traces = []

    @jax.jit
    def run(x, sharder):
        def body(x):
            traces.append(1)
            return sharder.take_local(x), sharder.positions()

        specs = (P(None, "cp"), P("cp"))
        return jax.shard_map(body, mesh=mesh_of(2), in_specs=P(), out_specs=specs, axis_names={"cp"})(x)

    for lengths in ([8, 8], [4, 12], [16]):
        sharder = pack(boundaries(lengths), Packed(2))
        local, positions = run(jnp.arange(16.0)[None], sharder)
        np.testing.assert_array_equal(positions, sharder.table.ravel())
        np.testing.assert_array_equal(local[0], sharder.table.ravel())
    assert len(traces) == 1


def test_the_sharders_of_microbatches_stack_and_scan():
    """Batches of one shape and different documents are one loop."""
    sharders = [pack(boundaries(lengths), Packed(2)) for lengths in ([8, 8], [4, 12], [16])]
    stacked = jax.tree.map(lambda *leaves: np.stack(leaves), *sharders)
    x = np.arange(48.0, dtype=np.float32).reshape(3, 1, 16)

    def body(x, stacked):
        return jax.lax.scan(lambda carry, one: (carry, one[1].shard(one[0], fill=0)), 0, (x, stacked))[1]

    specs = {"in_specs": P(), "out_specs": P(None, None, "cp")}
    out = jax.jit(jax.shard_map(body, mesh=mesh_of(2), axis_names={"cp"}, **specs))(x, stacked)
    for number, sharder in enumerate(sharders):
        np.testing.assert_array_equal(out[number, 0], x[number, 0, sharder.table.ravel()])
    with pytest.raises(ValueError, match="several that were stacked"):
        jax.tree.map(lambda leaf: leaf[None], stacked).indices(0)


def two_packed_rows() -> tuple[dict[str, np.ndarray], dict[str, np.ndarray], Sharder]:
    """Four rows of documents with pads, and the batch that is made of them, with two rows of one length."""
    ids = np.stack([np.repeat([1, 2, 0], lengths) for lengths in ((7, 4, 1), (12, 0, 0), (1, 2, 9), (2, 5, 5))])
    tokens = np.arange(1, 49).reshape(4, 12)
    given = {"input_ids": tokens, "document_ids": ids, "position_ids": np.stack([tokens, 2 * tokens])}
    given |= {"attention_mask": (ids > 0).astype(int), "pixels": np.ones((4, 3))}
    return given, *make_batch(given, Packed(2), streams={"pixels": Stream(None)}, packed_rows=2)


@pytest.mark.quick
def test_packed_rows_are_what_each_is_by_itself():
    given, batch, sharder = two_packed_rows()
    assert sharder.by_row and batch["input_ids"].shape == (2, sharder.padded_length)
    np.testing.assert_array_equal(batch["pixels"], given["pixels"])
    lengths = []
    for row in range(2):
        own = {name: value[..., 2 * row : 2 * row + 2, :] for name, value in given.items()}
        streams, length = {"pixels": Stream(None)}, sharder.padded_length
        lengths.append(make_batch(own, Packed(2), streams=streams)[1].padded_length)
        alone, one = make_batch(own, Packed(2), streams=streams, padded_length=length)
        for name in alone.keys() - {"pixels"}:
            np.testing.assert_array_equal(batch[name][..., row : row + 1, :], alone[name], err_msg=name)
        assert (sharder.length, sharder.rows) == (one.length, one.rows)
        for rank in (0, np.arange(2)):
            np.testing.assert_array_equal(sharder.indices(rank)[row], one.indices(rank))
        np.testing.assert_array_equal(sharder.inverse()[row], one.inverse())
        np.testing.assert_array_equal(sharder.sources()[row], one.sources())
        np.testing.assert_array_equal(sharder.contiguous().sources()[row], one.sources())
    assert lengths[0] != lengths[1] and max(lengths) == sharder.padded_length


def test_packed_rows_move_as_each_does_by_itself():
    """Values there and back, and the gradients that arrive at embeddings; sharders are data, features may follow."""
    given, batch, sharder = two_packed_rows()
    x = np.stack([given["input_ids"], -given["input_ids"]], -1).astype(np.float32)
    weights = np.cos(np.arange(2 * sharder.padded_length * 2, dtype=np.float32)).reshape(2, -1, 2)

    def body(x, weights, full, sharder):
        local = sharder.shard(x, fill=0)
        back, whole = sharder.gather(local, fill=0), sharder.gather(local, trim=False)
        grad = jax.grad(lambda full: (sharder.take_local(full) * sharder.take_local(weights)).sum())
        grad = jax.lax.psum(grad(jax.lax.pcast(full, "cp", to="varying")), "cp")
        return local, back[None], whole[None], grad, sharder.positions()

    specs = (P(None, "cp"), P("cp"), P("cp"), P(), P(None, "cp"))
    local, back, whole, grad, positions = on_ranks(
        2, body, x, weights, np.zeros_like(weights), sharder, out_specs=specs
    )
    np.testing.assert_array_equal(grad, weights)
    for rank in range(2):
        np.testing.assert_array_equal(back[rank], np.where(given["attention_mask"][..., None], x, 0))
        np.testing.assert_array_equal(whole[rank, ..., 0], batch["input_ids"])
    np.testing.assert_array_equal(positions, sharder.table.reshape(2, -1))
    wanted = np.take_along_axis(batch["input_ids"], positions, axis=1)
    np.testing.assert_array_equal(local, np.stack([wanted, -wanted], -1))
    with pytest.raises(ValueError, match="one for each row of the batch"):
        sharder.take_local(weights[:1])
    with pytest.raises(ValueError, match="one for each row of the batch"):
        sharder.take_local(weights[0], axis=0)


@pytest.mark.parametrize(
    ("layout", "count", "more"), [(Packed(2), 3, {}), (Zigzag(2), 2, {}), (Packed(2), 2, {"cu_seqlens": [0, 8]})]
)
def test_packed_rows_that_cannot_be_made(layout, count, more):
    with pytest.raises(ValueError, match="it needs the layout Packed, a multiple of that many rows"):
        make_batch({"input_ids": np.ones((2, 4), int), **more}, layout, packed_rows=count)


def test_concrete_ranks_of_a_table_are_checked():
    sharder = pack([0, 8], Packed(2))
    on_device = jax.tree.map(jnp.asarray, sharder)
    np.testing.assert_array_equal(sharder.indices(1), [2, 3, 4, 5])
    np.testing.assert_array_equal(on_device.indices(np.array([[1]])), [[[2, 3, 4, 5]]])
    np.testing.assert_array_equal(on_device.inverse(), sharder.inverse())
    for each in (sharder, on_device):
        with pytest.raises(ValueError, match="0 to 1"):
            each.indices(2)


def test_the_map_of_a_layout_that_depends_on_the_batch_is_asked_of_the_sharder():
    with pytest.raises(ValueError, match=r"sharder\.indices"):
        Packed(2).indices(8, 0)
    with pytest.raises(ValueError, match="make_batch, pack or dispatch"):
        make_sharder(8, Packed(2))


@given(packings(), st.integers(0, 130))
def test_i6_every_other_length_raises(case, given_length):
    sharder, _, _ = case
    assert_every_other_length_raises(sharder, np.zeros((1, given_length)))


def test_values_of_pads_must_be_said():
    sharder = pack([0, 5, 8], Packed(2), rows=1)
    with pytest.raises(ValueError, match=r"shard .* fill="):
        sharder.shard(np.zeros((1, 8)))
    with pytest.raises(ValueError, match=r"gather .* fill="):
        sharder.gather(np.zeros((1, sharder.local_length)))
    two_rows = pack([0, 4, 8], Packed(2), rows=2)
    with pytest.raises(ValueError, match=r"2 rows of 4"):
        two_rows.shard(np.zeros((3, 4)), fill=0)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: pack([1, 4], Packed(2)), "start at 0"),
        (lambda: pack([0, 4.5], Packed(2)), "cu_seqlens has dtype float64"),
        (lambda: pack([0, 4, 3], Packed(2)), "never descend"),
        (lambda: pack([0], Packed(2)), "documents"),
        (lambda: pack([[0, 1]], Packed(2)), "documents"),
        (lambda: pack([0, 0], Packed(2)), "must be 1"),
        (lambda: pack([0, 4], Packed(2), padding_mask=np.zeros(5)), "holds 5 tokens"),
        (lambda: pack([0, 3, 8], Packed(2), rows=2), "document of its own"),
        (lambda: pack([0, 4, 7], Packed(2), rows=2), "equally long"),
        (lambda: pack([0, 5], Packed(2), padded_length=4), "at least 8"),
        (lambda: pack([0, 5], Packed(2), padded_length=10), "multiple of 4"),
    ],
)
def test_bad_packings_raise_one_sentence(make, message):
    with pytest.raises(ValueError, match=message) as error:
        make()
    assert "\n" not in str(error.value)


# make_batch


def test_packed_rows_become_one_row_of_documents_padded_one_by_one():
    """Rows [5, 3 pads] and [2 + 6]: three documents of 5, 2 and 6 tokens, for cp = 2 padded to 8, 4 and 8."""
    ids = np.arange(1, 17).reshape(2, 8)
    mask = np.array([[1] * 5 + [0] * 3, [1] * 8])
    extra = {"groups": ids * 2, "feature": np.stack([ids, -ids], -1), "pixels": np.ones((3, 2))}
    batch, sharder = make_batch(
        {
            "input_ids": ids,
            "labels": np.where(mask, ids + 100, IGNORE),
            "attention_mask": mask,
            "position_ids": np.stack([ids, ids * 10]),
            "cu_seqlens": [0, 8, 10, 16],
            **extra,
        },
        Packed(2),
        pad_id=99,
        streams={"groups": Stream(1, -1), "feature": Stream(1, 0.5), "pixels": Stream(None)},
    )
    assert (sharder.rows, sharder.length, sharder.padded_length) == (2, 16, 20)
    token = [1, 2, 3, 4, 5, 0, 0, 0, 9, 10, 0, 0, 11, 12, 13, 14, 15, 16, 0, 0]
    there = np.array(token) > 0
    for name, fill, values in (
        ("input_ids", 99, np.array(token)),
        ("labels", IGNORE, np.array(token) + 100),
        ("groups", -1, np.array(token) * 2),
        ("padding_mask", True, ~there),
        ("document_ids", 0, np.repeat([1, 2, 3], [8, 4, 8])),
    ):
        np.testing.assert_array_equal(batch[name], np.where(there, values, fill)[None], err_msg=name)
    assert batch["feature"].shape == (1, 20, 2) and batch["pixels"].shape == (3, 2)
    np.testing.assert_array_equal(batch["feature"][0, :, 1], np.where(there, -np.array(token), 0.5).astype(int))
    continued = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 11, 12, 13, 14, 15, 16, 17, 18]
    np.testing.assert_array_equal(batch["position_ids"][0, 0], continued)
    np.testing.assert_array_equal(batch["position_ids"][1, 0, 5:8], [51, 52, 53])
    np.testing.assert_array_equal(sharder.places, [0, 1, 2, 3, 4, -1, -1, -1, 8, 9, 12, 13, 14, 15, 16, 17])


def test_positions_count_inside_each_document_by_default():
    batch, _ = make_batch({"input_ids": np.ones((1, 7), int), "cu_seqlens": [0, 3, 4, 7]}, Packed(2))
    np.testing.assert_array_equal(batch["position_ids"], [[*range(4)] * 3])
    np.testing.assert_array_equal(batch["document_ids"], [[1, 1, 1, 0, 2, 0, 0, 0, 3, 3, 3, 0]])


@given(st.integers(1, 3), st.integers(1, 12), st.integers(1, 4), st.data())
def test_document_ids_of_rows_pack_as_their_boundaries_do(rows, length, cp, data):
    cuts = [sorted(data.draw(st.sets(st.integers(1, length)))) for _ in range(rows)]
    ids = np.stack([np.searchsorted(cut, np.arange(length), side="right") + 1 for cut in cuts])
    pads = np.array(data.draw(st.lists(st.booleans(), min_size=ids.size, max_size=ids.size))).reshape(ids.shape)
    tokens = np.arange(ids.size).reshape(ids.shape)
    by_ids, one = make_batch({"input_ids": tokens, "document_ids": np.where(pads, 0, ids)}, Packed(cp))
    row = np.arange(rows)[:, None]
    cu = np.flatnonzero(np.diff((row * length * 2 + ids).ravel(), prepend=-1, append=-1))
    by_cu, other = make_batch({"input_ids": tokens, "padding_mask": pads, "cu_seqlens": cu}, Packed(cp))
    np.testing.assert_array_equal(one.places, other.places)
    np.testing.assert_array_equal(one.table, other.table)
    for name in ("input_ids", "padding_mask", "position_ids"):
        np.testing.assert_array_equal(by_ids[name], by_cu[name], err_msg=name)
    same = [np.equal.outer(b["document_ids"][0], b["document_ids"][0]) for b in (by_ids, by_cu)]
    np.testing.assert_array_equal(*same)


def test_r16_documents_of_different_rows_get_different_numbers():
    """Flattened rows whose ids both start at 1 would otherwise attend to each other."""
    batch, _ = make_batch({"input_ids": np.ones((2, 4), int), "document_ids": [[1, 1, 2, 2], [1, 1, 1, 1]]}, Packed(1))
    parts = batch["document_ids"][0]
    assert len(set(parts[parts > 0])) == 3


def test_r16_packed_positions_that_restart_without_documents_are_refused():
    with pytest.raises(ValueError, match="restart at row 0, token 3"):
        make_batch({"input_ids": np.ones((1, 5), int), "position_ids": [[0, 1, 2, 0, 1]]}, Packed(2))


def test_other_packed_batches_that_are_refused():
    ids = np.ones((2, 4), int)
    with pytest.raises(ValueError, match="after another one"):
        make_batch({"input_ids": ids, "document_ids": [[1, 2, 1, 1], [1, 1, 1, 1]]}, Packed(2))
    with pytest.raises(ValueError, match="give one of them"):
        make_batch({"input_ids": ids, "document_ids": ids, "cu_seqlens": [0, 4, 8]}, Packed(2))
    for cu_seqlens in ([0, 4], [], [[0, 4, 9]]):
        with pytest.raises(ValueError, match="must end at 8"):
            make_batch({"input_ids": ids, "cu_seqlens": cu_seqlens}, Packed(2))
    with pytest.raises(ValueError, match=r"'document_ids' has shape \(1, 4\)"):
        make_batch({"input_ids": ids, "document_ids": ids[:1]}, Packed(2))
    with pytest.raises(ValueError, match="2 rows"):
        stream = {"streams": {"x": Stream(0, 0)}}
        make_batch({"input_ids": ids, "x": np.ones(4), "cu_seqlens": [0, 4, 8]}, Packed(2), **stream)


def test_r31_documents_shorter_than_two_cp():
    """Documents of 1, 2, 3, 38 and 0 tokens over 8 ranks: tokens stay whole, and whose mask they are."""
    lengths = [1, 2, 3, 0, 38]
    tokens = np.arange(1, 45)[None]
    batch, sharder = make_batch({"input_ids": tokens, "cu_seqlens": boundaries(lengths)}, Packed(8))
    assert sharder.padded_length == 16 + 16 + 16 + 48
    by_rank = batch["input_ids"][0, sharder.indices(np.arange(8))].ravel()
    np.testing.assert_array_equal(by_rank[sharder.inverse()][sharder.places], tokens[0])
    np.testing.assert_array_equal(batch["document_ids"][0][sharder.places], np.repeat([1, 2, 3, 5], [1, 2, 3, 38]))


def test_document_ids_that_number_no_document_are_pads():
    batch, sharder = make_batch({"input_ids": np.ones((1, 4), int), "document_ids": [[-1, 3, 3, 0]]}, Packed(1))
    np.testing.assert_array_equal(sharder.places, [-1, 0, 1, -1])
    assert sharder.padded_length == 2 and (batch["document_ids"] > 0).all()


def test_all_pads_stay_finite():
    batch, sharder = make_batch(
        {"input_ids": np.ones((2, 3), int), "padding_mask": np.ones((2, 3), bool)}, Packed(2), pad_id=7
    )
    assert sharder.padded_length == 4 and (sharder.places == -1).all()
    assert batch["padding_mask"].all() and (batch["document_ids"] == 0).all() and (batch["input_ids"] == 7).all()


@pytest.mark.parametrize("layout", [Contiguous(4, multiple=8), Zigzag(2, multiple=8), Striped(2, multiple=8)])
def test_r33_documents_repadded_to_a_compression_ratio_under_every_layout(layout):
    """No window of 8 tokens holds two documents."""
    batch, sharder = make_batch({"input_ids": np.ones((1, 30), int), "cu_seqlens": [0, 3, 20, 30]}, layout)
    assert sharder.table is None and sharder.padded_length == layout.pad_length(8 + 24 + 16)
    windows = batch["document_ids"].reshape(-1, 8)
    assert all(len(set(window) - {0}) <= 1 for window in windows)
    np.testing.assert_array_equal(batch["document_ids"][0][sharder.places], np.repeat([1, 2, 3], [3, 17, 10]))


@given(st.integers(1, 40), st.integers(1, 4), st.integers(1, 4))
def test_r33_packed_padding_is_exactly_cp_times_lcm_of_two_and_the_multiple(length, cp, multiple):
    unit = cp * np.lcm(2, multiple)
    assert pack([0, length], Packed(cp, multiple)).padded_length == -(-length // unit) * unit


def test_r42_features_of_visual_tokens_stay_with_their_tokens():
    """Documents of 3 and 5 tokens over 2 ranks, zigzag in each: features scattered before the shard follow it.

    And the gradient of each comes back to it.
    """
    visual = np.array([[0, 1, 1, 1, 0, 0, 1, 1]], bool)
    features = np.zeros((1, 8, 2))
    features[visual] = np.arange(1, 11).reshape(5, 2)
    batch, sharder = make_batch(
        {
            "input_ids": np.where(visual, 50, np.arange(8)),
            "cu_seqlens": [0, 3, 8],
            "visual": visual,
            "features": features,
        },
        Packed(2),
        streams={"visual": Stream(1, False), "features": Stream(1, 0)},
    )
    for rank in range(2):
        mine = sharder.indices(rank)
        local_visual, local_features = batch["visual"][0, mine], batch["features"][0, mine]
        order = np.cumsum(batch["visual"][0])[mine][local_visual] - 1  # which visual token of the whole batch
        np.testing.assert_array_equal(local_features[local_visual], features[visual][order])
        assert (local_features[~local_visual] == 0).all()

    weights = jnp.arange(1.0, 1 + 2 * sharder.padded_length).reshape(1, -1, 2)

    def loss(tower):
        def body(tower):
            full = jnp.zeros_like(weights).at[batch["visual"]].set(tower)
            return jax.lax.psum((sharder.take_local(full) * sharder.take_local(weights)).sum(), "cp")

        return jax.shard_map(body, mesh=mesh_of(2), in_specs=P(), out_specs=P(), axis_names={"cp"})(tower)

    gradient = jax.jit(jax.grad(loss))(jnp.ones((5, 2)))
    np.testing.assert_array_equal(gradient, weights[batch["visual"]])


def attend(q, k, v, mask):
    """Dense attention [S, H, D] of four query heads to two key heads in float64; no key gives 0."""
    scores = np.einsum("qhgd,khd->hgqk", q.reshape(len(q), 2, 2, 3), k)
    weights = np.exp(scores) * mask
    weights /= np.maximum(weights.sum(-1, keepdims=True), 1e-300)
    return np.einsum("hgqk,khd->qhgd", weights, v).reshape(len(q), 4, 5)


@pytest.mark.parametrize("cp", [2, 4])
@pytest.mark.parametrize("rows", [[[7, 11, 1, 14]], [[5, 3], [1, 9, 2], [12]]])
def test_u4_r17_shards_of_the_mask_are_the_mask_and_each_row_attends_as_if_alone(cp, rows):
    """Causal documents, computed rank by rank from the packed streams alone; rows end in pads of different number."""
    rng, length = np.random.default_rng(0), max(map(sum, rows))
    ids = np.stack([np.repeat([*range(1, len(row) + 1), 0], [*row, length - sum(row)]) for row in rows])
    shapes = {"q": (4, 3), "k": (2, 3), "v": (2, 5)}
    tokens = {name: rng.normal(size=(len(rows), length, *shape)) for name, shape in shapes.items()}
    streams = {name: Stream(1, 0) for name in tokens}
    batch, sharder = make_batch(
        {"input_ids": np.ones_like(ids), "document_ids": ids, **tokens}, Packed(cp), streams=streams
    )

    outputs, masks = [], []
    everyone = sharder.indices(np.arange(cp)).ravel()  # keys as an all-gather brings them
    documents = batch["document_ids"][0]
    for rank in range(cp):
        mine = sharder.indices(rank)
        mask = (documents[mine][:, None] == documents[everyone]) & (documents[everyone] > 0)
        mask &= mine[:, None] >= everyone
        masks.append(mask)
        outputs.append(attend(batch["q"][0, mine], batch["k"][0, everyone], batch["v"][0, everyone], mask))
    back = sharder.inverse()[sharder.places]
    mask = np.concatenate(masks)[back][:, back].reshape(*ids.shape, *ids.shape)
    output = np.concatenate(outputs)[back].reshape(*ids.shape, 4, 5)
    causal = np.arange(length)[:, None] >= np.arange(length)
    for row, numbers in enumerate(ids):
        there = numbers > 0
        alone = (numbers[:, None] == numbers) & causal & there
        dense = attend(*(x[row] for x in tokens.values()), alone)
        np.testing.assert_allclose(output[row, there], dense[there], rtol=1e-12)
        np.testing.assert_array_equal(mask[row][there][:, row][:, there], alone[there][:, there])
        others = np.delete(mask[row][there], row, axis=1)[:, np.delete(ids, row, axis=0) > 0]
        assert not others.any()


def test_u1_ranks_without_a_label_and_a_document_shorter_than_cp():
    """Documents of 20 and 36 tokens over 128 ranks: 256 slots each; local losses sum to the dense one in float64."""
    rng, labels = np.random.default_rng(0), np.arange(1, 57)[None]
    losses = rng.normal(size=(1, 56))
    batch, sharder = make_batch(
        {"input_ids": labels, "labels": labels, "losses": losses, "cu_seqlens": [0, 20, 56]},
        Packed(128),
        streams={"losses": Stream(1, np.nan)},
    )
    assert sharder.padded_length == 512 and (batch["labels"] != IGNORE).sum() == 56
    local_labels, local = (batch[name][0, sharder.indices(np.arange(128))] for name in ("labels", "losses"))
    sums = np.where(local_labels != IGNORE, local, 0).sum(1)
    assert ((local_labels != IGNORE).sum(1) == 0).sum() == 128 - 36
    np.testing.assert_allclose(sums.sum(), losses.sum(), rtol=1e-12)


def test_a_recurrence_refuses_a_layout_of_unequal_runs():
    sharder = pack([0, 8], Packed(2))
    with pytest.raises(ValueError, match="runs"):
        causal_conv(jnp.zeros((1, 4, 2)), jnp.zeros((2, 3)), sharder=sharder)


def test_sharders_of_closed_forms_stay_static_and_hashable():
    sharder = dataclasses.replace(pack([0, 3], Zigzag(2)), places=None, length=4)
    assert jax.tree.leaves(sharder) == [] and isinstance(hash(sharder), int)
