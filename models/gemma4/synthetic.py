"""A small stand-in for a model, and rows that stand in for data: to check programs, and to plan them."""

from __future__ import annotations

import dataclasses

import numpy as np

from cpjax.models.common.synthetic import square_images, synthetic_text
from cpjax.models.gemma4.config import FULL, SLIDING, Config
from cpjax.models.gemma4.prepare import Media, Row, audio_tokens

_MOST_SOUND = 64
"""Tokens of the longest sound."""


def reduced(config: Config) -> Config:
    """A narrow model with one layer of each kind, of those that share keys and values too, and the numbers of heads.

    The large epsilon of its norms keeps rounding small, so that differences of 1e-5 in float32 mean something. Window
    and context are short, so that they matter in short rows.
    """
    text, vision, audio, size = config.text, config.vision, config.audio, 64
    own, shared = (
        tuple(kind for kind in (SLIDING, FULL) if kind in types)
        for types in (text.types[: text.first_shared], text.types[text.first_shared :])
    )
    return dataclasses.replace(
        config,
        text=dataclasses.replace(
            text, vocab_size=128, hidden_size=size, intermediate_size=96, num_hidden_layers=len(own + shared),
            head_dim=16, global_head_dim=32, rms_norm_eps=1e-2, pad_token_id=0,
            sliding_window=min(text.sliding_window, 12), layer_types=own + shared, num_kv_shared_layers=len(shared),
            vocab_size_per_layer_input=128, hidden_size_per_layer_input=min(text.hidden_size_per_layer_input, 8),
            moe_intermediate_size=min(text.moe_intermediate_size, 32),
        ),
        vision=dataclasses.replace(
            vision, hidden_size=size, intermediate_size=96, num_hidden_layers=1, head_dim=8, rms_norm_eps=1e-2,
            patch_size=2, position_embedding_size=32,
        ),
        audio=audio
        and dataclasses.replace(
            audio, hidden_size=8 * audio.num_attention_heads, num_hidden_layers=1, subsampling_conv_channels=(8, 4),
            attention_chunk_size=4, attention_context_left=min(audio.attention_context_left, 4), rms_norm_eps=1e-2,
            output_proj_dims=size,
        ),
        image_token_id=1, video_token_id=2, audio_token_id=3, source={},
    )  # fmt: skip


def synthetic_row(config: Config, length: int, patches: int, rng: np.random.Generator, documents: int = 1) -> Row:
    """A row of random text and equal square images, see `square_images` and `synthetic_text`.

    Where the model hears and the row has patches, the row has a sound too.
    """
    pool, heard = config.vision.pooling_kernel_size, bool(config.audio and patches)
    side, count = square_images(length, patches, documents, pool)
    run = (side // pool) ** 2
    if heard:
        count = min(count, length // (run + 1) - 1)
    tokens = np.setdiff1d(np.arange(1, config.text.vocab_size), config.placeholder_ids)
    runs, sounds = [(config.image_token_id, run)] * count, []
    if config.audio and heard:
        frames = 4 * min(length // (2 * max(count + 1, documents)), _MOST_SOUND) - 1
        sounds.append(rng.normal(size=(frames, config.audio.mel_bins)).astype(np.float32))
        runs.append((config.audio_token_id, audio_tokens(frames)))
    text = synthetic_text(length, runs, documents, tokens, rng)
    pixels = rng.random(size=(side * side, config.vision.patch_dim)).astype(np.float32)
    media = [Media(np.roll(pixels, number, axis=0), (1, side, side)) for number in range(min(count, 2))]
    return Row(*text, media + media[-1:] * (count - len(media)), sounds)
