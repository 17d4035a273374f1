"""Qwen3.5 vision-language models with mixtures of experts (Qwen3_5MoeForConditionalGeneration)."""

from cpjax.models.common.qwen3_5.config import VisionConfig
from cpjax.models.common.qwen3_5.decode import decode, prefill
from cpjax.models.common.qwen3_5.flops import forward_flops
from cpjax.models.common.qwen3_5.prepare import STREAMS, Media, Row, patchify, prepare
from cpjax.models.common.qwen3_5.processing import MediaPlan
from cpjax.models.common.qwen3_5.synthetic import reduced, synthetic_row
from cpjax.models.common.qwen3_5.weights import DROPPED, without_absent
from cpjax.models.qwen3_5_moe.config import Config, TextConfig
from cpjax.models.qwen3_5_moe.model import Processor, Qwen3_5Moe
from cpjax.models.qwen3_5_moe.weights import stacked_weights, weights

Model = Qwen3_5Moe

__all__ = [
    "DROPPED", "STREAMS", "Config", "Media", "MediaPlan", "Model", "Processor", "Qwen3_5Moe", "Row", "TextConfig",
    "VisionConfig", "decode", "forward_flops", "patchify", "prefill", "prepare", "reduced", "stacked_weights",
    "synthetic_row", "weights", "without_absent",
]  # fmt: skip
