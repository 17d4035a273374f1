"""Small stacks of layers of several kinds: the acceptance tests of NeMo Automodel that need whole models (F3 to F7 of
this project's census), and losses of packs.

Each stack is written once. It runs on the ranks, and on whole sequences with the mixing of tokens by its definition.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

from cpjax.attention import Mask, attention, dense_attention
from cpjax.loss import cross_entropy
from cpjax.recurrence import causal_conv, gated_delta_rule, ssd
from cpjax.sequence import shift
from cpjax.shard import IGNORE, Packed, Sharder, convert, layout_from_name, make_sharder, pack
from tests.attention.common import documents_of, mesh_of
from tests.recurrence import reference

PACKED = documents_of([7, 11, 14], length=32)


class Ops(NamedTuple):
    """What mixes tokens. Recurrences are entered with tokens in an order of runs, and left with them as they were."""

    attend: Callable
    enter: Callable
    conv: Callable
    delta: Callable
    ssd: Callable
    leave: Callable
    shift: Callable
    loss: Callable


def on_ranks(sharder: Sharder, ids, transport: str) -> Ops:
    ids = None if ids is None else sharder.shard(ids, fill=0)
    runs = sharder if sharder.layout.runs else sharder.contiguous()
    where = {"sharder": runs, "document_ids": None if ids is None else convert(ids, sharder, runs)}

    def loss(hidden, head, labels):
        valid = jax.lax.psum((labels != IGNORE).sum(), "cp")
        return jax.lax.psum(cross_entropy(hidden, head, labels, valid_tokens=valid)[0], "cp")

    return Ops(
        functools.partial(attention, sharder=sharder, mask=Mask(document_ids=ids), transport=transport),
        lambda x: convert(x, sharder, runs),
        functools.partial(causal_conv, **where),
        functools.partial(gated_delta_rule, chunk_size=4, **where),
        functools.partial(ssd, chunk_size=4, **where),
        lambda x: convert(x, runs, sharder),
        lambda x, depth, fill: shift(x, depth, sharder=sharder, fill=fill, document_ids=ids),
        loss,
    )


def on_one(ids) -> Ops:
    ids = None if ids is None else jnp.asarray(ids)

    def shift_by_definition(x, depth, fill):
        there = jnp.arange(x.shape[1]) + depth
        valid = there < x.shape[1]
        there = jnp.minimum(there, x.shape[1] - 1)
        valid = valid if ids is None else valid & (ids[:, there] == ids)
        return jnp.where(valid, jnp.asarray(x)[:, there], fill)

    def loss(hidden, head, labels):
        losses = -jnp.take_along_axis(jax.nn.log_softmax(hidden @ head), jnp.maximum(labels, 0)[..., None], -1)[..., 0]
        return jnp.where(labels == IGNORE, 0, losses).sum() / (labels != IGNORE).sum()

    return Ops(
        functools.partial(dense_attention, mask=Mask(document_ids=ids)),
        lambda x: x,
        lambda x, weight: reference.causal_conv(x, weight, ids),
        lambda *x: reference.gated_delta_rule(*x, ids),
        lambda x, dt, a, b, c, skip: reference.ssd(x, dt, b, c, a, skip, ids),
        lambda x: x,
        shift_by_definition,
        loss,
    )


def attention_layer(p, x, ops):
    q, k, v = (jnp.einsum("ble,ehd->blhd", x, p[name]) for name in "qkv")
    return x + jnp.einsum("blhd,hde->ble", ops.attend(q, k, v), p["o"])


def mamba_layer(p, x, ops):
    heads, groups = p["a_log"].size, 2
    inner = p["out"].shape[0]
    h = ops.enter(x)
    gate, mixed, dt = jnp.split(h @ p["into"], [inner, p["into"].shape[1] - heads], axis=-1)
    mixed = jax.nn.silu(ops.conv(mixed, p["conv"]))
    v, b, c = (z.reshape(*z.shape[:2], n, -1) for z, n in zip(
        jnp.split(mixed, [inner, (inner + mixed.shape[2]) // 2], axis=-1), (heads, groups, groups), strict=True
    ))  # fmt: skip
    y = ops.ssd(v, jax.nn.softplus(dt + p["dt_bias"]), -jnp.exp(p["a_log"]), b, c, skip=p["skip"])
    return x + ops.leave((y.reshape(gate.shape) * jax.nn.silu(gate)) @ p["out"])


def delta_layer(p, x, ops):
    """Qwen3.5's linear attention."""
    heads, keys = p["a_log"].size, p["qk"].shape[1] // p["a_log"].size // 2
    h = ops.enter(x)
    mixed = jax.nn.silu(ops.conv(jnp.concatenate([h @ p["qk"], h @ p["v"]], -1), p["conv"]))
    q, k, v = (z.reshape(*z.shape[:2], heads, -1) for z in jnp.split(mixed, [heads * keys, 2 * heads * keys], axis=-1))
    q, k = (z / jnp.sqrt((z**2).sum(-1, keepdims=True) + 1e-6) for z in (q, k))
    log_decay = -jnp.exp(p["a_log"]) * jax.nn.softplus(h @ p["decay"] + p["dt_bias"])
    y = ops.delta(q, k, v, log_decay, jax.nn.sigmoid(h @ p["beta"]))
    return x + ops.leave((y.reshape(*h.shape[:2], -1) * jax.nn.silu(h @ p["gate"])) @ p["out"])


WIDTH = 6
SHAPES = {
    attention_layer: {"q": (WIDTH, 4, 4), "k": (WIDTH, 2, 4), "v": (WIDTH, 2, 3), "o": (4, 3, WIDTH)},
    mamba_layer: {
        "into": (WIDTH, 8 + 8 + 2 * 2 * 3 + 4), "conv": (8 + 2 * 2 * 3, 4), "dt_bias": (4,), "a_log": (4,),
        "skip": (4,), "out": (8, WIDTH),
    },
    delta_layer: {
        "qk": (WIDTH, 2 * 2 * 3), "v": (WIDTH, 2 * 4), "conv": (2 * 2 * 3 + 2 * 4, 4), "a_log": (2,), "dt_bias": (2,),
        "decay": (WIDTH, 2), "beta": (WIDTH, 2), "gate": (WIDTH, 2 * 4), "out": (2 * 4, WIDTH),
    },
}  # fmt: skip


def parameters(rng, layer):
    return {name: jnp.asarray(rng.normal(size=shape)) / 2 for name, shape in SHAPES[layer].items()}


def sharder_of(layout, cp, length, ids):
    if layout == "packed":
        return pack(np.cumsum([0, *np.bincount(ids[0])[1:]]), Packed(cp))
    return make_sharder(length, layout_from_name(layout, cp))


def in_the_callers_order(x, sharder):
    x = x[:, sharder.inverse()]
    return x[:, : sharder.length] if sharder.places is None else x[:, sharder.places]


def assert_close(got, wanted, tolerance):
    def check(x, y):
        np.testing.assert_allclose(x, y, rtol=0, atol=tolerance * np.abs(y).max())

    jax.tree.map(check, got, wanted)


def assert_stack_equals_one_device(stack, params, sharder, ids, transport="ring", tolerance=1e-11):
    """Output and the gradients of input and parameters of stack(params, x, ops) are those of the definitions."""
    rng = np.random.default_rng(1)
    x = jnp.asarray(rng.normal(size=(1, sharder.length, WIDTH)))

    def split(params, x):
        def body(params, x):
            return stack(params, sharder.shard(x, fill=0), on_ranks(sharder, ids, transport))

        run = jax.shard_map(body, mesh=mesh_of(sharder.cp), in_specs=P(), out_specs=P(None, "cp"), axis_names={"cp"})
        return in_the_callers_order(run(params, x), sharder)

    def results(function):
        def run(params, x):
            out, pull = jax.vjp(function, params, x)
            return out, pull(jnp.cos(jnp.arange(out.size, dtype=out.dtype)).reshape(out.shape))

        return jax.jit(run)(params, x)

    assert_close(results(split), results(lambda params, x: stack(params, x, on_one(ids))), tolerance)


@pytest.mark.parametrize(
    ("layout", "transport", "ids"), [("zigzag", "allgather", None), ("packed", "ring", PACKED)], ids=["rows", "packed"]
)
def test_f3_a_hybrid_of_mamba_and_attention(layout, transport, ids):
    """Logits, their input's and all parameters' gradients. The Mamba layer of a packed stream converts it to runs."""

    def stack(params, x, ops):
        return attention_layer(params[1], mamba_layer(params[0], x, ops), ops) @ params[2]

    rng = np.random.default_rng(0)
    with jax.enable_x64(True):
        params = [parameters(rng, layer) for layer in (mamba_layer, attention_layer)]
        params.append(jnp.asarray(rng.normal(size=(WIDTH, 9))))
        sharder = sharder_of(layout, 2, 30, ids)
        assert_stack_equals_one_device(stack, params, sharder, ids, transport)


def test_f6_linear_attention_zigzag():
    with jax.enable_x64(True):
        params = parameters(np.random.default_rng(0), delta_layer)
        assert_stack_equals_one_device(delta_layer, params, sharder_of("zigzag", 4, 30, None), None)


def test_f7_linear_attention_of_packed_documents():
    with jax.enable_x64(True):
        params = parameters(np.random.default_rng(0), delta_layer)
        assert_stack_equals_one_device(delta_layer, params, sharder_of("contiguous", 2, 32, PACKED), PACKED)


def mtp(params, tokens, labels, ops):
    """Hidden states and targets of the next token and of those after it, [B, L, depths + 1, ..], and the loss."""
    x = params["embed"][tokens]
    x = attention_layer(params["attention"], x, ops)
    hidden, targets = [x], [labels]
    for depth, p in enumerate(params["mtp"], 1):
        following = params["embed"][ops.shift(tokens, depth, 0)]
        x = attention_layer(p["layer"], jnp.concatenate([x, following], -1) @ p["join"], ops)
        hidden.append(x)
        targets.append(ops.shift(labels, depth, IGNORE))
    losses = [ops.loss(h, params["head"], t) for h, t in zip(hidden, targets, strict=True)]
    return jnp.stack(hidden, 2), jnp.stack(targets, 2), losses[0] + 0.3 * sum(losses[1:])


def assert_mtp_equals_one_device(sharder, ids, rows, depths, transport):
    rng, vocabulary = np.random.default_rng(0), 11
    tokens = rng.integers(1, vocabulary, (rows, sharder.length)).astype(np.int32)
    labels = np.asarray(on_one(ids).shift(tokens, 1, IGNORE))
    params = {
        "embed": jnp.asarray(rng.normal(size=(vocabulary, WIDTH))),
        "head": jnp.asarray(rng.normal(size=(WIDTH, vocabulary))),
        "attention": parameters(rng, attention_layer),
        "mtp": [
            {"join": jnp.asarray(rng.normal(size=(2 * WIDTH, WIDTH))) / 3, "layer": parameters(rng, attention_layer)}
            for _ in range(depths)
        ],
    }

    def split(params):
        def body(params):
            local = (sharder.shard(x, fill=fill) for x, fill in ((tokens, 0), (labels, IGNORE)))
            return mtp(params, *local, on_ranks(sharder, ids, transport))

        spec = P(None, "cp")
        run = jax.shard_map(
            body, mesh=mesh_of(sharder.cp), in_specs=P(), out_specs=(spec, spec, P()), axis_names={"cp"}
        )
        hidden, targets, loss = run(params)
        return loss, tuple(in_the_callers_order(x, sharder) for x in (hidden, targets))

    def whole(params):
        hidden, targets, loss = mtp(params, tokens, labels, on_one(ids))
        return loss, (hidden, targets)

    optimizer = optax.adamw(1e-2)

    def step(function):
        (loss, (hidden, targets)), grads = jax.value_and_grad(function, has_aux=True)(params)
        updates, _ = optimizer.update(grads, optimizer.init(params), params)
        return targets, (loss, hidden @ params["head"], hidden, grads), optax.apply_updates(params, updates)

    (targets, *got), (wanted_targets, *wanted) = (jax.jit(functools.partial(step, f))() for f in (split, whole))
    np.testing.assert_array_equal(targets, wanted_targets)
    assert_close(got[0], wanted[0], 1e-11)
    assert_close(got[1], wanted[1], 1e-9)  # the first step of Adam divides by the size of the gradient


def test_f4_multi_token_prediction_of_packed_documents():
    with jax.enable_x64(True):
        assert_mtp_equals_one_device(sharder_of("packed", 2, 32, PACKED), PACKED, rows=1, depths=2, transport="ring")


@pytest.mark.quick
def test_f5_multi_token_prediction_of_rows():
    with jax.enable_x64(True):
        assert_mtp_equals_one_device(sharder_of("zigzag", 2, 22, None), None, rows=2, depths=1, transport="allgather")


@pytest.mark.parametrize(("layout", "cp"), [("zigzag", 2), ("packed", 4)])
def test_r09_r16_the_loss_of_a_pack_is_that_of_its_documents(layout, cp):
    """Documents of 5, 3 and 8 tokens: 13 targets, and attention that stays inside."""
    rng, ids = np.random.default_rng(0), documents_of([5, 3, 8], length=16)
    tokens = rng.integers(0, 11, (1, 16)).astype(np.int32)
    sharder = sharder_of(layout, cp, 16, ids)

    def losses(embed, head, p, tokens, ops):
        targets = ops.shift(tokens, 1, IGNORE)
        return ops.loss(attention_layer(p, embed[tokens], ops), head, targets), targets

    with jax.enable_x64(True):
        weights = jnp.asarray(rng.normal(size=(11, WIDTH))), jnp.asarray(rng.normal(size=(WIDTH, 11)))
        weights = *weights, parameters(rng, attention_layer)

        def body(*weights):
            return losses(*weights, sharder.shard(tokens, fill=0), on_ranks(sharder, ids, "ring"))

        run = jax.shard_map(body, mesh=mesh_of(cp), in_specs=P(), out_specs=(P(), P(None, "cp")), axis_names={"cp"})
        loss, targets = jax.jit(run)(*weights)
        targets = np.asarray(in_the_callers_order(targets, sharder))[0]
        assert np.flatnonzero(targets == IGNORE).tolist() == [4, 7, 15]
        total = 0.0
        for number, length in ((1, 5), (2, 3), (3, 8)):
            alone = jax.jit(lambda *args: losses(*args, on_one(None))[0])(*weights, tokens[ids == number][None])
            total += (length - 1) * float(alone)
    np.testing.assert_allclose(loss, total / 13, rtol=1e-13)
