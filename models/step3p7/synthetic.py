"""A small stand-in for a model, and rows that stand in for data: to check programs, and to plan them."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from cpjax.models.common.synthetic import square_images, synthetic_text
from cpjax.models.step3p7.config import Config
from cpjax.models.step3p7.prepare import Media, Row


def reduced(config: Config) -> Config:
    """A narrow model with one layer of each kind and at most one head of multi-token prediction, heads as many.

    The large epsilon of its norms keeps rounding small, so that differences of 1e-5 in float32 mean something. The
    window is short, so that it matters in short rows.
    """
    text, vision, size = config.text, config.vision, 64
    kinds = {(layer.sliding, layer.sparse): number for number, layer in enumerate(text.layers)}
    kept, ahead = sorted(kinds.values()), min(text.num_nextn_predict_layers, 1)

    def pick(values: tuple | None) -> tuple:
        """Those of the layers that are kept, and of the head behind them."""
        values = values or ()
        behind = values[text.num_hidden_layers : text.num_hidden_layers + ahead]
        return (*(values[number] for number in kept), *behind)

    widths: Any = {f.name: 96 for f in dataclasses.fields(text) if f.name.endswith("intermediate_size")}
    return dataclasses.replace(
        config,
        text=dataclasses.replace(
            text, vocab_size=128, hidden_size=size, num_hidden_layers=len(kept), **widths, share_expert_dim=96,
            head_dim=16, query_pre_attn_scalar=None, rms_norm_eps=1e-2, pad_token_id=0,
            sliding_window=text.sliding_window and min(text.sliding_window, 12), layer_types=pick(text.types),
            mlp_layer_types=pick(text.mlp_layer_types), swiglu_limits=pick(text.swiglu_limits),
            swiglu_limits_shared=pick(text.swiglu_limits_shared), num_nextn_predict_layers=ahead,
            mtp_layer_types=(text.mtp_layer_types or ())[:ahead],
            mtp_mlp_layer_types=(text.mtp_mlp_layer_types or ())[:ahead],
        ),
        vision=dataclasses.replace(
            vision, num_hidden_layers=1, hidden_size=8 * vision.num_attention_heads, intermediate_size=96,
            image_size=16, patch_size=2, layer_norm_eps=1e-2,
        ),
        image_token_id=1, source={},
    )  # fmt: skip


def synthetic_row(config: Config, length: int, patches: int, rng: np.random.Generator, documents: int = 1) -> Row:
    """A row of random text and equal square images of one view, see `square_images` and `synthetic_text`."""
    merge = config.vision.spatial_merge_size
    side, count = square_images(length, patches, documents, merge)
    tokens = np.setdiff1d(np.arange(1, config.text.vocab_size), [config.image_token_id])
    text = synthetic_text(length, [(config.image_token_id, (side // merge) ** 2)] * count, documents, tokens, rng)
    pixels = rng.normal(size=(side * side, config.vision.patch_dim)).astype(np.float32)
    media = [Media(np.roll(pixels, number, axis=0), ((side, side),)) for number in range(min(count, 2))]
    return Row(*text, media + media[-1:] * (count - len(media)))
