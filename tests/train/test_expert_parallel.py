"""Experts split over ranks of cp: every gradient, what a rank holds and what is refused."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from cpjax.mesh import make_mesh
from cpjax.models import family
from cpjax.models.common.experts import share_experts
from cpjax.models.common.sharding import check_ep
from cpjax.shard import layout_from_name, make_batch
from cpjax.train.check import KEEP
from cpjax.train.config import Config, MeshConfig, ModelConfig
from cpjax.train.loop import prepare
from cpjax.train.step import init_state, make_train_step, merge_model, place_batch, split_model
from cpjax.train.task import read_model_config
from tests.models import step3p7_cases
from tests.models.qwen3_5_cases import GOLDENS
from tests.models.test_gemma4_model import small as gemma

from . import small

COUNT, WIDTH = 8, 10
"""Number of experts, and of their hidden features, which nothing else has."""

STEP = step3p7_cases.CONFIG

CONFIGS = {
    "gemma4": gemma(
        num_hidden_layers=1, layer_types=("full_attention",), enable_moe_block=True, num_experts=COUNT,
        top_k_experts=3, moe_intermediate_size=WIDTH,
    ),
    "step3p7": dataclasses.replace(
        STEP, text=dataclasses.replace(STEP.text, n_routed_experts=COUNT, moe_intermediate_size=WIDTH)
    ),
}  # fmt: skip

SPLIT = {"gemma4": dict(ep=4, cp=4), "step3p7": dict(ep=2, cp=4)}


@functools.cache
def program(name, ep=1, **sizes):
    """The compiled step in float64, its gradients by name, and its metrics."""
    with jax.enable_x64(True):
        module, config, mesh = family(name), CONFIGS[name], make_mesh(**sizes)
        model = nnx.eval_shape(lambda: module.Model(config, rngs=nnx.Rngs(0), dtype=jnp.float64))
        share_experts(model, ep)
        graphdef, *arrays = split_model(model, ["visual|projector|mtp"])  # nothing of these is used
        rng = np.random.default_rng(0)
        params, frozen = jax.tree.map(lambda leaf: rng.normal(size=leaf.shape) * leaf.shape[-1] ** -0.5, arrays)
        rows = [module.Row(row.input_ids, row.labels) for row in small.make_rows()]
        layout = layout_from_name("zigzag", mesh.shape["cp"])
        batch, sharder = make_batch(module.prepare(config, rows), layout, streams=module.STREAMS)
        step = make_train_step(graphdef, KEEP, lambda step: 1.0, mesh, remat="none")
        state, batch = init_state(params, frozen, KEEP, mesh), place_batch(batch, mesh)
        compiled = step.lower(state, batch, sharder).compile(compiler_options=small.FAST)
        state, metrics = compiled(state, batch, sharder)
    metrics = {metric: float(metrics[metric]) for metric in metrics if metric != "grad_norm"}
    return compiled, {path: np.asarray(grad) for path, grad in state.opt_state.items()}, metrics


@pytest.mark.parametrize("name", SPLIT)
def test_every_gradient_is_that_of_one_device(name):
    (_, wanted, metrics), (_, found, others) = program(name), program(name, **SPLIT[name])
    assert others == metrics
    assert found.keys() == wanted.keys() and sum(".experts." in path for path in found) == 3
    for path, grad in wanted.items():
        largest = np.abs(grad).max()
        assert largest > 0, path
        assert np.abs(found[path] - grad).max() < 1e-11 * largest, path


@pytest.mark.parametrize("name", SPLIT)
def test_no_rank_ever_holds_more_experts_than_its_own(name):
    """Nor gradients of more. Those that ranks share, neighbours gather; where none are shared, nothing is gathered."""
    kernels = re.compile(rf"f64\[(\d+),(?:16,{WIDTH}|{WIDTH},16)\]")
    whole, part = (program(name, **sizes)[0].as_text() for sizes in ({}, SPLIT[name]))
    held, (ep, cp) = COUNT // SPLIT[name]["ep"], SPLIT[name].values()
    assert max(map(int, kernels.findall(whole))) == COUNT
    assert max(map(int, kernels.findall(part))) == held
    gathers = [line for line in part.splitlines() if "all-gather(" in line and f",{WIDTH}" in line]
    assert bool(gathers) == (ep < cp)
    assert all("replica_groups={{0,1},{2,3}}" in line or "[2,2]<=[4]" in line for line in gathers), gathers[0]


def test_what_cannot_be_split():
    for config in CONFIGS.values():
        check_ep(config, 2, 4, "the model")
    check_ep(small.MODEL, 1, 4, "the model")
    with pytest.raises(ValueError, match=r"ep is 2, but the model has no experts to split: leave ep at 1"):
        check_ep(small.MODEL, 2, 4, "the model")
    with pytest.raises(ValueError, match=r"has text.n_routed_experts 8, which cp, 3, does not divide: every rank"):
        check_ep(CONFIGS["step3p7"], 3, 3, "the model")


def test_a_run_shares_the_experts_of_its_model():
    path = GOLDENS / "qwen3_5_moe"
    config = Config(model=ModelConfig(path=str(path)), mesh=MeshConfig(cp=2, ep=2))
    graphdef, state, *_ = prepare(config, read_model_config(config), make_mesh(cp=2))
    experts = [m for _, m in nnx.iter_modules(merge_model(graphdef, state.params, state.frozen)) if hasattr(m, "ep")]
    assert len(experts) == 2 and {module.ep for module in experts} == {2}
    assert state.params["layers.slots.0.mlp.experts.gate_proj"].sharding.spec[1] == "cp"
