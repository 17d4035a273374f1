"""What the tests of the training step share: a text-only model of two attention layers, which compiles fast."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from cpjax.mesh import make_mesh
from cpjax.models.qwen3_5 import STREAMS, Config, Model, Row, TextConfig, VisionConfig, prepare
from cpjax.shard import IGNORE, layout_from_name, make_batch
from cpjax.train.ahead import ahead_weight
from cpjax.train.config import OptimizerConfig
from cpjax.train.lora import weight_table
from cpjax.train.optimizer import make_optimizer, make_schedule
from cpjax.train.step import init_state, make_train_step, place_batch, split_model

ROWS, LENGTH = 4, 21

MODEL = Config(
    text=TextConfig(
        vocab_size=24, hidden_size=16, intermediate_size=24, num_hidden_layers=2, layer_types=("full_attention",) * 2,
        num_attention_heads=2, num_key_value_heads=1, head_dim=8, pad_token_id=0, partial_rotary_factor=1.0,
        mrope_section=(2, 1, 1), rms_norm_eps=1e-2,
    ),
    vision=VisionConfig(
        depth=1, hidden_size=8, intermediate_size=16, num_heads=1, in_channels=1, patch_size=2, out_hidden_size=16,
        num_position_embeddings=4,
    ),
    image_token_id=1, video_token_id=2, vision_start_token_id=3, vision_end_token_id=4,
)  # fmt: skip

FREEZE = ("visual",)  # nothing of it is used

FAST = {"xla_backend_optimization_level": 0}
"""Halves the compile time."""


def x64(dtype):
    return jax.enable_x64(True) if dtype == "float64" else contextlib.nullcontext()


def make_model(dtype="float32"):
    model = Model(MODEL, rngs=nnx.Rngs(0), dtype=jnp.dtype(dtype))
    # Fresh layers hardly write to the residual stream, which would hide what is wrong with them.
    for layer in model.layers.slots:
        layer.mixer.o_proj.kernel = nnx.Param(10 * layer.mixer.o_proj.kernel[...])
        layer.mlp.down_proj.kernel = nnx.Param(10 * layer.mlp.down_proj.kernel[...])
    return model


def make_rows():
    """Rows of several lengths; the second has a single label, the third none."""
    rng = np.random.default_rng(0)
    rows = []
    for row in range(ROWS):
        ids = rng.integers(5, 23, LENGTH - 3 * row)
        labels = np.where(rng.random(ids.shape) < 0.6, np.append(ids[1:], IGNORE), IGNORE)
        labels[: {1: 7, 2: len(ids)}.get(row, 0)] = IGNORE
        labels[8:] = IGNORE if row == 1 else labels[8:]
        rows.append(Row(ids, labels))
    return rows


def host_batch(cp):
    return make_batch(prepare(MODEL, make_rows()), layout_from_name("zigzag", cp), streams=STREAMS)


class Uncompiled:
    """A step on a mesh, its state, and the batch for it."""

    def __init__(
        self, fsdp=1, cp=1, dtype="float32", accumulate=1, ema=0.0, compute=None, model=None, freeze=FREEZE,
        mesh=None, batch=None, forward=None, **options
    ):  # fmt: skip
        self.mesh = mesh or make_mesh(fsdp=fsdp, cp=cp)
        model = model or make_model(dtype)
        table = weight_table(model)
        graphdef, params, frozen = split_model(model, freeze, {weight.path: weight.names for weight in table})
        options = OptimizerConfig(**{"lr": 0.1, "schedule": "constant", "warmup": 0, "clip": 0.0, **options})
        optimizer, schedule = make_optimizer(options, table, params), make_schedule(options, 10)
        self.state = init_state(params, frozen, optimizer, self.mesh, average=ema > 0, scaled=compute == "float16")
        self.batch, self.sharder = batch or host_batch(cp)
        self.step = make_train_step(
            graphdef, optimizer, schedule, self.mesh, accumulate=accumulate, ema=ema, dtype=compute,
            ahead=ahead_weight(options, params), **forward or {},
        )  # fmt: skip


class Run:
    """A compiled step; call it to take a step."""

    def __init__(self, dtype="float32", **options):
        self.dtype = dtype
        with x64(dtype):
            run = Uncompiled(dtype=dtype, **options)
            self.mesh, self.state, self.batch, self.sharder = run.mesh, run.state, run.batch, run.sharder
            lowered = run.step.lower(self.state, place_batch(self.batch, self.mesh), self.sharder)
            self.step = lowered.compile(compiler_options=FAST)

    def __call__(self, batch=None):
        """Takes a step; its metrics."""
        with x64(self.dtype):
            batch = place_batch(self.batch if batch is None else batch, self.mesh)
            self.state, metrics = self.step(self.state, batch, self.sharder)
        return {name: float(value) for name, value in metrics.items()}
