"""One step is the same step on every mesh, and frozen parameters stay as they are."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from cpjax.mesh import make_mesh
from cpjax.models import hf_names
from cpjax.models.common import sharding
from cpjax.models.qwen3_5 import STREAMS, Config, Model, Row, TextConfig, VisionConfig, patchify, prepare, weights
from cpjax.shard import IGNORE, layout_from_name, make_batch
from cpjax.train.config import OptimizerConfig
from cpjax.train.optimizer import make_optimizer, make_schedule
from cpjax.train.step import (
    init_state,
    make_eval_step,
    make_train_step,
    merge_model,
    place_batch,
    split_model,
)

ROWS, LENGTH = 4, 29  # a length that no layout divides

MODEL = Config(
    text=TextConfig(
        vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=2,
        layer_types=("linear_attention", "full_attention"), num_attention_heads=2, num_key_value_heads=1, head_dim=16,
        linear_num_key_heads=1, linear_num_value_heads=2, linear_key_head_dim=8, linear_value_head_dim=8,
        pad_token_id=0, partial_rotary_factor=0.5, mrope_section=(2, 1, 1),
    ),
    vision=VisionConfig(
        depth=1, hidden_size=8, intermediate_size=16, num_heads=1, in_channels=1, patch_size=2,
        out_hidden_size=16, num_position_embeddings=4,
    ),
    image_token_id=1, video_token_id=2, vision_start_token_id=3, vision_end_token_id=4, tie_word_embeddings=False,
)  # fmt: skip


def make_rows():
    """Four rows of two documents each; one row has a single label, one has none."""
    rng = np.random.default_rng(0)
    rows = []
    for row in range(ROWS):
        ids = rng.integers(5, 32, LENGTH - 2 * row)
        ids[[2, 20]] = 1  # an image near the start, and one at a chunk boundary
        labels = np.where(rng.random(ids.shape) < 0.6, ids, IGNORE)
        if row == 1:
            labels[:-1] = IGNORE
        if row == 2:
            labels[:] = IGNORE
        images = [patchify(MODEL.vision, rng.normal(size=(4, 4, 1))) for _ in range(2)]
        rows.append(Row(ids, labels, np.where(np.arange(len(ids)) < 13, 1, 2), images))
    return rows


@pytest.fixture(autouse=True)
def small_parts(monkeypatch):
    """Parameters as small as these are split over cp too."""
    monkeypatch.setattr(sharding, "SMALLEST", 8)


class Run:
    """A compiled step on a mesh, the batch for it, and what one step gave."""

    def __init__(self, dp=1, fsdp=1, cp=1, layout="zigzag", transport="ring", accumulate=1, freeze=()):
        mesh = make_mesh(dp, fsdp, cp)
        model = Model(MODEL, rngs=nnx.Rngs(0))
        graphdef, params, frozen = split_model(model, freeze, hf_names(model))
        self.before = jax.tree.map(np.array, params | frozen)
        options = OptimizerConfig(lr=1e-2, warmup=0, weight_decay=0.1, clip=0.5)
        schedule = make_schedule(options, steps=10)
        optimizer = make_optimizer(options, weights(MODEL), params)
        state = init_state(params, frozen, optimizer, mesh)
        parts = {"packed_rows": dp * fsdp * accumulate} if layout == "packed" else {}
        rows = prepare(MODEL, make_rows())
        self.host, self.sharder = make_batch(rows, layout_from_name(layout, cp), streams=STREAMS, **parts)
        self.batch = place_batch(self.host, mesh)
        step = make_train_step(graphdef, optimizer, schedule, mesh, accumulate=accumulate, transport=transport)
        lowered = step.lower(state, self.batch, self.sharder)
        self.step = lowered.compile(compiler_options={"xla_backend_optimization_level": 0})  # halves the compile time
        self.predict = make_eval_step(graphdef, mesh, transport=transport, chunk_size=8)
        self.state, metrics = self.step(state, self.batch, self.sharder)
        self.metrics = {name: float(value) for name, value in metrics.items()}
        self.flops = self.step.cost_analysis()["flops"]

    def predicted(self):
        return np.asarray(self.predict(self.state.params, self.state.frozen, self.batch, self.sharder))

    def predicted_tokens(self):
        """Of the tokens of all rows, one after the other."""
        predicted, places = self.predicted(), self.sharder.places
        if places is not None:
            predicted = np.take_along_axis(predicted, places, axis=1)
        rows = predicted.reshape(ROWS, -1)[:, :LENGTH]
        return rows[~prepare(MODEL, make_rows())["padding_mask"]]


run = functools.cache(Run)

MESHES = [
    {"cp": 4},
    {"cp": 2, "layout": "contiguous", "transport": "allgather"},
    {"cp": 2, "layout": "packed", "accumulate": 2},
    {"dp": 2, "fsdp": 2, "cp": 2},
]


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_r11_neither_mesh_nor_microbatches_change_anything(mesh):
    dense, split = run(), run(**mesh)
    assert split.metrics.keys() == dense.metrics.keys()
    for name, value in dense.metrics.items():
        assert split.metrics[name] == pytest.approx(value, rel=1e-5 if name == "grad_norm" else 1e-6), name
    # The first moment after one step is a tenth of the clipped gradient: every gradient, by I1.
    moments, wanted = (optax.tree.get(r.state.opt_state, "mu") for r in (split, dense))
    assert moments.keys() == wanted.keys() == split.state.params.keys()
    for name in wanted:
        scale = np.abs(wanted[name]).max()
        assert scale > 0, f"{name} has no gradient"
        np.testing.assert_allclose(moments[name], wanted[name], atol=1e-5 * scale, rtol=0, err_msg=name)
    if "fsdp" not in mesh and "contiguous" not in mesh.values():  # two programs less to compile
        assert (split.predicted_tokens() == dense.predicted_tokens()).mean() > 0.97  # near-ties may fall either way


@pytest.mark.quick
def test_metrics_are_those_of_the_whole_batch():
    batch = prepare(MODEL, make_rows())
    metrics = run(cp=4).metrics
    assert metrics["valid_tokens"] == (batch["labels"] != IGNORE).sum()
    assert metrics["tokens"] == sum(len(row.input_ids) for row in make_rows())
    assert 0.9e-2 < metrics["lr"] < 1e-2


def test_r07_accuracy_counts_what_the_labels_say():
    """Labels are targets already: a model whose prediction at t is labels[t] is right everywhere, at any cp."""
    split = run(cp=4)
    mesh = split.batch["labels"].sharding.mesh
    host = split.host | {"labels": np.where(split.host["labels"] == IGNORE, IGNORE, split.predicted())}
    copy = jax.tree.map(jnp.copy, split.state)  # the step takes its state away
    _, metrics = split.step(copy, place_batch(host, mesh), split.sharder)
    assert float(metrics["accuracy"]) == 1.0


def test_frozen_parameters_do_not_move():
    frozen, dense = run(cp=4, freeze=(r"^model\.visual\.", "embed_tokens")), run(cp=4)
    state = frozen.state
    assert state.frozen and not set(state.frozen) & set(state.params)
    for name, value in state.frozen.items():
        assert "visual" in name or "embed_tokens" in name
        np.testing.assert_array_equal(value, frozen.before[name])
    for name, value in state.params.items():
        assert not np.array_equal(value, frozen.before[name]), f"{name} did not move"
    moments = [optax.tree.get(state.opt_state, name) for name in ("mu", "nu")]
    assert moments[0].keys() == moments[1].keys() == state.params.keys()  # no memory for the others
    assert frozen.metrics["loss"] == pytest.approx(dense.metrics["loss"], rel=1e-6)
    assert frozen.metrics["grad_norm"] < dense.metrics["grad_norm"]
    assert frozen.flops < dense.flops  # their gradient is not computed and then dropped


def test_freeze_patterns():
    model = Model(MODEL, rngs=nnx.Rngs(0))
    names = hf_names(model)
    with pytest.raises(ValueError, match="'towr' matches no parameter"):
        split_model(model, ["visual", "towr"], names)
    with pytest.raises(ValueError, match="not a regular expression"):
        split_model(model, ["("], names)
    with pytest.raises(ValueError, match="leave no parameter"):
        split_model(model, ["."], names)
    deep = {path: (*found, "model.visual.blocks.1.x") for path, found in names.items() if "blocks" in path}
    with pytest.raises(ValueError, match="stacked"):
        split_model(model, [r"model\.visual\.blocks\.1\."], deep)


def test_merge_is_the_inverse_of_split():
    model = Model(MODEL, rngs=nnx.Rngs(0))
    graphdef, *parts = split_model(model, ["visual"])
    assert parts[0] and parts[1]
    merged = merge_model(graphdef, *parts)
    jax.tree.map(np.testing.assert_array_equal, nnx.state(merged), nnx.state(model))


def test_rows_that_do_not_split():
    batch, _ = make_batch(prepare(MODEL, make_rows()), layout_from_name("zigzag", 1), streams=STREAMS)
    with pytest.raises(ValueError, match=r"4 rows cannot be split over dp 3 x fsdp 1"):
        place_batch(batch, make_mesh(dp=3))
