"""Configuration of a Qwen3.5 vision-language model, read from and written to config.json."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar, Self

from cpjax.models.common.hf_config import Fields, mapping, plain, positive, read, rename, report
from cpjax.models.common.rope import Rope, read_axial_theta, read_rope

LINEAR, FULL = "linear_attention", "full_attention"


@dataclasses.dataclass(frozen=True)
class TextConfig:
    """The language model but for its MLPs; as in config.json, where the last five live in `rope_parameters`.

    `rope_scaling` has the parameters of a `rope_type` other than "default", as `Rope` has them.
    """

    vocab_size: int = 248320
    hidden_size: int = 4096
    num_hidden_layers: int = 32
    num_attention_heads: int = 16
    num_key_value_heads: int = 4
    head_dim: int = 256
    linear_num_key_heads: int = 16
    linear_num_value_heads: int = 32
    linear_key_head_dim: int = 128
    linear_value_head_dim: int = 128
    linear_conv_kernel_dim: int = 4
    rms_norm_eps: float = 1e-6
    pad_token_id: int | None = None
    mtp_num_hidden_layers: int = 0
    max_position_embeddings: int = 32768
    layer_types: tuple[str, ...] | None = None  # default: every fourth layer is full attention
    rope_theta: float = 10000.0
    partial_rotary_factor: float = 0.25
    mrope_section: tuple[int, ...] = (11, 11, 10)
    rope_type: str = "default"
    rope_scaling: tuple[tuple[str, Any], ...] = ()

    def __post_init__(self) -> None:
        if self.layer_types is None:
            types = tuple(LINEAR if (i + 1) % 4 else FULL for i in range(self.num_hidden_layers))
            object.__setattr__(self, "layer_types", types)
        positive(self, "text_config", ("mtp_num_hidden_layers",))
        if self.mtp_num_hidden_layers > 1:
            raise ValueError(
                f"text_config.mtp_num_hidden_layers={self.mtp_num_hidden_layers} is not supported: use 1, or 0 to "
                "leave out the head of multi-token prediction"
            )
        unknown = sorted(set(self.types) - {LINEAR, FULL})
        if unknown or len(self.types) != self.num_hidden_layers:
            raise ValueError(
                f"text_config.layer_types has {len(self.types)} entries{f', among them {unknown}' if unknown else ''}: "
                f"it needs one of {LINEAR!r} and {FULL!r} for each of the {self.num_hidden_layers} layers"
            )
        for many, few in (
            ("num_attention_heads", "num_key_value_heads"),
            ("linear_num_value_heads", "linear_num_key_heads"),
        ):
            if getattr(self, many) % getattr(self, few):
                raise ValueError(
                    f"text_config.{many}={getattr(self, many)} must be a multiple of {few}={getattr(self, few)}"
                )
        if (
            not 2 <= self.rotary_dim <= self.head_dim
            or self.rotary_dim % 2
            or sum(self.mrope_section) != self.rotary_dim // 2
        ):
            raise ValueError(
                f"head_dim={self.head_dim} x partial_rotary_factor={self.partial_rotary_factor} gives "
                f"{self.rotary_dim} rotated features, but mrope_section={list(self.mrope_section)} has "
                f"{sum(self.mrope_section)} frequencies: it must sum to half the rotated features"
            )
        if len(self.mrope_section) != 3:
            raise ValueError(f"mrope_section={list(self.mrope_section)} must have 3 entries: time, height, width")

    @property
    def mlp_products(self) -> int:
        """Multiplications of a token in a layer's MLP."""
        raise NotImplementedError

    @property
    def types(self) -> tuple[str, ...]:
        """`layer_types`, never None."""
        return self.layer_types or ()

    @property
    def rope(self) -> Rope:
        """Rotary positions of the full-attention layers, the same along each of the three axes."""
        return Rope(self.rope_theta, self.partial_rotary_factor, self.rope_type, self.rope_scaling)

    @property
    def rotary_dim(self) -> int:
        """Number of features of a head that have an angle."""
        return self.rope.turning(self.head_dim)

    @property
    def period(self) -> int:
        """Length of the shortest pattern whose repetition gives `layer_types`."""
        count = len(self.types)
        return next(p for p in range(1, count + 1) if count % p == 0 and self.types == self.types[:p] * (count // p))


@dataclasses.dataclass(frozen=True)
class VisionConfig:
    """The vision tower; names as in config.json, where `rope_theta` lives in `rope_parameters`."""

    depth: int = 27
    hidden_size: int = 1152
    hidden_act: str = "gelu_pytorch_tanh"
    intermediate_size: int = 4304
    num_heads: int = 16
    in_channels: int = 3
    patch_size: int = 16
    spatial_merge_size: int = 2
    temporal_patch_size: int = 2
    out_hidden_size: int = 3584
    num_position_embeddings: int = 2304
    rope_theta: float = 10000.0

    def __post_init__(self) -> None:
        positive(self, "vision_config")
        if self.hidden_size % (4 * self.num_heads):
            raise ValueError(
                f"vision_config.hidden_size={self.hidden_size} must be a multiple of 4 x num_heads={self.num_heads}: "
                "a quarter of each head turns with the row, a quarter with the column"
            )
        if self.table_side**2 != self.num_position_embeddings:
            raise ValueError(
                f"vision_config.num_position_embeddings={self.num_position_embeddings} must be a square number"
            )
        if self.hidden_act not in ("gelu_pytorch_tanh", "gelu"):
            raise ValueError(
                f"vision_config.hidden_act={self.hidden_act!r} is not supported: use 'gelu_pytorch_tanh' or 'gelu'"
            )

    @property
    def patch_dim(self) -> int:
        """Values of one flattened patch: channels x frames x height x width."""
        return self.in_channels * self.temporal_patch_size * self.patch_size**2

    @property
    def table_side(self) -> int:
        """Side of the square table of learned positions."""
        return round(self.num_position_embeddings**0.5)


@dataclasses.dataclass(frozen=True)
class Config:
    """A whole model: what config.json says. Families say which text model, and what they are called there.

    `source` is the mapping that the configuration was read from, so that fields unknown here survive a round trip.
    """

    text: TextConfig = dataclasses.field(default_factory=TextConfig)
    vision: VisionConfig = dataclasses.field(default_factory=VisionConfig)
    image_token_id: int = 248056
    video_token_id: int = 248057
    vision_start_token_id: int = 248053
    vision_end_token_id: int = 248054
    tie_word_embeddings: bool = False
    source: Mapping[str, Any] = dataclasses.field(default_factory=dict, compare=False, repr=False)

    model_type: ClassVar[str]
    architecture: ClassVar[str]
    text_type: ClassVar[type[TextConfig]]

    def __post_init__(self) -> None:
        if self.vision.out_hidden_size != self.text.hidden_size:
            raise ValueError(
                f"vision_config.out_hidden_size={self.vision.out_hidden_size} must equal "
                f"text_config.hidden_size={self.text.hidden_size}"
            )
        for name in ("image_token_id", "video_token_id"):
            if not 0 <= getattr(self, name) < self.text.vocab_size:
                raise ValueError(
                    f"{name}={getattr(self, name)} lies outside the vocabulary of {self.text.vocab_size} tokens"
                )

    @classmethod
    def fields(cls) -> dict[str, Fields]:
        """What becomes of each field of config.json, by the name of the object that it is in."""
        top = Fields.of(
            "config.json", cls, also=("text_config", "vision_config"), but=("text", "vision", "source"),
            only={"language_model_only": False},
        )  # fmt: skip
        text = Fields.of(
            "text_config", cls.text_type, also=_TEXT_TOO, but=(*_ROPE, "rope_type", "mrope_section"), only=_TEXT_ONLY,
            unused={"tie_word_embeddings": "that of the top level counts"},
        )  # fmt: skip
        vision = Fields.of(
            "vision_config", VisionConfig, also=("rope_parameters", "rope_scaling", "rope_theta", *_VISION_ALIASES),
            but=("rope_theta",), only=_VISION_ONLY,
        )  # fmt: skip
        return {fields.where: fields for fields in (top, text, vision)}

    @classmethod
    def from_dict(cls, source: Mapping[str, Any]) -> Self:
        """Reads the content of config.json.

        Raises:
            ValueError: another model type, or a feature or size that this implementation doesn't support.
        """
        if source.get("model_type") != cls.model_type:
            raise ValueError(f"config.json says model_type={source.get('model_type')!r}: it must be {cls.model_type!r}")
        text, vision = dict(mapping(source, "text_config")), dict(mapping(source, "vision_config"))
        top = {name: value for name, value in source.items() if value is not None}
        rename(vision, _VISION_ALIASES)
        for key in ("patch_size", "temporal_patch_size"):
            if isinstance(vision.get(key), list | tuple):
                sides = set(vision[key])
                if len(sides) != 1:
                    raise ValueError(f"vision_config.{key}={vision[key]} is not supported: patches must be square")
                vision[key] = sides.pop()
        for fields, part in zip(cls.fields().values(), (top, text, vision), strict=True):
            fields.check(part)
        _read_rope(text)
        if text.get("layer_types") is None and text.get("full_attention_interval") is not None:
            every = text["full_attention_interval"]
            if not isinstance(every, int) or every < 1:
                raise ValueError(f"text_config.full_attention_interval={every!r} must be an integer >= 1")
            layers = text.get("num_hidden_layers", cls.text_type.num_hidden_layers)
            text["layer_types"] = [LINEAR if (i + 1) % every else FULL for i in range(layers)]

        vision["rope_theta"] = read_axial_theta(vision, "vision_config", VisionConfig.rope_theta)
        return cls(
            text=read(cls.text_type, text),
            vision=read(VisionConfig, vision),
            **{f.name: top[f.name] for f in dataclasses.fields(cls)[2:-1] if f.name in top},
            source=copy.deepcopy(dict(source)),
        )

    def to_dict(self) -> dict[str, Any]:
        """The content of config.json: what was read, verbatim but for fields that were changed since."""
        if self.source and self.from_dict(self.source) == self:
            return copy.deepcopy(dict(self.source))
        text, vision = plain(self.text), plain(self.vision)
        text["rope_parameters"] = {
            **self.text.rope.to_dict(), "mrope_interleaved": True, "mrope_section": text.pop("mrope_section"),
        }  # fmt: skip
        for name in ("rope_theta", "partial_rotary_factor", "rope_type", "rope_scaling"):
            del text[name]
        vision["rope_parameters"] = {"rope_type": "axial", "rope_theta": vision.pop("rope_theta")}
        top_fields, text_fields, vision_fields = self.fields().values()
        tied = self.tie_word_embeddings
        return {
            **top_fields.others(self.source),
            "architectures": [self.architecture],
            "model_type": self.model_type,
            **{f.name: getattr(self, f.name) for f in dataclasses.fields(self)[2:-1]},
            "text_config": {
                **text_fields.others(mapping(self.source, "text_config")),
                "model_type": f"{self.model_type}_text", "hidden_act": "silu", "tie_word_embeddings": tied, **text,
            },
            "vision_config": {
                **vision_fields.others(mapping(self.source, "vision_config")),
                "model_type": f"{self.model_type}_vision", **vision,
            },
        }  # fmt: skip


_ROPE = ("rope_scaling", "rope_theta", "partial_rotary_factor")
_TEXT_TOO = (*_ROPE, "rope_parameters", "full_attention_interval", "original_max_position_embeddings")
_TEXT_ONLY: Mapping[str, Any] = {
    "hidden_act": "silu", "attention_bias": False, "attention_dropout": 0, "attn_output_gate": True,
    "output_gate_type": "swish", "mamba_ssm_dtype": "float32", "mtp_use_dedicated_embeddings": False,
    "mlp_only_layers": [],
}  # fmt: skip
_VISION_ALIASES = {"num_attention_heads": "num_heads", "num_hidden_layers": "depth"}
_VISION_ONLY: Mapping[str, Any] = {"deepstack_visual_indexes": [], "partial_rotary_factor": 1}


def _read_rope(text: dict[str, Any]) -> None:
    """Moves the set of `rope_parameters` into fields. As with transformers, `rope_scaling` takes its place."""
    where = "rope_scaling" if text.get("rope_scaling") else "rope_parameters"
    source = dict(mapping(text, where))
    if where == "rope_scaling" and text.get("rope_parameters"):
        report("text_config.rope_scaling counts, and not rope_parameters beside it, as with transformers")
    if nested := sorted({LINEAR, FULL} & source.keys()):
        raise ValueError(f"text_config.{where} has a set of its own for {nested[0]}: give one for all layers")
    if source.get("mrope_interleaved") not in (True, None):
        raise ValueError(
            f"text_config.{where} has mrope_interleaved={source['mrope_interleaved']!r}: only true is supported"
        )
    if text.get("original_max_position_embeddings") is not None:  # which counts more
        source["original_max_position_embeddings"] = text["original_max_position_embeddings"]
    context = text.get("max_position_embeddings", TextConfig.max_position_embeddings)
    rope = read_rope(
        source, f"text_config.{where}", beside=("mrope_section", "mrope_interleaved"),
        original_max_position_embeddings=context, rope_theta=text.get("rope_theta"),
        partial_rotary_factor=text.get("partial_rotary_factor", TextConfig.partial_rotary_factor),
    )  # fmt: skip
    text.update(rope_theta=rope.theta, partial_rotary_factor=rope.partial, rope_type=rope.kind)
    text["rope_scaling"] = rope.scaling
    text["mrope_section"] = source.get("mrope_section") or TextConfig.mrope_section
