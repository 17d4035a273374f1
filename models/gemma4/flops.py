"""How many floating-point operations a batch needs: what a device's speed is measured by."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from cpjax.models.common.flops import causal_pairs, run_lengths
from cpjax.models.gemma4.config import FULL, SLIDING, AudioConfig, Config, TextConfig, VisionConfig


def forward_flops(config: Config, batch: Mapping[str, np.ndarray]) -> float:
    """Operations of the forward pass over a host batch: a product of [m, k] and [k, n] counts 2 m k n.

    Counted are products with weights on tokens, patches and frames that are no pads, and attention on pairs that may
    see each other: in sliding layers those in the window, and of an image all. Not counted is what an implementation
    does beyond that, nor norms and activations.
    """
    text, documents = config.text, run_lengths(batch["document_ids"])
    pairs = {FULL: causal_pairs(documents), SLIDING: causal_pairs(documents, text.sliding_window)}
    if "vision_group_ids" in batch:
        groups = run_lengths(_groups(batch))
        pairs[SLIDING] += float((groups * (groups - 1)).sum()) / 2  # causal attention has the other half
    per_token = text.hidden_size * (text.vocab_size + text.num_hidden_layers * text.hidden_size_per_layer_input)
    flops = 0.0
    for number, kind in enumerate(text.types):
        per_token += _layer(text, kind, shared=number >= text.first_shared)
        flops += 4 * text.num_attention_heads * text.width(kind) * pairs[kind]
    flops += 2 * per_token * documents.sum()
    if "vision_segment_ids" in batch:
        frames = run_lengths(batch["vision_segment_ids"])
        flops += 2 * _patch(config.vision, text.hidden_size) * frames.sum()
        width = config.vision.num_attention_heads * config.vision.head_dim
        flops += 4 * config.vision.num_hidden_layers * width * np.square(frames).sum()
    if config.audio and "audio_frames" in batch:
        flops += _audio(config.audio, text.hidden_size, batch["audio_frames"])
    return float(flops)


def _groups(batch: Mapping[str, np.ndarray]) -> np.ndarray:
    """Numbers > 0 of the images of all documents [B, S]; those of documents packed into one row may be the same."""
    groups, documents = batch["vision_group_ids"].astype(np.int64), batch["document_ids"]
    return np.where(groups >= 0, documents * (groups.max() + 1) + groups + 1, 0)


def _layer(text: TextConfig, kind: str, shared: bool) -> int:
    """Multiplications of a token in a decoder layer, attention's pairs aside."""
    size, queries = text.hidden_size, text.num_attention_heads * text.width(kind)
    projections = 1 if kind == FULL and text.attention_k_eq_v else 2  # keys may be the values
    keys = 0 if shared else projections * text.kv_heads(kind) * text.width(kind)
    hidden = text.intermediate_size * (2 if shared and text.use_double_wide_mlp else 1)
    experts = 0
    if text.enable_moe_block:
        experts = text.num_experts + 3 * text.top_k_experts * text.moe_intermediate_size
    return size * (2 * queries + keys + 3 * hidden + experts + 2 * text.hidden_size_per_layer_input)


def _patch(vision: VisionConfig, out: int) -> float:
    """Multiplications of a patch in the tower and, a share of those it is pooled with, in the projection."""
    size, heads = vision.hidden_size, 2 * (vision.num_attention_heads + vision.num_key_value_heads)
    layers = vision.num_hidden_layers * size * (heads * vision.head_dim + 3 * vision.intermediate_size)
    return vision.patch_dim * size + layers + size * out / vision.pooling_kernel_size**2


def _audio(audio: AudioConfig, out: int, frames: np.ndarray) -> float:
    """Operations of the tower on sounds of so many frames, of which two convolutions leave every fourth."""
    size, bins, (first, second) = audio.hidden_size, audio.mel_bins, audio.subsampling_conv_channels
    halves, quarters = (-(-frames[frames > 0] // n).astype(np.float64) for n in (2, 4))
    convolutions = 9 * first * bins // 2 * halves.sum() + 9 * first * second * bins // 4 * quarters.sum()
    feed_forward, attention, convolution = 16 * size, 4 * size, 3 * size + audio.conv_kernel_size
    per_token = bins // 4 * second * size + audio.num_hidden_layers * size * (feed_forward + attention + convolution)
    per_token += audio.output_proj_dims * (size + out)
    # A pair takes the product with a key, with the embedding of their distance, and with a value.
    pairs = causal_pairs(quarters, audio.attention_context_left - 1)
    return float(2 * (convolutions + per_token * quarters.sum()) + 6 * audio.num_hidden_layers * size * pairs)
