"""From one order to another: values, gradients, and what travels (census 1b, mamba reordering; D6)."""

import dataclasses
import itertools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

from cpjax.recurrence import causal_conv
from cpjax.shard import (
    Contiguous,
    Dispatched,
    Packed,
    Sharder,
    Stream,
    Zigzag,
    convert,
    dispatch,
    layout_from_name,
    make_batch,
    make_sharder,
    pack,
)
from tests.shard.common import mesh_of

NAMES = ("contiguous", "zigzag", "striped", "packed", "dispatched")


def sharder_of(name: str, cp: int, length: int) -> Sharder:
    """Over `length` tokens, a multiple of 2 cp: packed in three documents, dispatched for a causal mask."""
    if name == "packed":
        third = length // (6 * cp) * 2 * cp
        return pack([0, third, 2 * third, length], Packed(cp))
    if name == "dispatched":
        return dispatch([[0, length, 0, length, 1]], length, Dispatched(cp, chunk_size=2))[0]
    return make_sharder(length, layout_from_name(name, cp))


def run(x, source: Sharder, target: Sharder, axis: int = 1):
    """`convert` as a function of tensors whose `axis` holds the ranks' tokens one after the other."""
    spec = P(*[None] * axis, "cp")
    body = lambda x: convert(x, source, target, axis=axis)  # noqa: E731
    return jax.shard_map(body, mesh=mesh_of(source.cp), in_specs=spec, out_specs=spec, axis_names={"cp"})(x)


def order(sharder: Sharder) -> np.ndarray:
    return sharder.indices(np.arange(sharder.cp)).ravel()


@pytest.mark.parametrize(
    ("source", "target", "cp"),
    [
        *((a, b, 4) for a, b in itertools.permutations(("contiguous", "striped", "packed", "dispatched"), 2)),
        *(("zigzag", other, 4) for other in NAMES),
        *((a, b, cp) for a, b in (("zigzag", "contiguous"), ("contiguous", "zigzag")) for cp in (2, 3, 8)),
        *((a, b, cp) for a, b in (("packed", "contiguous"), ("striped", "packed")) for cp in (2, 3, 8)),
    ],
)
def test_values_and_gradients_move_to_the_other_order(source, target, cp):
    """The gradient is the cotangent brought back: what convert does the other way round."""
    a, b = (sharder_of(name, cp, 12 * cp) for name in (source, target))
    x = np.arange(12 * cp * 3, dtype=np.float32).reshape(1, -1, 3)
    g = np.cos(x)

    def both(x, g, a, b):
        out, pull = jax.vjp(lambda x: run(x, a, b), x)
        return out, *pull(g)

    out, back = jax.jit(both)(x[:, order(a)], g[:, order(b)], a, b)
    np.testing.assert_array_equal(out, x[:, order(b)])
    np.testing.assert_array_equal(back, g[:, order(a)])


CONVERT = {axis: jax.jit(lambda x, a, b, axis=axis: run(x, a, b, axis)) for axis in (0, 2)}


@settings(max_examples=40)
@given(st.lists(st.integers(0, 7), max_size=5), st.randoms(use_true_random=False), st.sampled_from((0, 2)))
def test_any_tables_are_data_of_one_program(lengths, random, axis):
    """From packed to any table; the worst sends all tokens of a rank to one other. L is no multiple of cp."""
    cp, padded = 3, 42
    cu = np.minimum(np.cumsum([0, *lengths]), 7)
    a = pack(np.append(cu, 7), Packed(cp), padded_length=padded)
    tokens = list(range(padded))
    random.shuffle(tokens)
    table = np.sort(np.reshape(tokens, (cp, -1)), axis=1).astype(np.int32)
    b = Sharder(Dispatched(cp, chunk_size=1), padded, padded, table=table)
    worst = Sharder(Dispatched(cp, chunk_size=1), padded, padded, table=np.roll(a.table, 1, axis=0))
    x = np.arange(padded, dtype=np.int32)
    x = x if axis == 0 else np.stack([x, -x])[None]
    for source, target in ((a, b), (a, worst), (b, worst)):
        got = CONVERT[axis](np.take(x, order(source), axis), source, target)
        np.testing.assert_array_equal(got, np.take(x, order(target), axis))
    assert CONVERT[axis]._cache_size() <= 2, "one for each pair of layouts"


def messages(source: Sharder, target: Sharder, *, dp: int = 1, gradient: bool = False):
    """`kind shape` of every collective of a rank; the tensor has 2 rows and 5 features."""
    devices = jax.devices()[: dp * source.cp]
    mesh = jax.make_mesh((dp, source.cp), ("dp", "cp"), devices=devices, axis_types=(jax.sharding.AxisType.Auto,) * 2)

    def forward(x, a, b):
        spec = P(None, "cp")
        return jax.shard_map(lambda x: convert(x, a, b), mesh=mesh, in_specs=spec, out_specs=spec, axis_names={"cp"})(x)

    def both(x, g, a, b):
        return jax.vjp(lambda x: forward(x, a, b), x)[1](g)[0]

    where = jax.NamedSharding(mesh, P("dp", "cp"))
    x = jax.ShapeDtypeStruct((2, source.padded_length, 5), jnp.float32, sharding=where)
    lowered = jax.jit(both).lower(x, x, source, target) if gradient else jax.jit(forward).lower(x, source, target)
    kinds = "all-gather|all-reduce|reduce-scatter|collective-permute|all-to-all"
    found = re.findall(rf"= (\(?[a-z].*?) ({kinds})(?:-start)?\(", lowered.compile().as_text())
    return sorted(f"{kind} {re.sub('{[^}]*}', '', shape)}" for shape, kind in found)


@pytest.mark.quick
@pytest.mark.parametrize("gradient", [False, True])
@pytest.mark.parametrize("cp", [2, 4, 8])
def test_zigzag_to_contiguous_sends_each_token_once(cp, gradient):
    """Two permutes of L / 2 tokens (4 B each of 2 rows and 5 features), in the backward too; L stays, so do they."""
    zigzag = make_sharder(16 * cp, Zigzag(cp))
    for source, target in ((zigzag, zigzag.contiguous()), (zigzag.contiguous(), zigzag)):
        got = messages(source, target, gradient=gradient)
        assert got == ["collective-permute f32[2,8,5]"] * 2


@pytest.mark.parametrize("gradient", [False, True])
def test_tables_send_less_than_twice_the_tokens_and_nothing_is_gathered(gradient):
    """At L = 64: (cp - 1) (L / cp + L / cp + cp - 1) tokens leave a rank, where a gather brings it (cp - 1) L."""
    for cp in (2, 4, 8):
        packed = sharder_of("packed", cp, 64 * cp)
        got = messages(packed, packed.contiguous(), gradient=gradient)
        assert {message.split()[0] for message in got} == {"collective-permute"}
        tokens = [math.prod(map(int, m.split("[")[1][:-1].split(","))) // 10 for m in got if "f32" in m]
        assert sum(tokens) == (cp - 1) * (2 * (64 // cp) + cp - 1) < 2 * 64 + cp**2
        destinations = [int(m.split("[")[1][:-1]) for m in got if "s32" in m]
        assert sum(destinations) == sum(tokens)


def rows_of(cp: int, length: int) -> Sharder:
    """Two rows of two and three documents, with a map for each."""
    ids = np.repeat([[1, 2, 2], [1, 2, 3]], length // 3, axis=1)
    sharder = make_batch({"input_ids": ids, "document_ids": ids}, Packed(cp), packed_rows=2)[1]
    return dataclasses.replace(sharder, places=None)


def test_each_row_moves_by_its_own_map():
    source = rows_of(4, 48)
    target = dataclasses.replace(source, table=np.roll(source.table, 1, axis=(0, 1)))
    length = source.padded_length
    x = np.arange(2 * length * 3, dtype=np.float32).reshape(2, length, 3)

    def placed(sharder):
        index = np.broadcast_to(sharder.indices(np.arange(4)).reshape(-1, length), (2, length))
        return np.take_along_axis(x, index[..., None], 1)

    move = jax.jit(run)
    for a, b in ((source, target), (source, source.contiguous()), (source.contiguous(), target)):
        np.testing.assert_array_equal(move(placed(a), a, b), placed(b))


@pytest.mark.parametrize("name", ["zigzag", "packed", "packed by row"])
def test_rows_stay_on_their_dp_ranks(name):
    """Nothing but permutes of one row each."""
    source = rows_of(4, 48) if name == "packed by row" else sharder_of(name, 4, 64)
    got = messages(source, source.contiguous(), dp=2, gradient=True)
    assert all(m.startswith(("collective-permute f32[1,", "collective-permute s32[")) for m in got)


def test_cp_1_is_free_and_the_same_layout_too():
    x = jnp.ones((1, 8))
    one = pack([0, 8], Packed(1))
    assert convert(x, one, one.contiguous()) is x
    x = jnp.ones((1, 4))
    assert convert(x, make_sharder(8, Zigzag(2)), make_sharder(7, Zigzag(2))) is x


def test_a_recurrent_layer_takes_packed_documents_in_contiguous_order():
    """Convolution of kernel 4 over documents of 5, 1, 9 and 2 tokens: each as if it were alone."""
    lengths, cp = [5, 1, 9, 2], 4
    rng = np.random.default_rng(0)
    x, weight = rng.normal(size=(1, 17, 3)), rng.normal(size=(3, 4))
    batch, sharder = make_batch(
        {"input_ids": np.ones((1, 17), int), "cu_seqlens": np.cumsum([0, *lengths]), "x": x},
        Packed(cp),
        streams={"x": Stream(1, 0)},
    )
    contiguous = sharder.contiguous()

    def body(x, ids):
        x, ids = (convert(sharder.take_local(v), sharder, contiguous) for v in (x, ids))
        return convert(causal_conv(x, jnp.asarray(weight), sharder=contiguous, document_ids=ids), contiguous, sharder)

    run = jax.shard_map(body, mesh=mesh_of(cp), in_specs=P(), out_specs=P(None, "cp"), axis_names={"cp"})
    got = np.asarray(jax.jit(run)(batch["x"], batch["document_ids"]))[0, sharder.inverse()][sharder.places]
    documents = np.split(x[0], np.cumsum(lengths)[:-1])
    alone = [sum(np.pad(d, ((3, 0), (0, 0)))[j : j + len(d)] * weight[:, j] for j in range(4)) for d in documents]
    np.testing.assert_allclose(got, np.concatenate(alone), rtol=1e-5, atol=1e-6)


def test_a_global_scan_between_two_conversions_equals_the_dense_one():
    """What a layer that wants global order does: a running sum over the sequence, under a packed layout."""
    sharder = sharder_of("packed", 4, 48)
    contiguous = sharder.contiguous()

    def body(x):
        x = convert(x, sharder, contiguous)
        x = jnp.cumsum(x, axis=1)
        totals = jax.lax.all_gather(x[:, -1], "cp")
        x += jnp.where(jnp.arange(4)[:, None] < sharder.rank(), totals, 0).sum(0)
        return convert(x, contiguous, sharder)

    x = np.arange(48, dtype=np.float32)[None]
    step = jax.jit(
        jax.shard_map(body, mesh=mesh_of(4), in_specs=P(None, "cp"), out_specs=P(None, "cp"), axis_names={"cp"})
    )
    np.testing.assert_array_equal(step(x[:, order(sharder)]), np.cumsum(x, 1)[:, order(sharder)])


@pytest.mark.parametrize(
    ("target", "message"),
    [
        (make_sharder(16, Contiguous(2)), "padded_length 8 and 16"),
        (make_sharder(8, Contiguous(4)), "cp 2 and 4"),
        (make_sharder(8, Contiguous(2), "sp"), "axis_name cp and sp"),
        (make_sharder(8, Contiguous(2)), "needs 4"),
    ],
)
def test_i6_sharders_that_do_not_match_raise_one_sentence(target, message):
    with pytest.raises(ValueError, match=message) as error:
        convert(jnp.ones((1, 8)), make_sharder(8, Zigzag(2)), target)
    assert "\n" not in str(error.value)
