"""Dense Qwen3.5 vision-language models (Qwen3_5ForConditionalGeneration)."""

from cpjax.models.common.qwen3_5.config import VisionConfig
from cpjax.models.common.qwen3_5.decode import decode, prefill
from cpjax.models.common.qwen3_5.flops import forward_flops
from cpjax.models.common.qwen3_5.prepare import STREAMS, Media, Row, patchify, prepare
from cpjax.models.common.qwen3_5.processing import MediaPlan
from cpjax.models.common.qwen3_5.synthetic import reduced, synthetic_row
from cpjax.models.common.qwen3_5.weights import DROPPED, without_absent
from cpjax.models.qwen3_5.config import Config, TextConfig
from cpjax.models.qwen3_5.model import Processor, Qwen3_5
from cpjax.models.qwen3_5.weights import weights

Model = Qwen3_5

__all__ = [
    "DROPPED", "STREAMS", "Config", "Media", "MediaPlan", "Model", "Processor", "Qwen3_5", "Row", "TextConfig",
    "VisionConfig", "decode", "forward_flops", "patchify", "prefill", "prepare", "reduced",
    "synthetic_row", "weights", "without_absent",
]  # fmt: skip
