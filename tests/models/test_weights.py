"""One line of a table against tensors on disk: stacks of stacks, and parts of a tensor."""

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from cpjax.mesh import make_mesh
from cpjax.models.common import checkpoint
from cpjax.models.common.checkpoint import Weight

LAYERS, EXPERTS, IN, OUT = 2, 4, 3, 8


class Gated(nnx.Module):
    def __init__(self):
        values = np.arange(2 * LAYERS * EXPERTS * IN * OUT, dtype=np.float32)
        gate, up = values.reshape(2, LAYERS, EXPERTS, IN, OUT)
        self.gate, self.up = nnx.Param(jnp.asarray(gate)), nnx.Param(jnp.asarray(up))


NAMES = [[f"layers.{layer}.experts.{expert}" for expert in range(EXPERTS)] for layer in range(LAYERS)]
TABLES = {
    "a tensor for each expert": [
        Weight(path, tuple(f"{name}.{path}" for names in NAMES for name in names), 2, True) for path in ("gate", "up")
    ],
    "both in one, all experts in one": [
        Weight(path, tuple(f"layers.{layer}.gate_up" for layer in range(LAYERS)), 1, True, part=(i, 2))
        for i, path in enumerate(("gate", "up"))
    ],
}


@pytest.mark.quick
@pytest.mark.parametrize("name", TABLES)
def test_there_and_back(name, tmp_path):
    model, table = Gated(), TABLES[name]
    held = dict(checkpoint.named_tensors(table, model))
    gate, up = np.asarray(model.gate[...]), np.asarray(model.up[...])
    if "both" in name:
        assert held.keys() == {"layers.0.gate_up", "layers.1.gate_up"}
        expected = np.concatenate([gate[1].swapaxes(1, 2), up[1].swapaxes(1, 2)], axis=1)
        np.testing.assert_array_equal(held["layers.1.gate_up"], expected)
    else:
        assert len(held) == 2 * LAYERS * EXPERTS
        np.testing.assert_array_equal(held["layers.1.experts.2.up"], up[1, 2].T)
    checkpoint.save(table, model, {}, tmp_path / "out", 10**9)
    abstract = nnx.eval_shape(Gated)
    for mesh in (None, make_mesh(fsdp=4), make_mesh(fsdp=2, cp=2)):
        again = checkpoint.load(abstract, [table], tmp_path / "out", mesh=mesh, dtype=None, dropped="none")
        np.testing.assert_array_equal(again.gate[...], gate)
        np.testing.assert_array_equal(again.up[...], up)
    assert len(make_mesh(fsdp=4).devices.flat) == len(again.up[...].sharding.device_set) == 4
