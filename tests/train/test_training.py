"""The training step: microbatches, precision, steps that are not finite, adapters, the moving average."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cpjax.shard import IGNORE
from cpjax.train.config import LoraConfig
from cpjax.train.lora import add_adapters
from cpjax.train.step import place_batch
from tests.jaxprs import equations

from . import small

SGD = {"name": "sgd", "momentum": 0.0}


def test_r04_microbatches_are_the_batch_even_where_one_has_no_label():
    """Four microbatches of one row, the third without a label, with cp 2, against one batch with fsdp 2: to 1e-12."""
    whole = small.Run(dtype="float64", fsdp=2, **SGD)
    parts = small.Run(dtype="float64", cp=2, accumulate=4, **SGD)
    labels = whole.batch["labels"] != IGNORE
    assert [int(n) for n in labels.sum(1)][1:3] == [1, 0] and labels.sum() > 8
    start = jax.tree.map(np.array, whole.state.params)
    metrics, wanted = parts(), whole()
    for name in wanted:
        assert metrics[name] == pytest.approx(wanted[name], rel=1e-7), name  # they are float32
    for name, new in jax.tree.map(np.array, whole.state.params).items():
        moved = np.abs(new - start[name]).max()
        assert moved > 0, name
        np.testing.assert_allclose(parts.state.params[name], new, rtol=0, atol=1e-12 * max(moved, 1), err_msg=name)
    assert wanted["valid_tokens"] == labels.sum()


def poisoned(run):
    """The batch with a token in it whose embedding is infinite."""
    ids = np.array(run.batch["input_ids"])
    ids[0, 2] = 23
    return {**run.batch, "input_ids": ids}


def test_steps_that_are_not_finite_change_nothing():
    """And are counted; float16 halves its scale each time. Then training goes on, with float32 parameters."""
    model = small.make_model()
    model.embed_tokens[...] = model.embed_tokens[...].at[23].set(jnp.inf)
    run = small.Run(cp=2, compute="float16", ema=0.75, clip=1.0, weight_decay=0.1, model=model)
    first = run()
    assert first["nonfinite"] == 0 and first["loss_scale"] == 2**15
    kept = [jax.tree.map(np.array, part) for part in (run.state.params, run.state.opt_state, run.state.average)]
    for count in (1, 2):
        metrics = run(poisoned(run))
        assert metrics["nonfinite"] == count and not np.isfinite(metrics["loss"] + metrics["grad_norm"])
    after = [run.state.params, run.state.opt_state, run.state.average]
    jax.tree.map(np.testing.assert_array_equal, after, kept)
    assert int(run.state.step) == 3
    metrics = run()
    assert metrics["nonfinite"] == 0 and metrics["loss_scale"] == 2**13 and metrics["loss"] < first["loss"]
    for name, array in run.state.params.items():
        assert array.dtype == run.state.average[name].dtype == jnp.float32
        if name != "embed_tokens":
            assert not np.array_equal(array, kept[0][name]), name
            wanted = 0.75 * kept[2][name] + 0.25 * np.array(array)
            np.testing.assert_allclose(run.state.average[name], wanted, rtol=1e-6, atol=1e-7)
            np.testing.assert_array_equal(run.state.best[name], run.state.average[name])


def traced(compute=None, adapters=False, freeze=small.FREEZE):
    """The jaxpr of a step that is not compiled, and its state."""
    model = small.make_model()
    if adapters:
        add_adapters(model, LoraConfig(rank=2, targets=["q_proj"]))
    run = small.Uncompiled(cp=2, model=model, compute=compute, freeze=() if adapters else freeze)
    return jax.make_jaxpr(run.step)(run.state, place_batch(run.batch, run.mesh), run.sharder), run.state


def test_bfloat16_multiplies_in_bfloat16_and_sums_gradients_in_float32():
    (jaxpr, _), (plain, _) = traced("bfloat16"), traced()
    dots = [e for e in equations(jaxpr.jaxpr) if e.primitive.name == "dot_general"]
    low = [e for e in dots if all(v.aval.dtype == jnp.bfloat16 for v in e.invars)]
    assert len(dots) == sum(e.primitive.name == "dot_general" for e in equations(plain.jaxpr))
    assert len(low) > 30 and all(
        # what is left has the softmax's float32 probabilities or the loss' logits in it
        e in low or any(v.aval.dtype == jnp.float32 for v in e.invars)
        for e in dots
    )
    sums = [e for e in equations(jaxpr.jaxpr) if e.primitive.name.startswith("psum")]
    assert sums and all(v.aval.dtype in (jnp.float32, jnp.int32) for e in sums for v in e.invars)


def test_frozen_parameters_take_no_memory():
    """No gradient of their shape is computed, summed or kept: not of what is frozen, nor of what adapters adapt."""
    jaxpr, state = traced(adapters=True)
    assert state.params and all(".adapter." in name for name in state.params)
    kept = {leaf.shape for leaf in jax.tree.leaves(state.opt_state)}
    own = {array.shape for array in state.params.values()}
    assert kept == own | {()}
    sums = [e for e in equations(jaxpr.jaxpr) if e.primitive.name.startswith("psum")]
    shapes = {v.aval.shape for e in sums for v in e.invars}
    assert own <= shapes and not shapes & ({a.shape for a in state.frozen.values()} - own)
