"""A small stand-in for a model, and rows that stand in for data: to check programs, and to plan them."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from cpjax.models.common.qwen3_5.config import Config
from cpjax.models.common.qwen3_5.prepare import Media, Row
from cpjax.models.common.synthetic import square_images, synthetic_text


def reduced(config: Config) -> Config:
    """A narrow model of one period of the layers, with the same kinds and numbers of heads.

    The large epsilon of its norms keeps rounding small, so that differences of 1e-5 in float32 mean something.
    """
    text, size = config.text, 64
    widths: Any = {f.name: 96 for f in dataclasses.fields(text) if f.name.endswith("intermediate_size")}
    return dataclasses.replace(
        config,
        text=dataclasses.replace(
            text, vocab_size=128, hidden_size=size, num_hidden_layers=text.period, **widths,
            layer_types=text.types[: text.period], head_dim=16, linear_key_head_dim=16, linear_value_head_dim=16,
            partial_rotary_factor=0.5, mrope_section=(2, 1, 1), rope_type="default", rope_scaling=(),
            rms_norm_eps=1e-2, pad_token_id=0,
        ),
        vision=dataclasses.replace(
            config.vision, depth=1, hidden_size=8 * config.vision.num_heads, intermediate_size=96, patch_size=2,
            out_hidden_size=size, num_position_embeddings=16,
        ),
        image_token_id=1, video_token_id=2, vision_start_token_id=3, vision_end_token_id=4, source={},
    )  # fmt: skip


def synthetic_row(config: Config, length: int, patches: int, rng: np.random.Generator, documents: int = 1) -> Row:
    """A row of random text and equal square images, see `square_images` and `synthetic_text`."""
    merge = config.vision.spatial_merge_size
    side, count = square_images(length, patches, documents, merge)
    special = [config.image_token_id, config.video_token_id, config.vision_start_token_id, config.vision_end_token_id]
    tokens = np.setdiff1d(np.arange(1, config.text.vocab_size), special)
    runs = [(config.image_token_id, (side // merge) ** 2)] * count
    text = synthetic_text(length, runs, documents, tokens, rng)
    pixels = rng.normal(size=(side * side, config.vision.patch_dim)).astype(np.float32)
    media = [Media(np.roll(pixels, number, axis=0), (1, side, side)) for number in range(min(count, 2))]
    return Row(*text, media + media[-1:] * (count - len(media)))
