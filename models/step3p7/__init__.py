"""Step 3.7 vision-language models (Step3p7ForConditionalGeneration)."""

from cpjax.models.common.rope import Rope
from cpjax.models.step3p7.config import Config, TextConfig, VisionConfig
from cpjax.models.step3p7.decode import decode, prefill
from cpjax.models.step3p7.flops import forward_flops
from cpjax.models.step3p7.model import Step3p7
from cpjax.models.step3p7.prepare import STREAMS, Media, Row, patchify, prepare
from cpjax.models.step3p7.processing import MediaPlan, Processor
from cpjax.models.step3p7.synthetic import reduced, synthetic_row
from cpjax.models.step3p7.weights import DROPPED, stacked_weights, weights, without_absent

Model = Step3p7

__all__ = [
    "DROPPED", "STREAMS", "Config", "Media", "MediaPlan", "Model", "Processor", "Rope", "Row", "Step3p7", "TextConfig",
    "VisionConfig", "decode", "forward_flops", "patchify", "prefill", "prepare", "reduced", "stacked_weights",
    "synthetic_row", "weights", "without_absent",
]  # fmt: skip
