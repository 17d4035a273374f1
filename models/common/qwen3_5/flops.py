"""How many floating-point operations a batch needs: what a device's speed is measured by."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from cpjax.models.common.flops import causal_pairs, run_lengths
from cpjax.models.common.qwen3_5.config import FULL, Config, TextConfig, VisionConfig


def forward_flops(config: Config, batch: Mapping[str, np.ndarray]) -> float:
    """Operations of the forward pass over a host batch: a product of [m, k] and [k, n] counts 2 m k n.

    Counted are products with weights on tokens and patches that are no pads, attention on pairs that may see each
    other (half of a document's, all of a frame's), and the delta rule token by token; not what an implementation
    does beyond that, nor norms and activations. A head of multi-token prediction counts as if it were trained.
    """
    text, vision = config.text, config.vision
    documents = run_lengths(batch["document_ids"])
    ahead = text.mtp_num_hidden_layers
    full, layers = text.types.count(FULL) + ahead, text.num_hidden_layers + ahead
    per_token = full * _full(text) + (layers - full) * _linear(text) + layers * text.mlp_products
    per_token += text.hidden_size * ((1 + ahead) * text.vocab_size + ahead * 2 * text.hidden_size)
    pairs = causal_pairs(documents)
    flops = 2 * per_token * documents.sum() + 4 * full * text.num_attention_heads * text.head_dim * pairs
    if "vision_segment_ids" in batch:
        frames = run_lengths(batch["vision_segment_ids"])
        flops += 2 * _patch(vision) * frames.sum()
        flops += 4 * vision.depth * vision.hidden_size * np.square(frames).sum()
    return float(flops)


def _full(text: TextConfig) -> int:
    """Multiplications of a token in a full-attention layer: queries and gates, keys, values, output."""
    heads = 3 * text.num_attention_heads + 2 * text.num_key_value_heads
    return text.hidden_size * heads * text.head_dim


def _linear(text: TextConfig) -> int:
    """Multiplications of a token in a linear layer: projections, convolution, and reads and writes of the state."""
    keys = text.linear_num_key_heads * text.linear_key_head_dim
    values = text.linear_num_value_heads * text.linear_value_head_dim
    projections = text.hidden_size * (2 * keys + 3 * values + 2 * text.linear_num_value_heads)
    return projections + text.linear_conv_kernel_dim * (2 * keys + values) + 3 * values * text.linear_key_head_dim


def _patch(vision: VisionConfig) -> float:
    """Multiplications of a patch in the tower and, a share of its block, in the merger."""
    size, block = vision.hidden_size, vision.spatial_merge_size**2
    layers = vision.depth * (4 * size * size + 2 * size * vision.intermediate_size)
    merger = block * size * (block * size + vision.out_hidden_size)
    return vision.patch_dim * size + layers + merger / block
