"""A step of a model with experts is the same on every mesh and in any microbatches.

So are the balance loss, and the loss of the head of multi-token prediction, which has experts of its own.
"""

import dataclasses

import jax
import numpy as np
from flax import nnx

from cpjax.models.common import sharding
from cpjax.models.qwen3_5_moe import Config, Model, TextConfig

from .small import MODEL, Run

SPARSE = Config(
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


def step(**options):
    """Metrics of one step, and the parameters after it."""
    run = Run(model=Model(SPARSE, rngs=nnx.Rngs(0)), name="sgd", momentum=0.0, weight_decay=0.0, ahead=0.5, **options)
    metrics = run()
    return metrics, jax.tree.map(np.asarray, run.state.params)


def test_one_step(monkeypatch):
    monkeypatch.setattr(sharding, "SMALLEST", 8)  # experts, too, are split over cp
    metrics, params = step()
    assert metrics["balance"] > SPARSE.text.num_experts_per_tok and metrics["loss_ahead"] > 1
    assert metrics["loss"] > 0.5 * (metrics["balance"] + metrics["loss_ahead"]) + 1
    found, changed = step(cp=2, fsdp=2, accumulate=2)
    for name in ("loss", "balance", "loss_ahead", "grad_norm", "accuracy", "tokens"):
        np.testing.assert_allclose(found[name], metrics[name], rtol=2e-6, err_msg=name)
    for name, value in params.items():
        largest = max(1, np.abs(value).max())
        np.testing.assert_allclose(changed[name], value, rtol=0, atol=2e-6 * largest, err_msg=name)
