"""The Qwen3.5 vision-language model with a mixture of experts in each layer."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from cpjax.models.common.experts import Experts, RouterSums, route, router_sums
from cpjax.models.common.layers import GatedMLP, Linear
from cpjax.models.common.qwen3_5.model import RESIDUAL_SCALE, VisionLanguageModel
from cpjax.models.common.qwen3_5.processing import Processor as AnyProcessor
from cpjax.models.qwen3_5_moe.config import Config, TextConfig


class SparseMLP(nnx.Module):
    """The experts that a token is routed to, and one, gated, that all share."""

    def __init__(self, config: TextConfig, *, dtype: Any, rngs: nnx.Rngs):
        size = config.hidden_size
        self.chosen = config.num_experts_per_tok
        self.gate = Linear(size, config.num_experts, dtype=dtype, rngs=rngs)
        self.experts = Experts(
            config.num_experts, size, config.moe_intermediate_size, activation=_swiglu, scale=RESIDUAL_SCALE,
            dtype=dtype, rngs=rngs,
        )  # fmt: skip
        shared = config.shared_expert_intermediate_size
        self.shared_expert = GatedMLP(size, shared, scale=RESIDUAL_SCALE, dtype=dtype, rngs=rngs)
        self.shared_expert_gate = Linear(size, 1, dtype=dtype, rngs=rngs)

    def __call__(self, x: jax.Array, padding_mask: jax.Array) -> tuple[jax.Array, RouterSums]:
        """x [B, L, E], padding_mask [B, L] -> [B, L, E], and what the router did."""
        logits = self.gate(x)
        probabilities = jax.nn.softmax(logits.astype(jnp.promote_types(logits.dtype, jnp.float32)))
        routing = route(probabilities, self.chosen)
        shared = jax.nn.sigmoid(self.shared_expert_gate(x)) * self.shared_expert(x)
        sums = router_sums(probabilities, routing.experts, padding_mask)
        return self.experts(x, routing, padding_mask) + shared, sums


def _swiglu(gate: jax.Array, up: jax.Array) -> jax.Array:
    return jax.nn.silu(gate) * up


class Qwen3_5Moe(VisionLanguageModel):
    """The whole model, with a mixture of experts in each layer."""

    mlp = SparseMLP

    def no_sums(self, hidden: jax.Array) -> RouterSums:
        """The sums before the first layer."""
        return RouterSums.zero(self.config.text.num_experts, hidden)

    @property
    def router_loss(self) -> float:
        """What the routers' balance loss is multiplied by in training."""
        return self.config.text.router_loss


class Processor(AnyProcessor):
    """The pictures' side of a folder of this family."""

    config_type = Config
