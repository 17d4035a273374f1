"""Heads of multi-token prediction in the training step: their loss, and the gradients of both, are the dense ones."""

import dataclasses

import jax
import numpy as np
import optax
from flax import nnx

from cpjax.mesh import make_mesh
from cpjax.models.step3p7 import STREAMS
from cpjax.shard import layout_from_name, make_batch
from cpjax.train.ahead import ahead_weight, freeze_patterns
from cpjax.train.config import OptimizerConfig
from cpjax.train.step import init_state, make_train_step, place_batch, split_model
from tests.models.step3p7_cases import WEIGHT, dense, documents, fresh_model, host_batch


def test_a_step_takes_the_dense_losses_and_gradients():
    """Plain gradient descent at a rate of 1 shows the gradient of every parameter; the routers' biases stay."""
    with jax.enable_x64(True):
        mesh, optimizer = make_mesh(fsdp=2, cp=2), optax.sgd(1.0)
        graphdef, params, frozen = split_model(nnx.merge(*fresh_model()))
        before = jax.tree.map(np.asarray, (params, frozen))
        batch, sharder = make_batch(host_batch(documents()), layout_from_name("zigzag", 2), streams=STREAMS)
        step = make_train_step(graphdef, optimizer, optax.constant_schedule(1.0), mesh, ahead=WEIGHT)
        state = init_state(params, frozen, optimizer, mesh)
        state, metrics = step(state, place_batch(batch, mesh), sharder)
        expected = dense()
    found = metrics["loss"], WEIGHT * metrics["loss_ahead"]
    np.testing.assert_allclose(found, [expected["losses"].sum(), expected["losses"][1]], rtol=1e-6)
    assert list(frozen) == ["layers.0.slots.0.mlp.router_bias"]
    np.testing.assert_array_equal(state.frozen[next(iter(frozen))], before[1][next(iter(frozen))])
    for name, value in before[0].items():
        path = tuple(int(part) if part.isdigit() else part for part in name.split("."))
        grad = expected["".join(f"[{part!r}]" for part in path) + ".value"]
        assert np.abs(value - np.asarray(state.params[name]) - grad).max() < 1e-11 * np.abs(grad).max(), name


def test_heads_whose_loss_does_not_count_are_frozen():
    paths, some = ["mtp.fc.kernel", "norm.weight"], OptimizerConfig(freeze=["visual"], ahead=0.2)
    none = dataclasses.replace(some, ahead=0.0)
    assert ahead_weight(some, paths) == 0.2 and freeze_patterns(some, paths) == ["visual"]
    assert ahead_weight(none, paths) == 0 and freeze_patterns(none, paths) == ["visual", r"^mtp\."]
    assert ahead_weight(some, paths[1:]) == 0 and freeze_patterns(none, paths[1:]) == ["visual"]
