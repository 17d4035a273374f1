"""Configuration of a dense Qwen3.5 vision-language model."""

from __future__ import annotations

import dataclasses

from cpjax.models.common.qwen3_5 import config


@dataclasses.dataclass(frozen=True)
class TextConfig(config.TextConfig):
    """The language model; names as in config.json."""

    intermediate_size: int = 12288


@dataclasses.dataclass(frozen=True)
class Config(config.Config):
    """A whole model: what config.json says."""

    text: TextConfig = dataclasses.field(default_factory=TextConfig)

    model_type = "qwen3_5"
    architecture = "Qwen3_5ForConditionalGeneration"
    text_type = TextConfig
