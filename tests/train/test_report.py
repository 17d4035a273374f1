"""What a run tells about its model."""

import jax.numpy as jnp
import pytest
from flax import nnx

from cpjax.mesh import make_mesh
from cpjax.models.common.layers import Buffer
from cpjax.train.lora import weight_table
from cpjax.train.report import by_part, relative_change
from cpjax.train.step import merge_model, split_model
from tests.models.gemma4_cases import golden_model


def test_parts_move_as_their_parameters_do_although_bounds_are_infinite():
    model = golden_model("gemma4_e")
    for path, variable in nnx.iter_graph(model):
        if isinstance(variable, Buffer) and path[-1] in ("input_max", "output_min"):
            variable.set_value(jnp.full_like(variable[...], jnp.inf if "max" in path[-1] else -jnp.inf))
    names = {weight.path: weight.names for weight in weight_table(model)}
    graphdef, params, buffers = split_model(model)
    assert any(not jnp.isfinite(array).all() for array in by_part(buffers, names)["vision tower"].values())
    tower = {path: 1.5 * array for path, array in by_part(params, names)["vision tower"].items()}
    changes = relative_change(model, merge_model(graphdef, params | tower, buffers), names, make_mesh())
    assert changes.pop("vision tower") == pytest.approx(0.5, rel=1e-6) and set(changes.values()) == {0}
