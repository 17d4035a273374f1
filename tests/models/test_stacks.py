"""Stacks of a pattern of layers: what is applied, gathered and computed anew, layer by layer."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

from cpjax.mesh import make_mesh
from cpjax.models.common.layers import Linear, scan_layers, stack_layers
from cpjax.models.common.sharding import assemble
from tests.jaxprs import equations

GROUPS, WIDTH = 3, 8


class Pattern(nnx.Module):
    """Two layers, which write to the hidden state in two ways."""

    def __init__(self, rngs):
        self.slots = nnx.List([Linear(WIDTH, WIDTH, dtype=jnp.float32, rngs=rngs) for _ in range(2)])

    def __call__(self, x, factor, *, slot):
        y = factor * jnp.tanh(self.slots[slot](x))
        return y if slot else x + y


def stacked():
    return stack_layers(Pattern, GROUPS, nnx.Rngs(0))


@pytest.mark.quick
def test_layers_follow_each_other_pattern_after_pattern():
    layers, x = stacked(), np.random.default_rng(0).normal(size=(1, 2, WIDTH)).astype(np.float32)
    found = scan_layers(layers, jnp.asarray(x), 0.5)
    first, second = (np.asarray(layer.kernel[...]) for layer in layers.slots)
    for group in range(GROUPS):
        x = x + 0.5 * np.tanh(x @ first[group])
        x = 0.5 * np.tanh(x @ second[group])
    np.testing.assert_allclose(found, x, atol=1e-5)


@pytest.mark.parametrize(("remat", "units"), [("layer", 2), ("dots", 2), ("none", 0)])
def test_the_backward_pass_gathers_one_layer_and_computes_it_anew(remat, units):
    """Not all of a pattern at once, which may be the experts of several layers."""
    graph, params = nnx.split(stacked())
    names = [f"layers.slots.{slot}.kernel" for slot in range(2)]

    def loss(params, x):
        model = nnx.Module()
        model.layers = nnx.merge(graph, params)
        model.layers.parts = ()
        assemble(model, dict.fromkeys(names, 1))
        return scan_layers(model.layers, x, 0.5, remat=remat).sum()

    specs = jax.tree.map(lambda _: P(None, "cp"), params)
    local = jax.shard_map(jax.grad(loss), mesh=make_mesh(cp=2), in_specs=(specs, P()), out_specs=specs,
                          axis_names={"cp"})  # fmt: skip
    backward = jax.make_jaxpr(local)(params, jnp.ones((1, 2, WIDTH)))
    anew = [eqn for eqn in equations(backward.jaxpr) if eqn.primitive.name in ("checkpoint", "remat2", "remat")]
    assert len(anew) == units
    for eqn in anew:
        gathers = [e for e in equations(eqn.params["jaxpr"]) if e.primitive.name.startswith("all_gather")]
        assert len(gathers) == 1 and gathers[0].outvars[0].aval.shape == (WIDTH, WIDTH)
