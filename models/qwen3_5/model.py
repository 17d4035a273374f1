"""The dense Qwen3.5 vision-language model."""

from __future__ import annotations

from typing import Any

from flax import nnx

from cpjax.models.common.layers import GatedMLP
from cpjax.models.common.qwen3_5.model import RESIDUAL_SCALE, VisionLanguageModel
from cpjax.models.common.qwen3_5.processing import Processor as AnyProcessor
from cpjax.models.qwen3_5.config import Config, TextConfig


class Qwen3_5(VisionLanguageModel):
    """The whole model, with a gated MLP in each layer."""

    @staticmethod
    def mlp(config: TextConfig, *, dtype: Any, rngs: nnx.Rngs) -> GatedMLP:
        """That of one layer."""
        return GatedMLP(config.hidden_size, config.intermediate_size, scale=RESIDUAL_SCALE, dtype=dtype, rngs=rngs)


class Processor(AnyProcessor):
    """The pictures' side of a folder of this family."""

    config_type = Config
