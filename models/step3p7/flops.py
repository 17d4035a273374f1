"""How many floating-point operations a batch needs: what a device's speed is measured by."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from cpjax.models.common.flops import causal_pairs, run_lengths
from cpjax.models.step3p7.config import Config, TextConfig, VisionConfig
from cpjax.models.step3p7.layers import Layer


def forward_flops(config: Config, batch: Mapping[str, np.ndarray]) -> float:
    """Operations of the forward pass over a host batch: a product of [m, k] and [k, n] counts 2 m k n.

    Counted are products with weights on tokens and patches that are no pads, and attention on pairs that may see each
    other, in sliding layers those in the window; not what an implementation does beyond that, nor norms and
    activations. Heads of multi-token prediction count as if they were trained.
    """
    text, vision = config.text, config.vision
    documents = run_lengths(batch["document_ids"])
    head, ahead = text.hidden_size * text.vocab_size, len(text.mtp_layers)
    per_token = (1 + ahead) * head + ahead * 2 * text.hidden_size**2
    flops = 0.0
    for layer in (*text.layers, *text.mtp_layers):
        per_token += _layer(text, layer)
        pairs = causal_pairs(documents, text.sliding_window if layer.sliding else None)
        flops += 4 * text.heads(layer) * text.head_dim * pairs
    flops += 2 * per_token * documents.sum()
    if "vision_segment_ids" in batch:
        views = run_lengths(batch["vision_segment_ids"])
        flops += 2 * _patch(vision, text.hidden_size) * views.sum()
        flops += 4 * vision.num_hidden_layers * vision.hidden_size * np.square(views).sum()
    return float(flops)


def _layer(text: TextConfig, layer: Layer) -> int:
    """Multiplications of a token in a decoder layer, attention's pairs aside."""
    heads = text.heads(layer)
    attention = 2 * (heads + text.num_key_value_heads) * text.head_dim + heads  # the last are the gates
    mlp = 3 * text.intermediate_size
    if layer.sparse:
        widths = text.num_experts_per_tok * text.moe_intermediate_size + text.share_expert_dim
        mlp = text.n_routed_experts + 3 * widths
    return text.hidden_size * (attention + mlp)


def _patch(vision: VisionConfig, out: int) -> float:
    """Multiplications of a patch in the tower and, a share of those of its block, in the convolutions behind it."""
    size = vision.hidden_size
    layers = vision.num_hidden_layers * (4 * size * size + 2 * size * vision.intermediate_size)
    convolutions = 9 * size * 2 * size / 4 + 18 * size * 4 * size / 16
    return vision.patch_dim * size + layers + convolutions + 4 * size * out / 16
