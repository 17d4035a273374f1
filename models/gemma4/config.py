"""Configuration of a Gemma 4 vision-language model, read from and written to config.json."""

from __future__ import annotations

import copy
import dataclasses
import itertools
from collections.abc import Mapping
from typing import Any, NamedTuple

from cpjax.models.common.hf_config import mapping, over, plain, positive, read

SLIDING, FULL = "sliding_attention", "full_attention"
_MOE = ("num_experts", "top_k_experts", "moe_intermediate_size")


class Stack(NamedTuple):
    """Consecutive layers: a pattern of types, repeated.

    Attributes:
        first: number of the first layer.
        pattern: types of the layers of a group, the shortest that repeats.
        groups: how often.
    """

    first: int
    pattern: tuple[str, ...]
    groups: int


@dataclasses.dataclass(frozen=True)
class TextConfig:
    """The language model; names as in config.json, where the last three live in `rope_parameters`.

    `global_head_dim` and `num_global_key_value_heads` are those of full-attention layers, which newer files keep in
    `per_layer_config`.
    """

    vocab_size: int = 262144
    hidden_size: int = 2304
    intermediate_size: int = 9216
    num_hidden_layers: int = 30
    num_attention_heads: int = 8
    num_key_value_heads: int = 4
    head_dim: int = 256
    global_head_dim: int = 512
    num_global_key_value_heads: int | None = None  # default: num_key_value_heads; given only with attention_k_eq_v
    rms_norm_eps: float = 1e-6
    pad_token_id: int = 0
    sliding_window: int = 512
    layer_types: tuple[str, ...] | None = None  # default: every sixth layer and the last are full attention
    final_logit_softcapping: float | None = None
    use_bidirectional_attention: str | None = None
    attention_k_eq_v: bool = False
    vocab_size_per_layer_input: int = 262144
    hidden_size_per_layer_input: int = 256
    num_kv_shared_layers: int = 0
    use_double_wide_mlp: bool = False
    enable_moe_block: bool = False
    num_experts: int = 0
    top_k_experts: int = 0
    moe_intermediate_size: int = 0
    sliding_rope_theta: float = 10_000.0
    full_rope_theta: float = 1_000_000.0
    partial_rotary_factor: float = 0.25

    def __post_init__(self) -> None:
        if self.layer_types is None:
            types = tuple(SLIDING if (i + 1) % 6 else FULL for i in range(self.num_hidden_layers))
            object.__setattr__(self, "layer_types", (*types[:-1], FULL))
        positive(self, "text_config", ("hidden_size_per_layer_input", "num_kv_shared_layers", "pad_token_id", *_MOE))
        unknown = sorted(set(self.types) - {SLIDING, FULL})
        if unknown or len(self.types) != self.num_hidden_layers or self.types[-1] != FULL:
            raise ValueError(
                f"text_config.layer_types has {len(self.types)} entries{f', among them {unknown}' if unknown else ''}: "
                f"it needs one of {SLIDING!r} and {FULL!r} for each of the {self.num_hidden_layers} layers, the last "
                f"{FULL!r}"
            )
        for kind in (SLIDING, FULL):
            if self.num_attention_heads % self.kv_heads(kind):
                raise ValueError(
                    f"text_config.num_attention_heads={self.num_attention_heads} must be a multiple of the "
                    f"{self.kv_heads(kind)} key heads of {kind}"
                )
            if self.width(kind) % 2:
                raise ValueError(f"text_config has heads of width {self.width(kind)} in {kind}: it must be even")
        if self.use_bidirectional_attention not in (None, "vision"):
            raise ValueError(
                f"text_config.use_bidirectional_attention={self.use_bidirectional_attention!r} is not supported: "
                "only 'vision' and null are"
            )
        if set(self.types[self.first_shared :]) - set(self.types[: self.first_shared]):
            raise ValueError(
                f"text_config.num_kv_shared_layers={self.num_kv_shared_layers} leaves no layer of each type before "
                "them whose keys and values they could share: lower it"
            )
        if self.enable_moe_block and not 0 < self.top_k_experts <= self.num_experts * (self.moe_intermediate_size > 0):
            raise ValueError(
                f"text_config.enable_moe_block needs num_experts={self.num_experts} and moe_intermediate_size="
                f"{self.moe_intermediate_size} above 0, and top_k_experts={self.top_k_experts} in 1 .. num_experts"
            )

    @property
    def types(self) -> tuple[str, ...]:
        """`layer_types`, never None."""
        return self.layer_types or ()

    @property
    def first_shared(self) -> int:
        """Number of the first layer that shares the keys and values of an earlier one."""
        return self.num_hidden_layers - self.num_kv_shared_layers

    @property
    def stacks(self) -> tuple[Stack, ...]:
        """The layers with keys and values of their own and, if there are such, those that share them."""
        cuts = [0, self.first_shared, self.num_hidden_layers][: 3 if self.num_kv_shared_layers else 2]
        return tuple(_stack(first, self.types[first:end]) for first, end in itertools.pairwise(cuts))

    def width(self, kind: str) -> int:
        """Width of a head in layers of this type."""
        return self.global_head_dim if kind == FULL else self.head_dim

    def kv_heads(self, kind: str) -> int:
        """Key heads in layers of this type."""
        own = self.num_global_key_value_heads if kind == FULL and self.attention_k_eq_v else None
        return own or self.num_key_value_heads


@dataclasses.dataclass(frozen=True)
class VisionConfig:
    """The vision tower; names as in config.json, where `rope_theta` lives in `rope_parameters`."""

    hidden_size: int = 768
    intermediate_size: int = 3072
    num_hidden_layers: int = 16
    num_attention_heads: int = 12
    num_key_value_heads: int = 12
    head_dim: int = 64
    rms_norm_eps: float = 1e-6
    pooling_kernel_size: int = 3
    patch_size: int = 16
    position_embedding_size: int = 10240
    use_clipped_linears: bool = False
    standardize: bool = False
    rope_theta: float = 100.0

    def __post_init__(self) -> None:
        positive(self, "vision_config")
        if self.head_dim % 4:
            raise ValueError(
                f"vision_config.head_dim={self.head_dim} must be a multiple of 4: half of each head turns with the "
                "column, half with the row"
            )
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"vision_config.num_attention_heads={self.num_attention_heads} must be a multiple of "
                f"num_key_value_heads={self.num_key_value_heads}"
            )

    @property
    def patch_dim(self) -> int:
        """Values of one flattened patch: height x width x channels."""
        return 3 * self.patch_size**2

    @property
    def spatial_merge_size(self) -> int:
        """Patches along each side that become one token, by the name that all families have."""
        return self.pooling_kernel_size


@dataclasses.dataclass(frozen=True)
class AudioConfig:
    """The audio tower; names as in config.json."""

    hidden_size: int = 1024
    num_hidden_layers: int = 12
    num_attention_heads: int = 8
    subsampling_conv_channels: tuple[int, ...] = (128, 32)
    conv_kernel_size: int = 5
    residual_weight: float = 0.5
    attention_chunk_size: int = 12
    attention_context_left: int = 13
    attention_logit_cap: float = 50.0
    use_clipped_linears: bool = True
    rms_norm_eps: float = 1e-6
    gradient_clipping: float = 1e10
    output_proj_dims: int = 1536

    def __post_init__(self) -> None:
        positive(self, "audio_config")
        if self.hidden_size % (2 * self.num_attention_heads):
            raise ValueError(
                f"audio_config.hidden_size={self.hidden_size} must be a multiple of 2 x num_attention_heads="
                f"{self.num_attention_heads}"
            )
        if len(self.subsampling_conv_channels) != 2 or self.subsampling_conv_channels[0] % 4:
            raise ValueError(
                f"audio_config.subsampling_conv_channels={list(self.subsampling_conv_channels)} must be two numbers, "
                "the first of them, which is also that of mel bins, a multiple of 4"
            )
        if self.attention_context_left - 1 > self.attention_chunk_size:
            raise ValueError(
                f"audio_config.attention_context_left={self.attention_context_left} must be at most 1 more than "
                f"attention_chunk_size={self.attention_chunk_size}"
            )

    @property
    def mel_bins(self) -> int:
        """Values of a frame of sound."""
        return self.subsampling_conv_channels[0]


@dataclasses.dataclass(frozen=True)
class Config:
    """A whole model: what config.json says.

    `source` is the mapping that the configuration was read from, so that fields unknown here survive a round trip.
    """

    text: TextConfig = dataclasses.field(default_factory=TextConfig)
    vision: VisionConfig = dataclasses.field(default_factory=VisionConfig)
    audio: AudioConfig | None = None
    boi_token_id: int = 255999
    eoi_token_id: int = 258882
    image_token_id: int = 258880
    video_token_id: int = 258884
    boa_token_id: int = 256000
    eoa_token_index: int = 258883
    audio_token_id: int = 258881
    source: Mapping[str, Any] = dataclasses.field(default_factory=dict, compare=False, repr=False)

    model_type = "gemma4"

    def __post_init__(self) -> None:
        for name in ("image_token_id", "video_token_id", "audio_token_id")[: 3 if self.audio else 2]:
            if not 0 <= getattr(self, name) < self.text.vocab_size:
                raise ValueError(
                    f"{name}={getattr(self, name)} lies outside the vocabulary of {self.text.vocab_size} tokens"
                )

    @property
    def placeholder_ids(self) -> tuple[int, ...]:
        """Tokens that stand for media."""
        return (self.image_token_id, self.video_token_id, *((self.audio_token_id,) if self.audio else ()))

    @classmethod
    def from_dict(cls, source: Mapping[str, Any]) -> Config:
        """Reads the content of config.json.

        Raises:
            ValueError: another model type, or a feature or size that this implementation doesn't support.
        """
        if source.get("model_type") != cls.model_type:
            raise ValueError(f"config.json says model_type={source.get('model_type')!r}: it must be {cls.model_type!r}")
        if not source.get("vision_config"):
            raise ValueError("config.json has no vision_config: only Gemma 4 models with a vision tower are supported")
        text, vision = dict(mapping(source, "text_config")), dict(mapping(source, "vision_config"))
        audio = dict(mapping(source, "audio_config"))
        for where, part, key, needed in (
            ("text_config", text, "hidden_activation", "gelu_pytorch_tanh"),
            ("text_config", text, "attention_bias", False), ("text_config", text, "attention_dropout", 0),
            ("text_config", text, "tie_word_embeddings", True), ("config.json", source, "tie_word_embeddings", True),
            ("vision_config", vision, "hidden_activation", "gelu_pytorch_tanh"),
            ("audio_config", audio, "hidden_act", "silu"), ("audio_config", audio, "attention_context_right", 0),
        ):  # fmt: skip
            if part.get(key, needed) != needed:
                raise ValueError(f"{where}.{key}={part[key]!r} is not supported: only {needed!r} is")
        text.update({name: text.get(name) or 0 for name in _MOE})
        _read_rope(text)
        _read_layers(text)
        vision["rope_theta"] = mapping(vision, "rope_parameters").get("rope_theta", VisionConfig.rope_theta)
        return cls(
            text=read(TextConfig, text),
            vision=read(VisionConfig, vision),
            audio=read(AudioConfig, audio) if audio else None,
            **{f.name: source[f.name] for f in dataclasses.fields(cls)[3:-1] if source.get(f.name) is not None},
            source=copy.deepcopy(dict(source)),
        )

    def to_dict(self) -> dict[str, Any]:
        """The content of config.json: what was read, verbatim but for fields that were changed since."""
        if self.source and Config.from_dict(self.source) == self:
            return copy.deepcopy(dict(self.source))
        text, vision = plain(self.text), plain(self.vision)
        text["rope_parameters"] = {
            SLIDING: {"rope_type": "default", "rope_theta": text.pop("sliding_rope_theta")},
            FULL: {
                "rope_type": "proportional",
                "partial_rotary_factor": text.pop("partial_rotary_factor"),
                "rope_theta": text.pop("full_rope_theta"),
            },
        }
        vision["rope_parameters"] = {"rope_type": "axial", "rope_theta": vision.pop("rope_theta")}
        source = copy.deepcopy(dict(self.source))
        (source.get("text_config") or {}).pop("per_layer_config", None)
        return over(source, {
            "architectures": ["Gemma4ForConditionalGeneration"],
            "model_type": self.model_type,
            "tie_word_embeddings": True,
            **{f.name: getattr(self, f.name) for f in dataclasses.fields(self)[3:-1]},
            "text_config": {
                "model_type": "gemma4_text", "hidden_activation": "gelu_pytorch_tanh", "tie_word_embeddings": True,
                **text,
            },
            "vision_config": {"model_type": "gemma4_vision", "hidden_activation": "gelu_pytorch_tanh", **vision},
            "audio_config": self.audio
            and {"model_type": "gemma4_audio", "hidden_act": "silu", **plain(self.audio)},
        })  # fmt: skip


def _stack(first: int, types: tuple[str, ...]) -> Stack:
    count = len(types)
    period = next(p for p in range(1, count + 1) if count % p == 0 and types == types[:p] * (count // p))
    return Stack(first, types[:period], count // period)


def _read_rope(text: dict[str, Any]) -> None:
    """Moves `rope_parameters`, one set for each type of layer, into fields."""
    rope = mapping(text, "rope_parameters")
    for kind, needed, names in (
        (SLIDING, "default", {"rope_theta": "sliding_rope_theta"}),
        (FULL, "proportional", {"rope_theta": "full_rope_theta", "partial_rotary_factor": "partial_rotary_factor"}),
    ):
        own = mapping(rope, kind)
        if own.get("rope_type", needed) != needed or own.get("factor", 1) != 1:
            raise ValueError(f"rope_parameters of {kind} are {dict(own)}: only rope_type {needed!r} is supported")
        text.update({field: own[name] for name, field in names.items() if name in own})


def _read_layers(text: dict[str, Any]) -> None:
    """Moves what full layers have of their own from `per_layer_config`, by number of the layer, into fields."""
    own = mapping(text, "per_layer_config")
    if not own:
        return
    entries = [dict(entry) for entry in own.values()]
    full = {i for i, kind in enumerate(text.get("layer_types") or ()) if kind == FULL}
    if {int(key) for key in own} != full or any(entry != entries[0] for entry in entries):
        raise ValueError("text_config.per_layer_config must say the same of all full-attention layers, and of no other")
    for name, field in (("head_dim", "global_head_dim"), ("num_key_value_heads", "num_global_key_value_heads")):
        text[field] = entries[0].pop(name, None if field.startswith("num") else text.get("head_dim"))
    if entries[0]:
        raise ValueError(f"text_config.per_layer_config has {sorted(entries[0])}, which is not supported")
