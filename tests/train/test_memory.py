"""What one device holds and needs of a training step, read off the compiled program."""

import dataclasses
import re

import jax
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from cpjax.mesh import make_mesh
from cpjax.models.common.sharding import tree_shardings
from cpjax.models.qwen3_5 import STREAMS, Model, Row, prepare, weights
from cpjax.shard import layout_from_name, make_batch
from cpjax.train.config import OptimizerConfig
from cpjax.train.optimizer import make_optimizer, make_schedule
from cpjax.train.step import init_state, make_train_step, split_model
from tests.train.test_step import MODEL

LAYERS, WIDTH, LENGTH = 16, 128, 4096

CONFIG = dataclasses.replace(
    MODEL,
    text=dataclasses.replace(
        MODEL.text, hidden_size=WIDTH, intermediate_size=256, num_hidden_layers=LAYERS,
        layer_types=("linear_attention", "full_attention") * (LAYERS // 2), head_dim=64, mrope_section=(6, 5, 5),
        linear_key_head_dim=64, linear_value_head_dim=64,
    ),
    vision=dataclasses.replace(MODEL.vision, out_hidden_size=WIDTH),
)  # fmt: skip


def abstract_model():
    return split_model(nnx.eval_shape(lambda: Model(CONFIG, rngs=nnx.Rngs(0))))


def abstract_state():
    _, params, frozen = abstract_model()
    optimizer = make_optimizer(OptimizerConfig(), weights(CONFIG), params)
    return jax.eval_shape(lambda p, f: init_state(p, f, optimizer, make_mesh()), params, frozen)


def compiled(**sizes):
    """The step on a mesh of these sizes; nothing is computed."""
    mesh = make_mesh(**sizes)
    graphdef, params, _ = abstract_model()
    options = OptimizerConfig()
    schedule, optimizer = make_schedule(options, steps=10), make_optimizer(options, weights(CONFIG), params)
    state = abstract_state()
    state = jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), state, tree_shardings(mesh, state)
    )
    rows = [Row(np.arange(LENGTH) % 20 + 5) for _ in range(2)]
    host, sharder = make_batch(prepare(CONFIG, rows), layout_from_name("zigzag", mesh.shape["cp"]), streams=STREAMS)
    batch = {
        name: jax.ShapeDtypeStruct(
            x.shape, x.dtype, sharding=NamedSharding(mesh, P(*[None] * (x.ndim == 3), ("dp", "fsdp")))
        )
        for name, x in host.items()
    }
    step = make_train_step(graphdef, optimizer, schedule, mesh, transport="ring")
    return step.lower(state, batch, sharder).compile(compiler_options={"xla_backend_optimization_level": 0})


@pytest.fixture(scope="module")
def programs():
    return compiled(), compiled(fsdp=2, cp=4)


def test_parameters_and_optimizer_state_fall_as_one_over_fsdp_times_cp(programs):
    whole, part = (program.memory_analysis().argument_size_in_bytes for program in programs)
    assert whole > 3 * 4 * LAYERS * 3 * WIDTH * 256  # parameters and two moments
    assert part < 1.1 * whole / 8


@pytest.mark.parametrize("sizes", [{"cp": 2, "tp": 4}, {"fsdp": 2, "cp": 2, "tp": 2}], ids=str)
def test_they_fall_as_one_over_fsdp_times_cp_times_tp(sizes):
    """But for the token embeddings, the head, and the biases, which tp does not split."""
    mesh, state = make_mesh(**sizes), abstract_state()
    parts = jax.tree.map(lambda x, s: np.prod(s.shard_shape(x.shape)), state, tree_shardings(mesh, state))
    whole = jax.tree.map(lambda x: x.size, state)
    assert sum(jax.tree.leaves(parts)) < 1.1 * sum(jax.tree.leaves(whole)) / 8
    projections = [name for name in whole.params if name.startswith("layers.") and name.endswith("_proj.kernel")]
    assert len(projections) == 11 and all(whole.params[name] == 8 * parts.params[name] for name in projections)


def test_temporaries_fall_with_rows_and_tokens(programs):
    """But for a few arrays [S, E] of a row: the embeddings, which every rank holds before it takes its tokens."""
    whole, part = (program.memory_analysis().temp_size_in_bytes for program in programs)
    assert part < 1.05 * whole / 8 + 9 * LENGTH * WIDTH * 4


def test_no_device_ever_holds_a_matrix_of_all_layers(programs):
    """They are gathered layer by layer, and their gradients are split again as soon as they are there."""
    stacked = re.compile(rf"f32\[{LAYERS // 2},{WIDTH},256\]")
    whole, part = (len(stacked.findall(program.as_text())) for program in programs)
    assert whole > 0 and part == 0
