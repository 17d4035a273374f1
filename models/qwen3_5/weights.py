"""The names of the dense Qwen3.5's tensors on disk."""

from __future__ import annotations

from cpjax.models.common.checkpoint import Weight
from cpjax.models.common.qwen3_5.weights import table
from cpjax.models.qwen3_5.config import Config

_MLP = {f"mlp.{name}.kernel": f"mlp.{name}.weight" for name in ("gate_proj", "up_proj", "down_proj")}


def weights(config: Config) -> list[Weight]:
    """Every parameter of the model with the tensors that hold it; kernels are [in, out] here and [out, in] on disk."""
    return table(config, _MLP)
