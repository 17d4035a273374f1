"""What the transports send: kinds, counts and bytes in the compiled program, and the choice among them."""

import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from cpjax.attention import Mask, attention, plan_transport
from cpjax.attention.plan import Heads
from cpjax.shard import layout_from_name, make_sharder
from tests.attention.common import Form, documents_of, function, mesh_of

SIZES = {"f64": 8, "f32": 4, "s32": 4, "bf16": 2, "f16": 2, "pred": 1, "s64": 8}


def collectives(text, cp, members=1):
    """{kind: [count, bytes sent by each rank]} of a compiled program, loops counted as often as they run."""
    computations, name = {}, None
    for line in text.splitlines():
        start = re.match(r"(ENTRY )?%?([\w.-]+) \(.*\{$", line)
        if start:
            name = "ENTRY" if start[1] else start[2]
            computations[name] = []
        elif name is not None:
            computations[name].append(line)
    found = {}

    def walk(name, times):
        for line in computations[name]:
            match = re.search(
                r"= (.*?) (all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter|while)\(", line
            )
            for called in re.findall(r"(?:to_apply|calls)=%?([\w.-]+)", line):
                if not match:
                    walk(called, times)
            if not match:
                continue
            if match[2] == "while":
                trips = re.search(r'known_trip_count":\{"n":"(\d+)"', line)
                # Unknown are those over tiles, and hops that are one step, which is kept from XLA.
                walk(re.search(r"body=%?([\w.-]+)", line)[1], times * int(trips[1] if trips else 1))
                continue
            size = sum(
                SIZES[kind] * math.prod(int(n) for n in shape.split(",") if n)
                for kind, shape in re.findall(r"(\w+)\[([\d,]*)\]", match[1])
            )
            part = {"all-gather": 1 - 1 / cp, "reduce-scatter": cp - 1, "all-to-all": 1 - 1 / members}
            entry = found.setdefault(match[2], [0, 0])
            entry[0] += times
            entry[1] += times * size * part.get(match[2], 1)

    walk("ENTRY", 1)
    return found


def compiled(layout, length, transport, form, heads, kv_heads, streams=(), shared=False, width=8, v_width=16):
    """The plan, and what the programs of the forward and of the backward send."""
    cp = layout.cp
    sharder = make_sharder(length, layout)
    sharding = NamedSharding(mesh_of(cp), P(None, "cp"))

    def array(*shape, dtype=jnp.float32):
        return jax.ShapeDtypeStruct((2, length, *shape), dtype, sharding=sharding)

    q, k, v = array(heads, width), array(kv_heads, width), None if shared else array(kv_heads, v_width)
    g = array(heads, width if shared else v_width)
    kinds = {"document_ids": jnp.int32, "vision_group_ids": jnp.int32, "padding_mask": bool, "prefix": bool}
    masks = {name: array(dtype=kinds[name]) for name in streams}
    local = [None if x is None else jax.ShapeDtypeStruct((2, length // cp, *x.shape[2:]), x.dtype) for x in (q, k, v)]
    plan = plan_transport(*local, sharder=sharder, mask=form.mask(None, masks), transport=transport)
    run = function(transport, form)
    # Apart, as with rematerialisation: together, the compiler may find that both send the same.
    forward = jax.jit(lambda operands, masks: jax.vjp(lambda x: run(x, masks, None, sharder), operands))
    lowered = forward.lower((q, k, v, None), masks)
    pull = jax.eval_shape(forward, (q, k, v, None), masks)[1]
    backward = jax.jit(lambda pull, g: pull(g)).lower(pull, g)
    return plan, *(collectives(x.compile().as_text() or "", cp, plan.members) for x in (lowered, backward))


def total(found):
    return sum(size for _, size in found.values())


def permutes(count):
    return {"collective-permute": count}


SWAPS, GATHER = {"all-to-all": 3}, {"all-gather": 1}


@pytest.mark.parametrize(
    ("layout", "cp", "transport", "form", "heads", "streams", "counts"),
    [
        ("zigzag", 4, "ring", {}, (4, 2), (), (permutes(3), permutes(7))),
        ("zigzag", 8, "ring", {}, (2, 2), ("document_ids", "prefix"), (permutes(7) | GATHER, permutes(15))),
        ("contiguous", 8, "ring", {"window": (16, None)}, (2, 1), (), (permutes(1), permutes(2))),
        ("contiguous", 8, "ring", {"window": (17, None)}, (2, 1), (), (permutes(2), permutes(5))),
        ("contiguous", 8, "ring", {"causal": False, "window": (9, 20)}, (2, 1), (), (permutes(3), permutes(5))),
        ("zigzag", 8, "ring", {"window": (8, None)}, (2, 1), (), (permutes(2), permutes(3))),
        ("contiguous", 8, "ring", {"longest_document": 17}, (2, 1), ("document_ids", "vision_group_ids"),
         (permutes(2) | GATHER, permutes(3))),
        ("zigzag", 4, "allgather", {}, (4, 2), ("padding_mask",), ({"all-gather": 2}, {"reduce-scatter": 1})),
        ("contiguous", 4, "ulysses", {}, (8, 4), (), (SWAPS, SWAPS)),
        ("zigzag", 8, "ulysses", {}, (8, 2), ("document_ids", "vision_group_ids"), (SWAPS | GATHER, SWAPS)),
        ("zigzag", 4, "ulysses", {}, (12, 6), (), (SWAPS, SWAPS)),
        ("zigzag", 8, "ring_ulysses:2", {}, (4, 2), (), (SWAPS | permutes(3), SWAPS | permutes(7))),
        ("contiguous", 8, "ring_ulysses:4", {"window": (64, None)}, (4, 2), (),
         (SWAPS | permutes(1), SWAPS | permutes(2))),
    ],
)  # fmt: skip
def test_the_bytes_sent_are_the_planned_ones(layout, cp, transport, form, heads, streams, counts):
    shared = form.get("window") == (16, None)  # of the values that are the keys, one is enough
    plan, forward, backward = compiled(
        layout_from_name(layout, cp), 16 * cp, transport, Form(**form), *heads, streams, shared=shared
    )
    assert [{kind: count for kind, (count, _) in found.items()} for found in (forward, backward)] == list(counts)
    assert total(forward) == plan.forward_bytes
    assert total(backward) == plan.backward_bytes


@pytest.mark.quick
@pytest.mark.parametrize(
    ("layout", "cp", "window", "hops"),
    [("contiguous", 8, 1, (1, 0)), ("contiguous", 8, 64, (1, 0)), ("contiguous", 8, 65, (2, 0)),
     ("contiguous", 8, 10**9, (7, 0)), ("zigzag", 8, 32, (1, 1)), ("zigzag", 8, 33, (2, 2)), ("striped", 8, 9, (7, 0)),
     ("zigzag", 2, 9, (1, 0)), ("contiguous", 1, 9, (0, 0))],
)  # fmt: skip
def test_a_window_bounds_the_hops(layout, cp, window, hops):
    """ceil(window / L) from rank to rank; under zigzag the chunks of half that length are neighbours both ways."""
    x = jax.ShapeDtypeStruct((1, 64, 2, 8), jnp.float32)
    sharder = make_sharder(64 * cp, layout_from_name(layout if cp > 1 else "identity", cp))
    assert plan_transport(x, x, x, sharder=sharder, mask=Mask(window=(window, None)), transport="ring").hops == hops
    stream = jnp.zeros((1, 64), jnp.int32)
    for crossing in ({"vision_group_ids": stream}, {"prefix": stream > 0}):
        mask = Mask(window=(window, None), **crossing)
        assert plan_transport(x, x, x, sharder=sharder, mask=mask, transport="ring").hops == (cp - 1, 0)


def chosen(cp, length, heads, kv_heads, layout="zigzag", mask=Mask(), width=128):  # noqa: B008
    sharder = make_sharder(length, layout_from_name(layout, cp))
    q, k = (jax.ShapeDtypeStruct((1, length // cp, n, width), jnp.bfloat16) for n in (heads, kv_heads))
    return plan_transport(q, k, k, sharder=sharder, mask=mask)


def test_auto_hides_a_long_ring_and_exchanges_heads_in_a_short_one():
    assert chosen(8, 1 << 17, 32, 8).transport == "ring"  # computation hides every hop
    assert chosen(8, 1 << 9, 32, 32).transport == "ulysses"  # fewer bytes
    assert chosen(8, 1 << 12, 20, 20).transport == "ring_ulysses"  # 20 heads do not divide by 8
    assert chosen(8, 1 << 17, 32, 32, "contiguous").transport == "ulysses"  # equal work for all
    assert chosen(8, 1 << 17, 32, 8, "contiguous", Mask(window=(1023, None))).hops == (1, 0)


def test_the_choice_is_explained_in_one_line():
    assert chosen(8, 1 << 12, 20, 20).reason == (
        "auto chose ring_ulysses over 4 ranks: each rank sends 12.5 MiB forward and 22.5 MiB backward in 1 hop; "
        "cost 50.8 MiB ring_ulysses:4, 79 MiB ring_ulysses:2, 106 MiB allgather, 146 MiB ring"
    )


@given(st.integers(1, 8), st.integers(1, 6), st.integers(1, 16))
def test_every_member_gets_the_key_heads_of_its_query_heads(kv_heads, group, members):
    heads = kv_heads * group
    assume(heads % members == 0)
    plan, own = Heads(heads, kv_heads, members), heads // members
    kept = plan.sent if plan.used is None else np.take_along_axis(plan.sent, plan.used, 1)
    for member in range(members):
        needed = np.arange(member * own, (member + 1) * own) // group
        np.testing.assert_array_equal(np.repeat(kept[member], own // kept.shape[1]), needed)
    assert plan.sent.shape[1] == max(len({h // group for h in range(m * own, m * own + own)}) for m in range(members))


@pytest.mark.parametrize("transport", ["ring", "allgather", "ulysses", "ring_ulysses:2"])
def test_no_transport_gathers_the_rows_of_data_parallel_ranks(transport):
    """dp is automatic: XLA would gather the batch over it before an all-gather or all-to-all over cp."""
    cp = 4 if transport == "ring_ulysses:2" else 2
    mesh = jax.make_mesh(
        (2, cp), ("dp", "cp"), axis_types=(jax.sharding.AxisType.Auto,) * 2, devices=jax.devices()[: 2 * cp]
    )
    sharder = make_sharder(64, layout_from_name("zigzag", cp))
    order = sharder.layout.indices(64, np.arange(cp)).ravel()
    documents = documents_of(*[[20, 30], [64], [5, 5], [40]], length=64)[:, order]
    rng = np.random.default_rng(0)
    operands = [rng.normal(size=(4, 64, heads, 8)).astype(np.float32) for heads in (4, 2, 2)]

    def loss(q, k, v, ids):
        def body(q, k, v, ids):
            return attention(q, k, v, sharder=sharder, mask=Mask(document_ids=ids), transport=transport)

        spec = P(None, "cp")
        out = jax.shard_map(body, mesh=mesh, in_specs=spec, out_specs=spec, axis_names={"cp"})(q, k, v, ids)
        return (out**2).sum()

    def run(spec):
        placed = [jax.device_put(x, NamedSharding(mesh, spec)) for x in (*operands, documents)]
        executable = jax.jit(jax.value_and_grad(loss, (0, 1, 2))).lower(*placed).compile()
        return executable.as_text() or "", executable(*placed)

    text, sharded = run(P("dp", "cp"))
    _, replicated = run(P(None, "cp"))
    for x, y in zip(jax.tree.leaves(sharded), jax.tree.leaves(replicated), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5)
    moved = re.findall(r"= (.*?) (all-gather|all-to-all|all-reduce|reduce-scatter)\(", text)
    assert {kind for _, kind in moved} <= {"all-reduce"}  # of the loss, and of the rows' tiles with work
    assert not [shape for shape, _ in moved if re.search(r"f32\[\d", shape)]
