"""The names of Step 3.7's tensors on disk: one table for loading, saving and naming gradients."""

from __future__ import annotations

from collections.abc import Sequence

from cpjax.models.common.checkpoint import Weight
from cpjax.models.step3p7.config import Config, Layer

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

# Below mtp.{head} and model.layers.{layers + head}.
_AHEAD = {
    "enorm.weight": "enorm.weight",
    "hnorm.weight": "hnorm.weight",
    "eh_proj.kernel": "eh_proj.weight",
    "norm.weight": "shared_head.norm.weight",
}

# Below visual.blocks and vision_model.transformer.resblocks.{layer}.
_VISION_BLOCK = {
    "ln_1.weight": "ln_1.weight",
    "ln_1.bias": "ln_1.bias",
    "attn.in_proj.kernel": "attn.in_proj_weight",
    "attn.in_proj.bias": "attn.in_proj_bias",
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


def weights(config: Config) -> list[Weight]:
    """Every parameter of the model with the tensors that hold it; kernels are [in, out] here and [out, in] on disk."""
    text, vision = config.text, config.vision
    size, side = vision.hidden_size, vision.patch_size
    reshaped = {
        "visual.conv1.kernel": (size, vision.num_channels, side, side),
        "visual.downsampler1.kernel": (2 * size, size, 3, 3),
        "visual.downsampler2.kernel": (4 * size, 2 * size, 3, 3),
    }

    def row(prefix: str, path: str, names: tuple[str, ...], stacked: bool) -> Weight:
        transposed = path.endswith("kernel") or ".experts." in path
        return Weight(prefix + path, names, stacked, transposed, reshaped.get(path))

    table = [row("", path, (name,), False) for path, name in _MODEL.items()]
    if config.projector_bias:
        table.append(row("", "projector.bias", ("vit_large_projector.bias",), False))
    if not config.tie_word_embeddings:
        table.append(row("", "lm_head.kernel", ("lm_head.weight",), False))
    for number, stack in enumerate(text.stacks):
        period = len(stack.pattern)
        for slot, layer in enumerate(stack.pattern):
            layers = range(stack.start + slot, stack.start + period * stack.repeats, period)
            table += [
                row(f"layers.{number}.slots.{slot}.", path, tuple(f"model.layers.{i}.{name}" for i in layers), True)
                for path, name in _layer_names(layer).items()
            ]
    for number, layer in enumerate(text.mtp_layers):
        names = {**_AHEAD, **{f"layer.{path}": name for path, name in _layer_names(layer).items()}}
        table += [
            row(f"mtp.{number}.", path, (f"model.layers.{text.num_hidden_layers + number}.{name}",), True)
            for path, name in names.items()
        ]
    blocks: Sequence[int] = range(vision.num_hidden_layers)
    table += [
        row("visual.blocks.", path, tuple(f"vision_model.transformer.resblocks.{i}.{name}" for i in blocks), True)
        for path, name in _VISION_BLOCK.items()
    ]
    return table


def _layer_names(layer: Layer) -> dict[str, str]:
    return {**_EVERY_LAYER, **(_SPARSE_LAYER if layer.sparse else _DENSE_LAYER)}
