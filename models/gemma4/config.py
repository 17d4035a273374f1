"""Configuration of a Gemma 4 vision-language model, read from and written to config.json."""

from __future__ import annotations

import copy
import dataclasses
import itertools
from collections.abc import Mapping
from typing import Any, NamedTuple

from cpjax.models.common.hf_config import Fields, by_kind, mapping, plain, positive, read, report, report_unknown
from cpjax.models.common.rope import Rope, read_axial_theta, read_rope

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
    """The language model; names as in config.json but for the two ropes, that of full-attention layers first.

    `global_head_dim` and `num_global_key_value_heads` are those of full-attention layers, `head_dim` and
    `num_key_value_heads` those of sliding ones; newer files keep what differs in `per_layer_config`.
    """

    vocab_size: int = 262144
    hidden_size: int = 2304
    intermediate_size: int = 9216
    num_hidden_layers: int = 30
    num_attention_heads: int = 8
    num_key_value_heads: int = 4
    head_dim: int = 256
    global_head_dim: int = 512
    num_global_key_value_heads: int | None = None  # default: num_key_value_heads
    rms_norm_eps: float = 1e-6
    pad_token_id: int = 0
    max_position_embeddings: int = 131072
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
    rope: Rope = dataclasses.field(default_factory=lambda: Rope(1e6, 0.25, "proportional", (("factor", 1.0),)))
    sliding_rope: Rope = dataclasses.field(default_factory=Rope)

    def __post_init__(self) -> None:
        if self.layer_types is None:
            types = tuple(SLIDING if (i + 1) % 6 else FULL for i in range(self.num_hidden_layers))
            object.__setattr__(self, "layer_types", (*types[:-1], FULL))
        if self.num_global_key_value_heads == self.num_key_value_heads:
            object.__setattr__(self, "num_global_key_value_heads", None)
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
            rope = self.rope_of(kind)
            if rope.partial > 1 or (rope.kind != "proportional" and rope.turning(self.width(kind)) != self.width(kind)):
                raise ValueError(
                    f"rope_parameters of {kind} have rope_type={rope.kind!r} and partial_rotary_factor={rope.partial}: "
                    "only 'proportional' turns a share of a head, and that at most the whole"
                )
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
        return (self.num_global_key_value_heads if kind == FULL else None) or self.num_key_value_heads

    def rope_of(self, kind: str) -> Rope:
        """Rotary positions of layers of this type."""
        return self.rope if kind == FULL else self.sliding_rope


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
    attention_invalid_logits_value: float = -1e9
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
        # That of a masked frame: if it left it any weight, what is heard would depend on how far a sound was padded.
        if self.attention_invalid_logits_value > (most := -self.attention_logit_cap - 200):
            raise ValueError(
                f"audio_config.attention_invalid_logits_value={self.attention_invalid_logits_value} is not supported, "
                f"as masked frames would be heard: it must be at most {most}"
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
    def fields(cls) -> dict[str, Fields]:
        """What becomes of each field of config.json, by the name of the object that it is in."""
        top = Fields.of(
            "config.json", cls, also=("text_config", "vision_config", "audio_config"),
            but=("text", "vision", "audio", "source"), only={"tie_word_embeddings": True},
            unused={"vision_soft_tokens_per_image": "the processor's file says how large images are"},
        )  # fmt: skip
        text = Fields.of(
            "text_config", TextConfig, also=("rope_parameters", "per_layer_config"), but=("rope", "sliding_rope"),
            only={"hidden_activation": "gelu_pytorch_tanh", "attention_bias": False, "attention_dropout": 0},
            unused={"tie_word_embeddings": "that of the top level counts"},
        )  # fmt: skip
        vision = Fields.of(
            "vision_config", VisionConfig, also=("rope_parameters", "rope_scaling", "rope_theta"), but=("rope_theta",),
            only={
                "hidden_activation": "gelu_pytorch_tanh", "attention_bias": False, "attention_dropout": 0,
                "partial_rotary_factor": 1,
            },
            unused={"max_position_embeddings": "position_embedding_size is the size of the table"},
        )  # fmt: skip
        audio = Fields.of(
            "audio_config", AudioConfig,
            only={"hidden_act": "silu", "attention_context_right": 0},
        )  # fmt: skip
        return {fields.where: fields for fields in (top, text, vision, audio)}

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
        top = {name: value for name, value in source.items() if value is not None}
        text.update({name: text.get(name) or 0 for name in _MOE})
        for fields, part in zip(cls.fields().values(), (top, text, vision, audio), strict=True):
            fields.check(part)
        _read_layers(text)
        _read_rope(text)
        vision["rope_theta"] = read_axial_theta(vision, "vision_config", VisionConfig.rope_theta)
        return cls(
            text=read(TextConfig, text),
            vision=read(VisionConfig, vision),
            audio=read(AudioConfig, audio) if audio else None,
            **{f.name: top[f.name] for f in dataclasses.fields(cls)[3:-1] if f.name in top},
            source=copy.deepcopy(dict(source)),
        )

    def to_dict(self) -> dict[str, Any]:
        """The content of config.json: what was read, verbatim but for fields that were changed since."""
        if self.source and Config.from_dict(self.source) == self:
            return copy.deepcopy(dict(self.source))
        text, vision = plain(self.text), plain(self.vision)
        text["rope_parameters"] = {kind: self.text.rope_of(kind).to_dict() for kind in sorted(set(self.text.types))}
        own = {"head_dim": self.text.width(FULL), "num_key_value_heads": self.text.kv_heads(FULL)}
        text["per_layer_config"] = {str(i): own for i, kind in enumerate(self.text.types) if kind == FULL}
        for name in ("rope", "sliding_rope", "global_head_dim", "num_global_key_value_heads"):
            del text[name]
        vision["rope_parameters"] = {"rope_type": "axial", "rope_theta": vision.pop("rope_theta")}
        top_fields, text_fields, vision_fields, audio_fields = self.fields().values()
        return {
            **top_fields.others(self.source),
            "architectures": ["Gemma4ForConditionalGeneration"],
            "model_type": self.model_type,
            "tie_word_embeddings": True,
            **{f.name: getattr(self, f.name) for f in dataclasses.fields(self)[3:-1]},
            "text_config": {
                **text_fields.others(mapping(self.source, "text_config")),
                "model_type": "gemma4_text", "hidden_activation": "gelu_pytorch_tanh", "tie_word_embeddings": True,
                **text,
            },
            "vision_config": {
                **vision_fields.others(mapping(self.source, "vision_config")),
                "model_type": "gemma4_vision", "hidden_activation": "gelu_pytorch_tanh", **vision,
            },
            "audio_config": self.audio
            and {
                **audio_fields.others(mapping(self.source, "audio_config")),
                "model_type": "gemma4_audio", "hidden_act": "silu", **plain(self.audio),
            },
        }  # fmt: skip


def _stack(first: int, types: tuple[str, ...]) -> Stack:
    count = len(types)
    period = next(p for p in range(1, count + 1) if count % p == 0 and types == types[:p] * (count // p))
    return Stack(first, types[:period], count // period)


def _read_layers(text: dict[str, Any]) -> None:
    """Moves what full layers have of their own, as older or newer files say it, into fields; all of the types, too."""
    count = text.get("num_hidden_layers", TextConfig.num_hidden_layers)
    types = text.get("layer_types") or list(TextConfig(num_hidden_layers=count).types)
    if types[-1] == SLIDING and len(types) == count:
        report(f"text_config.layer_types ends in {SLIDING!r}: as with transformers, the last layer is {FULL!r}")
        types = [*types[:-1], FULL]
    text["layer_types"] = types
    if "per_layer_config" not in text:
        if not text.get("attention_k_eq_v"):
            text["num_global_key_value_heads"] = None
        return
    defaults = {name: text.get(name, getattr(TextConfig, name)) for name in ("head_dim", "num_key_value_heads")}
    own = by_kind(text, types, defaults)
    text.update(own.get(SLIDING, {}))
    text["global_head_dim"], text["num_global_key_value_heads"] = own.get(FULL, defaults).values()


def _read_rope(text: dict[str, Any]) -> None:
    """Moves `rope_parameters`, one set for each type of layer, into fields."""
    rope = mapping(text, "rope_parameters")
    context = text.get("max_position_embeddings", TextConfig.max_position_embeddings)
    report_unknown("text_config.rope_parameters", rope, (FULL, SLIDING, "truncate"))
    for kind, name in ((FULL, "rope"), (SLIDING, "sliding_rope")):
        if not rope or kind not in text["layer_types"]:
            continue
        where = f"text_config.rope_parameters.{kind}"
        own = mapping(rope, kind)
        if own.get("rope_theta") is None:
            raise ValueError(f"{where} has no rope_theta: rope_parameters must give it for each type of layer")
        if "truncate" in own and own["truncate"] is not True:
            raise ValueError(
                f"{where} has truncate={own['truncate']!r}: say it beside {FULL}, as transformers reads it"
            )
        text[name] = read_rope(own, where, original_max_position_embeddings=context, truncate=rope.get("truncate"))
