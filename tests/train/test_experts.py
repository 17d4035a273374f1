"""Steps of a model with experts are the same on every mesh, in any microbatches and however its experts are split.

Its balance loss is included (R52), and the loss of the head of multi-token prediction, which has experts of its own.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from cpjax.models.common.experts import share_experts
from cpjax.models.qwen3_5_moe import Config as ModelConfig
from cpjax.models.qwen3_5_moe import Model, TextConfig
from cpjax.train.config import Config, MeshConfig, OptimizerConfig, RunConfig
from cpjax.train.loop import train

from .small import MODEL, Run

SPARSE = ModelConfig(
    text=TextConfig(
        **{
            field.name: getattr(MODEL.text, field.name)
            for field in dataclasses.fields(MODEL.text)
            if field.name not in ("intermediate_size", "mtp_num_hidden_layers")
        },
        moe_intermediate_size=8, shared_expert_intermediate_size=8, num_experts=4, num_experts_per_tok=2,
        output_router_logits=True, router_aux_loss_coef=0.5, mtp_num_hidden_layers=1,
    ),
    vision=MODEL.vision, image_token_id=1, video_token_id=2, vision_start_token_id=3, vision_end_token_id=4,
)  # fmt: skip


def start(text=SPARSE.text, ep=1, **options):
    """A run in float64."""
    with jax.enable_x64(True):
        model = Model(dataclasses.replace(SPARSE, text=text), rngs=nnx.Rngs(0), dtype=jnp.float64)
        share_experts(model, ep)
        return Run(model=model, dtype="float64", name="sgd", momentum=0.0, weight_decay=0.0, ahead=0.5, **options)


def test_ten_steps():
    """The gradients of the first one, and the loss of all."""
    silent = dataclasses.replace(SPARSE.text, output_router_logits=False)  # the option stands for what it does not say
    whole = start(forward={"remat": "none"})
    parts = start(silent, cp=4, fsdp=2, ep=2, accumulate=2, forward={"router_loss": SPARSE.text.router_loss})
    before = {name: np.asarray(array) for name, array in whole.state.params.items()}
    metrics, found = whole(), parts()
    assert metrics["balance"] > SPARSE.text.num_experts_per_tok and metrics["loss_ahead"] > 1
    assert metrics["loss"] > 0.5 * (metrics["balance"] + metrics["loss_ahead"]) + 1
    for name in ("loss", "balance", "loss_ahead", "grad_norm", "accuracy", "tokens"):
        np.testing.assert_allclose(found[name], metrics[name], rtol=1e-7, err_msg=name)  # metrics are float32
    for name, value in whole.state.params.items():
        largest = np.abs(np.asarray(value) - before[name]).max()
        np.testing.assert_allclose(parts.state.params[name], value, rtol=0, atol=1e-11 * largest, err_msg=name)
    losses, wanted = ([run()["loss"] for _ in range(9)] for run in (parts, whole))
    assert losses == pytest.approx(wanted, rel=1e-6) and wanted[-1] < 0.9 * metrics["loss"]


def test_models_without_a_balance_loss_refuse_its_weight(tmp_path):
    config = Config(
        optimizer=OptimizerConfig(balance=0.1), mesh=MeshConfig(cp=1), run=RunConfig(out=str(tmp_path / "a"))
    )
    with pytest.raises(ValueError, match=r"--optimizer.balance is 0.1, but qwen3_5 models have no balance loss: drop"):
        train(config, "one device")
