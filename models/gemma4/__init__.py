"""Gemma 4 vision-language models (Gemma4ForConditionalGeneration)."""

from cpjax.models.common.rope import Rope
from cpjax.models.gemma4.config import AudioConfig, Config, TextConfig, VisionConfig
from cpjax.models.gemma4.decode import decode, prefill
from cpjax.models.gemma4.flops import forward_flops
from cpjax.models.gemma4.model import Gemma4
from cpjax.models.gemma4.prepare import STREAMS, Media, Row, audio_tokens, patchify, prepare
from cpjax.models.gemma4.processing import MediaPlan, Processor
from cpjax.models.gemma4.synthetic import reduced, synthetic_row
from cpjax.models.gemma4.weights import DROPPED, weights

Model = Gemma4

__all__ = [
    "DROPPED", "STREAMS", "AudioConfig", "Config", "Gemma4", "Media", "MediaPlan", "Model", "Processor", "Rope",
    "Row", "TextConfig", "VisionConfig", "audio_tokens", "decode", "forward_flops", "patchify", "prefill", "prepare",
    "reduced", "synthetic_row", "weights",
]  # fmt: skip
