"""The names of Qwen3.5's tensors on disk: one table for loading, saving and naming gradients."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from cpjax.models.common.checkpoint import Weight
from cpjax.models.common.qwen3_5.config import LINEAR, Config

DROPPED = r"lm_head\.weight$"
"""Tensors that are ignored on load: the head of a tied model."""

_MODEL = {
    "embed_tokens": "model.language_model.embed_tokens.weight",
    "norm.weight": "model.language_model.norm.weight",
    "visual.patch_embed.kernel": "model.visual.patch_embed.proj.weight",
    "visual.patch_embed.bias": "model.visual.patch_embed.proj.bias",
    "visual.pos_embed": "model.visual.pos_embed.weight",
    "visual.norm.weight": "model.visual.merger.norm.weight",
    "visual.norm.bias": "model.visual.merger.norm.bias",
    "visual.linear_fc1.kernel": "model.visual.merger.linear_fc1.weight",
    "visual.linear_fc1.bias": "model.visual.merger.linear_fc1.bias",
    "visual.linear_fc2.kernel": "model.visual.merger.linear_fc2.weight",
    "visual.linear_fc2.bias": "model.visual.merger.linear_fc2.bias",
}
_HEAD = {"lm_head.kernel": "lm_head.weight"}

# Below layers.slots.{slot} and model.language_model.layers.{layer}.
_BEFORE_MIXER = {"input_layernorm.weight": "input_layernorm.weight"}
_AFTER_MIXER = {"post_attention_layernorm.weight": "post_attention_layernorm.weight"}
_LINEAR_LAYER = {
    "mixer.in_proj_qkv.kernel": "linear_attn.in_proj_qkv.weight",
    "mixer.in_proj_z.kernel": "linear_attn.in_proj_z.weight",
    "mixer.in_proj_b.kernel": "linear_attn.in_proj_b.weight",
    "mixer.in_proj_a.kernel": "linear_attn.in_proj_a.weight",
    "mixer.conv1d": "linear_attn.conv1d.weight",
    "mixer.A_log": "linear_attn.A_log",
    "mixer.dt_bias": "linear_attn.dt_bias",
    "mixer.norm.weight": "linear_attn.norm.weight",
    "mixer.out_proj.kernel": "linear_attn.out_proj.weight",
}
_FULL_LAYER = {
    "mixer.q_proj.kernel": "self_attn.q_proj.weight",
    "mixer.k_proj.kernel": "self_attn.k_proj.weight",
    "mixer.v_proj.kernel": "self_attn.v_proj.weight",
    "mixer.o_proj.kernel": "self_attn.o_proj.weight",
    "mixer.q_norm.weight": "self_attn.q_norm.weight",
    "mixer.k_norm.weight": "self_attn.k_norm.weight",
}

_WIDE = ("mixer.A_log", "mixer.dt_bias", "mixer.norm.weight")
"""Parameters that may not be rounded, see `Weight`."""

# Below mtp, on both sides.
_AHEAD = {
    "pre_fc_norm_embedding.weight": "pre_fc_norm_embedding.weight",
    "pre_fc_norm_hidden.weight": "pre_fc_norm_hidden.weight",
    "fc.kernel": "fc.weight",
    "norm.weight": "norm.weight",
}

# Below visual.blocks and model.visual.blocks.{layer}.
_VISION_BLOCK = {
    "norm1.weight": "norm1.weight",
    "norm1.bias": "norm1.bias",
    "norm2.weight": "norm2.weight",
    "norm2.bias": "norm2.bias",
    "attn.qkv.kernel": "attn.qkv.weight",
    "attn.qkv.bias": "attn.qkv.bias",
    "attn.proj.kernel": "attn.proj.weight",
    "attn.proj.bias": "attn.proj.bias",
    "linear_fc1.kernel": "mlp.linear_fc1.weight",
    "linear_fc1.bias": "mlp.linear_fc1.bias",
    "linear_fc2.kernel": "mlp.linear_fc2.weight",
    "linear_fc2.bias": "mlp.linear_fc2.bias",
}


def table(config: Config, mlp: Mapping[str, str]) -> list[Weight]:
    """Every parameter with the tensors that hold it, a layer's in the order of its forward pass.

    Kernels are [in, out] here and [out, in] on disk.

    Args:
        mlp: names below a layer of the MLP's parameters and of their tensors.
    """
    text, vision = config.text, config.vision
    side, depth = vision.patch_size, vision.temporal_patch_size
    conv = 2 * text.linear_num_key_heads * text.linear_key_head_dim
    conv += text.linear_num_value_heads * text.linear_value_head_dim
    reshaped = {
        "visual.patch_embed.kernel": (vision.hidden_size, vision.in_channels, depth, side, side),
        "mixer.conv1d": (conv, 1, text.linear_conv_kernel_dim),
    }

    def row(prefix: str, path: str, names: tuple[str, ...], stacked: int) -> Weight:
        return Weight(
            prefix + path, names, stacked, path.endswith("kernel"), reshaped.get(path), wide=path in _WIDE
        )  # fmt: skip

    rows = [
        row("", path, (name,), 0) for path, name in {**_MODEL, **({} if config.tie_word_embeddings else _HEAD)}.items()
    ]
    for slot, kind in enumerate(text.types[: text.period]):
        names = {**_BEFORE_MIXER, **(_LINEAR_LAYER if kind == LINEAR else _FULL_LAYER), **_AFTER_MIXER, **mlp}
        layers = range(slot, text.num_hidden_layers, text.period)
        rows += [
            row(f"layers.slots.{slot}.", path, tuple(f"model.language_model.layers.{i}.{name}" for i in layers), 1)
            for path, name in names.items()
        ]
    if text.mtp_num_hidden_layers:
        layer = {**_BEFORE_MIXER, **_FULL_LAYER, **_AFTER_MIXER, **mlp}
        names = {**_AHEAD, **{f"layer.{path}": f"layers.0.{name}" for path, name in layer.items()}}
        rows += [row("mtp.", path, (f"mtp.{name}",), 1) for path, name in names.items()]
    rows += [
        row("visual.blocks.", path, tuple(f"model.visual.blocks.{i}.{name}" for i in range(vision.depth)), 1)
        for path, name in _VISION_BLOCK.items()
    ]
    return rows


def without_absent(config: Config, names: Iterable[str]) -> Config:
    """The configuration without the head of multi-token prediction if none of these tensors is the head's.

    transformers drops them when it saves, and leaves the configuration as it was.
    """
    if not config.text.mtp_num_hidden_layers or any(name.startswith("mtp.") for name in names):
        return config
    source = config.to_dict()
    return config.from_dict({**source, "text_config": {**source["text_config"], "mtp_num_hidden_layers": 0}})
