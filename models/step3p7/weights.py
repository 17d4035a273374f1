"""The names of Step 3.7's tensors on disk: one table for loading, saving and naming gradients."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable

from cpjax.models.common.checkpoint import Weight
from cpjax.models.step3p7.config import Config
from cpjax.models.step3p7.layers import Layer

DROPPED = r"lm_head\.weight$|.*\.shared_head\.(head|output)\.weight$|.*\.embed_tokens\.weight$"
"""Tensors that are ignored on load: the head of a tied model, and copies of head and embeddings beside the heads of
multi-token prediction."""

_MODEL = {
    "embed_tokens": "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    "projector.kernel": "vit_large_projector.weight",
    "visual.conv1.kernel": "vision_model.conv1.weight",
    "visual.pos_embed": "vision_model.positional_embedding",
    "visual.ln_pre.weight": "vision_model.ln_pre.weight",
    "visual.ln_pre.bias": "vision_model.ln_pre.bias",
    "visual.downsampler1.kernel": "vision_model.vit_downsampler1.weight",
    "visual.downsampler1.bias": "vision_model.vit_downsampler1.bias",
    "visual.downsampler2.kernel": "vision_model.vit_downsampler2.weight",
    "visual.downsampler2.bias": "vision_model.vit_downsampler2.bias",
}

# Below layers.{stack}.slots.{slot} and model.layers.{layer}.
_EVERY_LAYER = {
    "input_layernorm.weight": "input_layernorm.weight",
    "post_attention_layernorm.weight": "post_attention_layernorm.weight",
    "self_attn.q_proj.kernel": "self_attn.q_proj.weight",
    "self_attn.k_proj.kernel": "self_attn.k_proj.weight",
    "self_attn.v_proj.kernel": "self_attn.v_proj.weight",
    "self_attn.g_proj.kernel": "self_attn.g_proj.weight",
    "self_attn.o_proj.kernel": "self_attn.o_proj.weight",
    "self_attn.q_norm.weight": "self_attn.q_norm.weight",
    "self_attn.k_norm.weight": "self_attn.k_norm.weight",
}
_DENSE_LAYER = {
    "mlp.gate_proj.kernel": "mlp.gate_proj.weight",
    "mlp.up_proj.kernel": "mlp.up_proj.weight",
    "mlp.down_proj.kernel": "mlp.down_proj.weight",
}
_SPARSE_LAYER = {
    "mlp.gate.kernel": "moe.gate.weight",
    "mlp.router_bias": "moe.router_bias",
    "mlp.experts.gate_proj": "moe.gate_proj.weight",
    "mlp.experts.up_proj": "moe.up_proj.weight",
    "mlp.experts.down_proj": "moe.down_proj.weight",
    "mlp.share_expert.gate_proj.kernel": "share_expert.gate_proj.weight",
    "mlp.share_expert.up_proj.kernel": "share_expert.up_proj.weight",
    "mlp.share_expert.down_proj.kernel": "share_expert.down_proj.weight",
}

_WIDE = ("mlp.gate.kernel", "mlp.router_bias")
"""Parameters that may not be rounded, see `Weight`."""

# Below mtp.{head} and model.layers.{layers + head}.
_AHEAD = {
    "enorm.weight": "enorm.weight",
    "hnorm.weight": "hnorm.weight",
    "eh_proj.kernel": "eh_proj.weight",
    "norm.weight": "shared_head.norm.weight",
}

_ATTENTION = "visual.blocks.attn."

_MODULES = (
    ("vision_model.", "model.vision_model."), ("vit_large_projector.", "model.multi_modal_projector."),
    ("model.embed_tokens.", "model.language_model.embed_tokens."), ("model.layers.", "model.language_model.layers."),
    ("model.norm.", "model.language_model.norm."), (".moe.gate.weight", ".mlp.gate.weight"),
    (".moe.router_bias", ".mlp.gate.e_score_correction_bias"), (".moe.down_proj.weight", ".mlp.experts.down_proj"),
    (".moe.gate_proj.weight", ".mlp.experts.gate_up_proj"), (".moe.up_proj.weight", ".mlp.experts.gate_up_proj"),
    (".share_expert.", ".mlp.shared_experts."), (".conv1.weight", ".embeddings.patch_embedding.weight"),
    (".positional_embedding", ".embeddings.position_embedding.weight"), (".transformer.resblocks.", ".layers."),
    (".ln_pre.", ".pre_layernorm."), (".vit_downsampler", ".downsampler"), (".ls_1.gamma", ".lambda_1"),
    (".ls_2.gamma", ".lambda_2"), (".mlp.c_fc.", ".mlp.fc1."), (".mlp.c_proj.", ".mlp.fc2."),
    (".attn.out_proj.", ".self_attn.out_proj."), (".ln_1.", ".layernorm_before."), (".ln_2.", ".layernorm_after."),
)  # fmt: skip
"""Parts of names as released, and as transformers calls its modules."""

# Below visual.blocks and vision_model.transformer.resblocks.{layer}.
_VISION_BLOCK = {
    "ln_1.weight": "ln_1.weight",
    "ln_1.bias": "ln_1.bias",
    "attn.out_proj.kernel": "attn.out_proj.weight",
    "attn.out_proj.bias": "attn.out_proj.bias",
    "ls_1": "ls_1.gamma",
    "ln_2.weight": "ln_2.weight",
    "ln_2.bias": "ln_2.bias",
    "c_fc.kernel": "mlp.c_fc.weight",
    "c_fc.bias": "mlp.c_fc.bias",
    "c_proj.kernel": "mlp.c_proj.weight",
    "c_proj.bias": "mlp.c_proj.bias",
    "ls_2": "ls_2.gamma",
}


_BY_LAYER = (
    "layer_types", "mlp_layer_types", "swiglu_limits", "swiglu_limits_shared", "rope_theta", "partial_rotary_factors",
)  # fmt: skip
"""Lists in a text_config with an entry for each layer."""


def weights(config: Config) -> list[Weight]:
    """Every parameter of the model with the tensors that hold it; kernels are [in, out] here and [out, in] on disk.

    As released.
    """
    rows = _rows(config, str)
    blocks = [f"vision_model.transformer.resblocks.{i}.attn.in_proj_" for i in range(config.vision.num_hidden_layers)]
    for path, name in (("kernel", "weight"), ("bias", "bias")):
        names = tuple(block + name for block in blocks)
        for i, part in enumerate("qkv"):
            rows.append(Weight(f"{_ATTENTION}{part}_proj.{path}", names, 1, path == "kernel", part=(i, 3)))
    return rows


def stacked_weights(config: Config) -> list[Weight]:
    """The same, as transformers saves it with `save_original_format=False`: each tensor by the name of its module."""
    rows = []
    for row in _rows(config, _module_name):
        if row.path.endswith(("experts.gate_proj", "experts.up_proj")):
            row = dataclasses.replace(row, part=(int(row.path.endswith("up_proj")), 2))
        rows.append(row)
    vision = config.vision
    blocks = [f"model.vision_model.layers.{i}.self_attn." for i in range(vision.num_hidden_layers)]
    heads, half = vision.num_attention_heads, vision.hidden_size // vision.num_attention_heads // 2
    # Modules have the halves of the rotated pairs half a head apart.
    order = tuple(
        2 * half * head + half * side + pair for head in range(heads) for pair in range(half) for side in (0, 1)
    )
    for path, name in (("kernel", "weight"), ("bias", "bias")):
        for part in "qkv":
            names = tuple(f"{block}{part}_proj.{name}" for block in blocks)
            kept = () if part == "v" else order
            rows.append(Weight(f"{_ATTENTION}{part}_proj.{path}", names, 1, path == "kernel", order=kept))
    return rows


def without_absent(config: Config, names: Iterable[str]) -> Config:
    """The configuration without heads of multi-token prediction if none of these tensors is theirs.

    They lie behind the layers in released folders; transformers drops them when it saves.
    """
    first = f"model.layers.{config.text.num_hidden_layers}."
    if not config.text.num_nextn_predict_layers or any(name.startswith(first) for name in names):
        return config
    source, count = config.to_dict(), config.text.num_hidden_layers
    text = {name: value for name, value in source["text_config"].items() if not name.startswith("mtp_")}
    text |= {name: 0 for name in ("num_nextn_predict_layers", "num_mtp_layers") if name in text}
    for name in _BY_LAYER:  # which may go on with the layers of the heads
        if isinstance(text.get(name), list):
            text[name] = text[name][:count]
    return Config.from_dict({**source, "text_config": text})


def _rows(config: Config, rename: Callable[[str], str]) -> list[Weight]:
    """All but the attention of the tower, whose parts differ between layouts; names are the released ones, renamed."""
    text, vision = config.text, config.vision
    size, side = vision.hidden_size, vision.patch_size
    reshaped = {
        "visual.conv1.kernel": (size, vision.num_channels, side, side),
        "visual.downsampler1.kernel": (2 * size, size, 3, 3),
        "visual.downsampler2.kernel": (4 * size, 2 * size, 3, 3),
    }

    def row(path: str, names: Iterable[str], stacked: int = 1) -> Weight:
        transposed = path.endswith("kernel") or ".experts." in path
        names, shape = tuple(map(rename, names)), reshaped.get(path)
        return Weight(path, names, stacked, transposed, shape, wide=path.endswith(_WIDE))

    rows = [row(path, [name], 0) for path, name in _MODEL.items()]
    if config.projector_bias:
        rows.append(row("projector.bias", ["vit_large_projector.bias"], 0))
    if not config.tie_word_embeddings:
        rows.append(row("lm_head.kernel", ["lm_head.weight"], 0))
    for number, stack in enumerate(text.stacks):
        period = len(stack.pattern)
        for slot, layer in enumerate(stack.pattern):
            layers = range(stack.start + slot, stack.start + period * stack.repeats, period)
            rows += [
                row(f"layers.{number}.slots.{slot}.{path}", [f"model.layers.{i}.{name}" for i in layers])
                for path, name in _layer_names(layer).items()
            ]
    for number, layer in enumerate(text.mtp_layers):
        names = {**_AHEAD, **{f"layer.{path}": name for path, name in _layer_names(layer).items()}}
        prefix = f"model.layers.{text.num_hidden_layers + number}."
        rows += [row(f"mtp.{number}.{path}", [prefix + name]) for path, name in names.items()]
    for path, name in _VISION_BLOCK.items():
        blocks = range(vision.num_hidden_layers)
        rows.append(row(f"visual.blocks.{path}", [f"vision_model.transformer.resblocks.{i}.{name}" for i in blocks]))
    return rows


def _layer_names(layer: Layer) -> dict[str, str]:
    return {**_EVERY_LAYER, **(_SPARSE_LAYER if layer.sparse else _DENSE_LAYER)}


def _module_name(name: str) -> str:
    """The name in transformers' modules of a tensor of a released folder."""
    for old, new in _MODULES:
        name = name.replace(old, new)
    return name
