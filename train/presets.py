"""The models that the default job trains from scratch: of each family a small one that reads the digit documents.

A token is a word, an image one token. What sets a family apart is kept: its kinds of layers, experts and vision tower.
Only the sizes are ours.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np

from cpjax.models import family
from cpjax.train.config import ModelConfig
from cpjax.train.digits import ID, VOCABULARY

WINDOW = 8
"""Tokens that a sliding layer sees: an image and its name, or a whole question."""
EXPERTS = {"number": 8, "chosen": 2}
"""Of each layer that has some; each is half as wide as a layer's MLP would be."""


@dataclasses.dataclass(frozen=True)
class Preset:
    """The small model of a family.

    Attributes:
        source: config.json for these sizes.
        pixels: of an image of one channel [H, W], 0 .. 1, what the family's `patchify` takes.
        unused: sizes that mean nothing to the family.
    """

    source: Callable[[ModelConfig], dict[str, Any]]
    pixels: Callable[[np.ndarray], Any]
    unused: tuple[str, ...] = ()


def model_config(sizes: ModelConfig) -> Any:
    """The configuration of the model of these sizes, for the words and images of the digit documents.

    Raises:
        ValueError: a size that is given though it means nothing to the family, or that does not fit the others.
    """
    preset = PRESETS[sizes.family]
    given = set(sizes.sizes_given())
    if useless := [name for name in preset.unused if f"--model.{name}" in given]:
        raise ValueError(f"--model.{useless[0]} is given, but {sizes.family} has no linear attention: leave it out")
    return family(sizes.family).Config.from_dict(preset.source(sizes))


def media(config: Any, image: np.ndarray) -> Any:
    """An image [H, W], 0 .. 1, as the patches of the model's tower, three equal channels."""
    pixels = PRESETS[config.model_type].pixels(image)
    return family(config.model_type).patchify(config.vision, pixels)


def _channels(image: np.ndarray) -> np.ndarray:
    return np.repeat(image[..., None], 3, axis=-1)


def _signed(image: np.ndarray) -> np.ndarray:
    return _channels(2 * image - 1)


def _text(sizes: ModelConfig) -> dict[str, Any]:
    """Sizes of a language model, by the names that all families have for them."""
    return {
        "vocab_size": len(VOCABULARY),
        "pad_token_id": ID["<pad>"],
        "hidden_size": sizes.hidden_size,
        "intermediate_size": 3 * sizes.hidden_size,
        "num_hidden_layers": sizes.layers,
        "num_attention_heads": sizes.heads,
        "num_key_value_heads": sizes.kv_heads,
        "head_dim": sizes.head_dim,
    }


def _qwen3_5(sizes: ModelConfig) -> dict[str, Any]:
    """Three layers of linear attention, then one of full attention; an image is 2 x 2 patches of 4 x 4 pixels."""
    rotated = sizes.head_dim // 8  # frequencies; a quarter of each head turns
    height = rotated // 4
    return {
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "model_type": "qwen3_5",
        "tie_word_embeddings": False,
        "image_token_id": ID["<image>"],
        "video_token_id": ID["<video>"],
        "vision_start_token_id": ID["<vision_start>"],
        "vision_end_token_id": ID["<vision_end>"],
        "text_config": {
            **_text(sizes),
            "linear_num_key_heads": sizes.linear_heads,
            "linear_num_value_heads": sizes.linear_heads,
            "linear_key_head_dim": sizes.linear_head_dim,
            "linear_value_head_dim": sizes.linear_head_dim,
            "rope_parameters": {
                "rope_theta": 10000.0,
                "partial_rotary_factor": 0.25,
                "mrope_section": [rotated - 2 * height, height, height],
            },
        },
        "vision_config": {
            "depth": sizes.vision_layers,
            "hidden_size": sizes.vision_hidden_size,
            "intermediate_size": 2 * sizes.vision_hidden_size,
            "num_heads": sizes.vision_heads,
            "patch_size": 4,
            "out_hidden_size": sizes.hidden_size,
            "num_position_embeddings": 16,
        },
    }


def _qwen3_5_moe(sizes: ModelConfig) -> dict[str, Any]:
    """The same with experts in each layer, and the loss that balances them."""
    source = _qwen3_5(sizes)
    text = source["text_config"]
    width = text.pop("intermediate_size") // 2
    text |= {
        "num_experts": EXPERTS["number"],
        "num_experts_per_tok": EXPERTS["chosen"],
        "moe_intermediate_size": width,
        "shared_expert_intermediate_size": width,
        "output_router_logits": True,
    }
    return source | {"architectures": ["Qwen3_5MoeForConditionalGeneration"], "model_type": "qwen3_5_moe"}


def _layer_types(layers: int) -> list[str]:
    """Every second layer and the last are full attention, the others sliding."""
    return ["sliding_attention" if (i + 1) % 2 and i + 1 < layers else "full_attention" for i in range(layers)]


def _gemma4(sizes: ModelConfig) -> dict[str, Any]:
    """Sliding layers in turn with full ones, whose heads are twice as wide; an image is 2 x 2 patches of 4 x 4."""
    types = _layer_types(sizes.layers)
    full = {str(i): {"head_dim": 2 * sizes.head_dim} for i, kind in enumerate(types) if kind == "full_attention"}
    return {
        "architectures": ["Gemma4ForConditionalGeneration"],
        "model_type": "gemma4",
        "tie_word_embeddings": True,
        "boi_token_id": ID["<vision_start>"],
        "eoi_token_id": ID["<vision_end>"],
        "image_token_id": ID["<image>"],
        "video_token_id": ID["<video>"],
        "audio_config": None,
        "text_config": {
            **_text(sizes),
            "layer_types": types,
            "per_layer_config": full,
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
                "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 1 / 16, "rope_theta": 1e6},
            },
            "sliding_window": WINDOW,
            "use_bidirectional_attention": "vision",
            "vocab_size_per_layer_input": len(VOCABULARY),
            "hidden_size_per_layer_input": 0,
        },
        "vision_config": {
            "num_hidden_layers": sizes.vision_layers,
            "hidden_size": sizes.vision_hidden_size,
            "intermediate_size": 2 * sizes.vision_hidden_size,
            "num_attention_heads": sizes.vision_heads,
            "num_key_value_heads": sizes.vision_heads,
            "head_dim": sizes.vision_hidden_size // sizes.vision_heads,
            "patch_size": 4,
            "pooling_kernel_size": 2,
            "position_embedding_size": 4,
        },
    }


def _step3p7(sizes: ModelConfig) -> dict[str, Any]:
    """Sliding layers, with more heads, in turn with full ones; all but the first have experts.

    An image is a single view of 4 x 4 patches of 2 x 2 pixels.
    """
    types = _layer_types(sizes.layers)
    width = 3 * sizes.hidden_size
    return {
        "architectures": ["Step3p7ForConditionalGeneration"],
        "model_type": "step3p7",
        "tie_word_embeddings": False,
        "image_token_id": ID["<image>"],
        "text_config": {
            **_text(sizes),
            "model_type": "step3p5",
            "num_sliding_attention_heads": sizes.heads + sizes.kv_heads,
            "query_pre_attn_scalar": sizes.head_dim / 16,  # four times as sharp as usual: names, once seen, stand out
            "sliding_window": WINDOW,
            "layer_types": types,
            "mlp_layer_types": ["dense", *["sparse"] * (sizes.layers - 1)],
            "n_routed_experts": EXPERTS["number"],
            "num_experts_per_tok": EXPERTS["chosen"],
            "moe_intermediate_size": width // 2,
            "share_expert_dim": width // 2,
            "rope_parameters": {
                "full_attention": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 1 / 8},
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 1.0},
            },
        },
        "vision_config": {
            "model_type": "step3p5_vision",
            "num_hidden_layers": sizes.vision_layers,
            "hidden_size": sizes.vision_hidden_size,
            "mlp_ratio": 2.0,
            "num_attention_heads": sizes.vision_heads,
            "image_size": 8,
            "patch_size": 2,
        },
    }


_LINEAR = ("linear_heads", "linear_head_dim")

PRESETS = {
    "qwen3_5": Preset(_qwen3_5, _signed),
    "qwen3_5_moe": Preset(_qwen3_5_moe, _signed),
    "gemma4": Preset(_gemma4, _channels, _LINEAR),
    "step3p7": Preset(_step3p7, lambda image: [_signed(image)], _LINEAR),
}
