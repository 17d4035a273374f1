"""Facts about the compiled programs: what travels between ranks and how much memory a rank needs."""

import functools
import re

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from cpjax.recurrence import causal_conv, gated_delta_rule, ssd
from cpjax.shard import layout_from_name, make_sharder
from tests.recurrence.common import delta_inputs, mesh_of, ssd_inputs

KEYS, VALUES = 6, 10


def compiled(name, cp, length, dp=1):
    """Forward and backward of convolution and delta rule on local tokens, sharded over cp (and the batch over dp)."""
    sharder = make_sharder(length, layout_from_name(name, cp))

    def body(tokens, weight, ids):
        q, k, v, log_decay, beta = tokens
        v = causal_conv(v[:, :, 0], weight, sharder=sharder, document_ids=ids)[:, :, None]
        return gated_delta_rule(q, k, v, log_decay, beta, sharder=sharder, document_ids=ids)

    def loss(tokens, weight, ids):
        if cp == 1:
            return body(tokens, weight, ids).sum()
        spec = P(None, "cp")
        run = jax.shard_map(body, mesh=mesh_of(cp, dp), in_specs=(spec, P(), spec), out_specs=spec, axis_names={"cp"})
        return run(tokens, weight, ids).sum()

    tokens = delta_inputs(0, 2, length, heads=1, keys=KEYS, values=VALUES, dtype=jnp.float32)
    ids = jnp.ones((2, length), jnp.int32)
    if cp > 1:
        where = NamedSharding(mesh_of(cp, dp), P("dp", "cp"))
        tokens, ids = jax.device_put((tokens, ids), where)
    return jax.jit(jax.grad(loss, (0, 1))).lower(tokens, jnp.ones((VALUES, 4)), ids).compile()


def compiled_ssd(name, cp, length):
    """Forward and backward of Mamba2's recurrence on local tokens of one document, one head."""
    sharder = make_sharder(length, layout_from_name(name, cp))
    tokens, (a, _) = ssd_inputs(0, 1, length, heads=1, groups=1, width=VALUES, states=KEYS, dtype=jnp.float32)
    spec = P(None, "cp")

    @functools.partial(jax.shard_map, mesh=mesh_of(cp), in_specs=(spec, P()), out_specs=spec, axis_names={"cp"})
    def run(tokens, a):
        x, dt, b, c = tokens
        return ssd(x, dt, a, b, c, sharder=sharder)

    def loss(tokens, a):
        return run(tokens, a).sum()

    tokens = jax.device_put(tokens, NamedSharding(mesh_of(cp), spec))
    return jax.jit(jax.grad(loss, (0, 1))).lower(tokens, a).compile()


def collectives(program):
    """Sorted `kind shape` of every collective in the program."""
    kinds = "all-gather|all-reduce|reduce-scatter|collective-permute|all-to-all"
    return sorted(
        f"{kind} {re.sub('{[^}]*}', '', shape)}"
        for shape, kind in re.findall(rf"= (\(?[a-z].*?) ({kinds})(?:-start)?\(", program.as_text())
    )


@pytest.mark.parametrize("name", ["contiguous", "zigzag"])
def test_what_travels_does_not_depend_on_the_length(name):
    """Runs of 64 and of 128 tokens: the same messages to the byte."""
    runs = layout_from_name(name, 4).runs
    short, long = (compiled(name, 4, length * 4 * runs) for length in (64, 128))
    kinds = {message.split()[0] for message in collectives(short)}
    assert kinds == {"collective-permute", "all-reduce"}  # the latter for the gradient of the replicated weight
    assert collectives(short) == collectives(long)


@pytest.mark.parametrize("name", ["contiguous", "zigzag"])
def test_the_state_and_one_number_of_mamba2_travel(name):
    """Runs of 64 and of 128 tokens: the same messages, none larger than [N P + 1] a head."""
    cp, runs = 4, layout_from_name(name, 4).runs
    short, long = (collectives(compiled_ssd(name, cp, length * cp * runs)) for length in (64, 128))
    assert short == long
    moved = [m for m in short if not m.startswith("all-reduce")]
    sizes = {m.split()[-1] for m in moved}
    assert all(m.startswith("collective-permute") for m in moved)
    assert sizes <= {f"f32[1,1,1,{n}]" for n in (KEYS * VALUES, KEYS * VALUES + 1)}, sizes


def test_batch_rows_stay_where_they_are():
    """With the two rows over dp, every message between cp ranks holds one row, and none holds both."""
    whole, split = (collectives(compiled("zigzag", 2, 256, dp)) for dp in (1, 2))
    moved = [[m for m in messages if m.startswith("collective-permute")] for messages in (whole, split)]
    assert moved[0] and [m.replace("[2,", "[1,") for m in moved[0]] == moved[1]
    assert not any(m.startswith("all-gather") for m in split)


def test_one_rank_carries_no_transition_matrix():
    """The [Dk, Dv + Dk] state (offset beside transition) exists only where there is another run to hand it to."""
    wide = f",{KEYS},{KEYS + VALUES}]"
    assert wide not in compiled("identity", 1, 128).as_text()
    assert wide in compiled("zigzag", 2, 128).as_text()


@pytest.mark.parametrize(("program", "length"), [(compiled, 4096), (compiled_ssd, 16384)])
def test_memory_falls_with_the_ranks_and_is_flat_at_fixed_local_length(program, length):
    """Mamba2 of one head is measured on a longer sequence: the sums over spans of a chunk hold a constant megabyte."""
    temp = {
        (cp, times): program("zigzag", cp, times * length).memory_analysis().temp_size_in_bytes
        for cp, times in ((2, 1), (8, 1), (8, 4))
    }
    assert temp[8, 1] < 0.35 * temp[2, 1]
    assert temp[8, 4] < 1.1 * temp[2, 1]
