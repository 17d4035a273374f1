"""The names of Gemma 4's tensors on disk: one table for loading, saving and naming gradients."""

from __future__ import annotations

from cpjax.models.common.checkpoint import Weight
from cpjax.models.gemma4.config import SLIDING, AudioConfig, Config, TextConfig, VisionConfig

DROPPED = r"lm_head\.weight$|model\.language_model\.layers\.\d+\.self_attn\.(k_proj|v_proj|k_norm)\.weight$"
"""Tensors that are ignored on load: the head, which is tied, and those of layers that share keys and values."""

_TEXT = "model.language_model."
_VISION = "model.vision_tower."

_MODEL = {
    "embed_tokens": _TEXT + "embed_tokens.weight",
    "norm.weight": _TEXT + "norm.weight",
    "visual.input_proj.kernel": _VISION + "patch_embedder.input_proj.weight",
    "visual.pos_embed": _VISION + "patch_embedder.position_embedding_table",
    "visual.projection.kernel": "model.embed_vision.embedding_projection.weight",
}
_AUDIO = "model.audio_tower."
_AUDIO_MODEL = {
    "audio.layer0.conv": _AUDIO + "subsample_conv_projection.layer0.conv.weight",
    "audio.layer0.norm": _AUDIO + "subsample_conv_projection.layer0.norm.weight",
    "audio.layer1.conv": _AUDIO + "subsample_conv_projection.layer1.conv.weight",
    "audio.layer1.norm": _AUDIO + "subsample_conv_projection.layer1.norm.weight",
    "audio.input_proj_linear.kernel": _AUDIO + "subsample_conv_projection.input_proj_linear.weight",
    "audio.output_proj.kernel": _AUDIO + "output_proj.weight",
    "audio.output_proj.bias": _AUDIO + "output_proj.bias",
    "audio.projection.kernel": "model.embed_audio.embedding_projection.weight",
}
_STANDARDIZE = {"visual.std_bias": _VISION + "std_bias", "visual.std_scale": _VISION + "std_scale"}
_PER_LAYER = {
    "per_layer_embed_tokens": _TEXT + "embed_tokens_per_layer.weight",
    "per_layer_model_projection.kernel": _TEXT + "per_layer_model_projection.weight",
    "per_layer_projection_norm.weight": _TEXT + "per_layer_projection_norm.weight",
}

# Of a layer: the same path here and there, but that matrices are called kernel here.
_NORMS = (
    "input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm",
)  # fmt: skip
_MIXTURE_NORMS = (
    "post_feedforward_layernorm_1", "pre_feedforward_layernorm_2", "post_feedforward_layernorm_2",
)  # fmt: skip
_MLP = ("gate_proj", "up_proj", "down_proj")
_VISION_ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
_AUDIO_NORMS = (
    "feed_forward1.pre_layer_norm", "feed_forward1.post_layer_norm", "norm_pre_attn", "norm_post_attn",
    "lconv1d.pre_layer_norm", "lconv1d.conv_norm", "feed_forward2.pre_layer_norm", "feed_forward2.post_layer_norm",
    "norm_out",
)  # fmt: skip
_AUDIO_LINEARS = (
    "feed_forward1.ffw_layer_1", "feed_forward1.ffw_layer_2", "self_attn.q_proj", "self_attn.k_proj",
    "self_attn.v_proj", "self_attn.post", "lconv1d.linear_start", "lconv1d.linear_end", "feed_forward2.ffw_layer_1",
    "feed_forward2.ffw_layer_2",
)  # fmt: skip
_BOUNDS = ("input_min", "input_max", "output_min", "output_max")
_WIDE = ("std_bias", "std_scale", "self_attn.per_dim_scale", "router.per_expert_scale", *_BOUNDS)
"""Parameters that may not be rounded, see `Weight`: statistics, and scales of what is float32."""


def weights(config: Config) -> list[Weight]:
    """Every parameter of the model with the tensors that hold it; kernels are [in, out] here and [out, in] on disk."""
    text, vision = config.text, config.vision
    names = dict(_MODEL)
    if vision.standardize:
        names |= _STANDARDIZE
    if text.hidden_size_per_layer_input:
        names |= _PER_LAYER
    if config.audio:
        names |= _AUDIO_MODEL
    shapes = {"visual.pos_embed": (2, vision.position_embedding_size, vision.hidden_size)}
    table = [
        Weight(path, (name,), 0, path.endswith("kernel"), shapes.get(path), wide=path.endswith(_WIDE))
        for path, name in names.items()
    ]
    for prefix, stack in zip(("layers", "shared_layers"), text.stacks, strict=False):
        period = len(stack.pattern)
        for slot, kind in enumerate(stack.pattern):
            layers = range(stack.first + slot, stack.first + stack.groups * period, period)
            own = _decoder_layer(text, kind, shared=stack.first >= text.first_shared)
            table += _stacked(f"{prefix}.slots.{slot}.", _TEXT + "layers.", layers, own)
            if text.enable_moe_block:
                table += _experts(f"{prefix}.slots.{slot}.mixture.experts.", layers)
    layers = range(vision.num_hidden_layers)
    table += _stacked("visual.blocks.", _VISION + "encoder.layers.", layers, _vision_block(vision))
    if config.audio:
        layers = range(config.audio.num_hidden_layers)
        table += _stacked("audio.blocks.", _AUDIO + "layers.", layers, _audio_layer(config.audio))
    return table


def _stacked(prefix: str, disk: str, layers: range, names: dict[str, str]) -> list[Weight]:
    """The weights of stacked layers: paths below `prefix`, names below `disk` and the number of the layer."""
    return [
        Weight(
            prefix + path,
            tuple(f"{disk}{layer}.{name}" for layer in layers),
            stacked=1,
            transpose=path.endswith("kernel"),
            wide=path.endswith(_WIDE),
        )
        for path, name in names.items()
    ]


def _experts(prefix: str, layers: range) -> list[Weight]:
    """Kernels of all experts of a layer in one tensor, those of gates and of what they gate one after the other."""
    return [
        Weight(
            prefix + path,
            tuple(f"{_TEXT}layers.{layer}.experts.{name}" for layer in layers),
            stacked=1,
            transpose=True,
            part=part,
        )
        for path, name, part in (
            ("gate_proj", "gate_up_proj", (0, 2)),
            ("up_proj", "gate_up_proj", (1, 2)),
            ("down_proj", "down_proj", (0, 1)),
        )
    ]


def _clipped(path: str, name: str, bounds: bool) -> dict[str, str]:
    """A `ClippedLinear`."""
    own = {f"{path}.kernel": f"{name}.linear.weight"}
    return own | ({f"{path}.{bound}": f"{name}.{bound}" for bound in _BOUNDS} if bounds else {})


def _decoder_layer(config: TextConfig, kind: str, shared: bool) -> dict[str, str]:
    norms = [*_NORMS, "self_attn.q_norm"]
    matrices = ["self_attn.q_proj", "self_attn.o_proj", *(f"mlp.{name}" for name in _MLP)]
    if not shared:
        norms.append("self_attn.k_norm")
        matrices.append("self_attn.k_proj")
        if kind == SLIDING or not config.attention_k_eq_v:
            matrices.append("self_attn.v_proj")
    if config.hidden_size_per_layer_input:
        norms.append("post_per_layer_input_norm")
        matrices += ["per_layer_input_gate", "per_layer_projection"]
    mixture = {}
    if config.enable_moe_block:
        mixture = {f"mixture.{name}.weight": f"{name}.weight" for name in _MIXTURE_NORMS}
        mixture |= {f"mixture.router.{name}": f"router.{name}" for name in ("scale", "per_expert_scale")}
        mixture["mixture.router.proj.kernel"] = "router.proj.weight"
    return {
        **mixture,
        **{f"{name}.weight": f"{name}.weight" for name in norms},
        **{f"{name}.kernel": f"{name}.weight" for name in matrices},
        "layer_scalar": "layer_scalar",
    }


def _vision_block(config: VisionConfig) -> dict[str, str]:
    names = {f"{name}.weight": f"{name}.weight" for name in (*_NORMS, "self_attn.q_norm", "self_attn.k_norm")}
    for name in _VISION_ATTENTION:
        names |= _clipped(f"self_attn.{name}", f"self_attn.{name}", config.use_clipped_linears)
    for name in _MLP:
        names |= _clipped(name, f"mlp.{name}", config.use_clipped_linears)
    return names


def _audio_layer(config: AudioConfig) -> dict[str, str]:
    names = {f"{name}.weight": f"{name}.weight" for name in _AUDIO_NORMS}
    for name in _AUDIO_LINEARS:
        names |= _clipped(name, name, config.use_clipped_linears)
    return names | {
        "self_attn.relative_k_proj.kernel": "self_attn.relative_k_proj.weight",
        "self_attn.per_dim_scale": "self_attn.per_dim_scale",
        "lconv1d.depthwise_conv1d": "lconv1d.depthwise_conv1d.weight",
    }
