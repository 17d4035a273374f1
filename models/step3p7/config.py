"""Configuration of a Step 3.7 vision-language model, read from and written to config.json."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from cpjax.models.common.hf_config import (
    Fields,
    by_kind,
    mapping,
    plain,
    positive,
    read,
    rename,
    report,
    report_unknown,
)
from cpjax.models.common.rope import Rope, read_axial_theta, read_rope
from cpjax.models.step3p7.layers import DENSE, FULL, SLIDING, SPARSE, Layer, Stack, stack

_DENSE_AT_FIRST = 3  # layers, where config.json does not say which are dense


@dataclasses.dataclass(frozen=True)
class TextConfig:
    """The language model; names as in config.json but for the two ropes."""

    vocab_size: int = 128815
    hidden_size: int = 4096
    intermediate_size: int = 11264
    num_hidden_layers: int = 45
    num_attention_heads: int = 64
    num_sliding_attention_heads: int | None = None  # default: as many
    num_key_value_heads: int = 8
    head_dim: int = 128
    query_pre_attn_scalar: float | None = None  # default: head_dim
    sliding_window: int | None = None
    max_position_embeddings: int = 128000
    rms_norm_eps: float = 1e-5
    pad_token_id: int = 1
    layer_types: tuple[str, ...] | None = None  # default: full attention
    mlp_layer_types: tuple[str, ...] | None = None  # default: dense in the first three
    num_experts_per_tok: int = 8
    n_routed_experts: int = 288
    moe_intermediate_size: int = 1280
    share_expert_dim: int = 1280
    moe_router_scaling_factor: float = 1.0
    swiglu_limits: tuple[float | None, ...] | None = None  # those of the layers, and as far as given of the heads below
    swiglu_limits_shared: tuple[float | None, ...] | None = None
    num_nextn_predict_layers: int = 0
    mtp_layer_types: tuple[str, ...] | None = None
    mtp_mlp_layer_types: tuple[str, ...] | None = None
    rope: Rope = dataclasses.field(default_factory=Rope)
    sliding_rope: Rope = dataclasses.field(default_factory=Rope)

    def __post_init__(self) -> None:
        positive(self, "text_config", _MAY_BE_ZERO)
        count, ahead = self.num_hidden_layers, self.num_nextn_predict_layers
        defaults = {
            "num_sliding_attention_heads": self.num_attention_heads,
            "query_pre_attn_scalar": self.head_dim,
            "layer_types": (FULL,) * count,
            "mlp_layer_types": tuple(SPARSE if i >= _DENSE_AT_FIRST else DENSE for i in range(count)),
            "mtp_layer_types": (FULL,) * ahead,
            "mtp_mlp_layer_types": (DENSE,) * ahead,
        }
        for name, value in defaults.items():
            if getattr(self, name) is None:
                object.__setattr__(self, name, value)
        for name, length, kinds in (
            ("layer_types", count, (FULL, SLIDING)),
            ("mlp_layer_types", count, (DENSE, SPARSE)),
            ("mtp_layer_types", ahead, (FULL, SLIDING)),
            ("mtp_mlp_layer_types", ahead, (DENSE, SPARSE)),
        ):
            given = getattr(self, name)
            unknown = sorted(set(given) - set(kinds))
            if unknown or len(given) != length:
                raise ValueError(
                    f"text_config.{name} has {len(given)} entries{f', among them {unknown}' if unknown else ''}: it "
                    f"needs one of {kinds[0]!r} and {kinds[1]!r} for each of the {length} layers"
                )
        for name in ("swiglu_limits", "swiglu_limits_shared"):
            limits = getattr(self, name) or ()
            if limits and len(limits) not in (count, count + ahead):
                raise ValueError(
                    f"text_config.{name} has {len(limits)} entries: it needs one for each of the {count} layers"
                )
            # 0 is no bound
            padded = tuple(limit or None for limit in limits) + (None,) * (count + ahead - len(limits))
            object.__setattr__(self, name, padded)
        if SLIDING in {*self.types, *(self.mtp_layer_types or ())} and not self.sliding_window:
            raise ValueError(
                f"text_config.sliding_window={self.sliding_window!r} must be an integer >= 1, as there are layers of "
                f"type {SLIDING!r}"
            )
        for name in ("num_attention_heads", "num_sliding_attention_heads"):
            if getattr(self, name) % self.num_key_value_heads:
                raise ValueError(
                    f"text_config.{name}={getattr(self, name)} must be a multiple of num_key_value_heads="
                    f"{self.num_key_value_heads}"
                )
        if self.num_experts_per_tok > self.n_routed_experts:
            raise ValueError(
                f"text_config.num_experts_per_tok={self.num_experts_per_tok} must be at most n_routed_experts="
                f"{self.n_routed_experts}"
            )
        for rope in (self.rope, self.sliding_rope):
            if (turning := rope.turning(self.head_dim)) < 2 or turning % 2 or rope.partial > 1:
                raise ValueError(
                    f"head_dim={self.head_dim} x partial_rotary_factor={rope.partial} gives {turning} rotated "
                    "features: it must be an even number of at least 2, and at most head_dim"
                )

    @property
    def types(self) -> tuple[str, ...]:
        """`layer_types`, never None."""
        return self.layer_types or ()

    @property
    def layers(self) -> tuple[Layer, ...]:
        """The decoder layers."""
        return self._layers(self.types, self.mlp_layer_types, 0)

    @property
    def stacks(self) -> tuple[Stack, ...]:
        """The decoder layers as few patterns, each repeated: what is traced once for each layer of a pattern."""
        return stack(self.layers)

    @property
    def mtp_layers(self) -> tuple[Layer, ...]:
        """The layer inside each multi-token prediction head."""
        return self._layers(self.mtp_layer_types, self.mtp_mlp_layer_types, self.num_hidden_layers)

    def heads(self, layer: Layer) -> int:
        """Query heads of a layer."""
        return (self.num_sliding_attention_heads if layer.sliding else None) or self.num_attention_heads

    def _layers(self, types: Sequence[str] | None, mlp_types: Sequence[str] | None, start: int) -> tuple[Layer, ...]:
        routed, shared = (limits[start:] for limits in (self.swiglu_limits or (), self.swiglu_limits_shared or ()))
        return tuple(
            Layer(kind == SLIDING, mlp == SPARSE, limit if mlp == SPARSE else None, shared_limit)
            for kind, mlp, limit, shared_limit in zip(types or (), mlp_types or (), routed, shared, strict=False)
        )


@dataclasses.dataclass(frozen=True)
class VisionConfig:
    """The vision tower; names as in config.json, where `rope_theta` lives in `rope_parameters`."""

    num_hidden_layers: int = 47
    hidden_size: int = 1536
    intermediate_size: int = 8960
    num_attention_heads: int = 16
    num_channels: int = 3
    image_size: int = 728
    patch_size: int = 14
    layer_norm_eps: float = 1e-5
    layer_scale_init_value: float = 0.1
    rope_theta: float = 10000.0

    def __post_init__(self) -> None:
        positive(self, "vision_config", _MAY_BE_ZERO)
        if self.hidden_size % (4 * self.num_attention_heads):
            raise ValueError(
                f"vision_config.hidden_size={self.hidden_size} must be a multiple of 4 x num_attention_heads="
                f"{self.num_attention_heads}: half of each head turns with the column, half with the row"
            )

    spatial_merge_size = 4
    """Patches along each side that become one feature: two convolutions halve the sides."""

    @property
    def patch_dim(self) -> int:
        """Values of one flattened patch: channels x height x width."""
        return self.num_channels * self.patch_size**2

    @property
    def table_side(self) -> int:
        """Side of the square table of learned positions."""
        return self.image_size // self.patch_size


@dataclasses.dataclass(frozen=True)
class Config:
    """A whole model: what config.json says.

    `source` is the mapping that the configuration was read from, so that fields unknown here survive a round trip.
    """

    text: TextConfig = dataclasses.field(default_factory=TextConfig)
    vision: VisionConfig = dataclasses.field(default_factory=VisionConfig)
    image_token_id: int = 151679
    projector_bias: bool = False
    tie_word_embeddings: bool = False
    source: Mapping[str, Any] = dataclasses.field(default_factory=dict, compare=False, repr=False)

    model_type = "step3p7"

    def __post_init__(self) -> None:
        if not 0 <= self.image_token_id < self.text.vocab_size:
            raise ValueError(
                f"image_token_id={self.image_token_id} lies outside the vocabulary of {self.text.vocab_size} tokens"
            )

    @classmethod
    def fields(cls) -> dict[str, Fields]:
        """What becomes of each field of config.json, by the name of the object that it is in."""
        top = Fields.of(
            "config.json", cls, also=("text_config", "vision_config"), but=("text", "vision", "source"),
        )  # fmt: skip
        text = Fields.of(
            "text_config", TextConfig, also=_TEXT_TOO, but=("rope", "sliding_rope"), only=_TEXT_ONLY,
            unused={
                "tie_word_embeddings": "that of the top level counts",
                "hidden_act": "silu, whatever it says, as with transformers",
                "output_router_logits": "no balance loss is added, as with transformers",
                "num_local_experts": "n_routed_experts says it, as with transformers",
                "max_seq_len": "nothing is as long as the context",
            },
        )  # fmt: skip
        vision = Fields.of(
            "vision_config", VisionConfig,
            also=("mlp_ratio", "rope_parameters", "rope_scaling", "rope_theta", *_VISION_ALIASES),
            but=("intermediate_size", "rope_theta"),
            only={
                "hidden_act": "quick_gelu", "attention_dropout": 0, "use_cls_token": False,
                "partial_rotary_factor": 1,
            },
            unused={
                "intermediate_size": "mlp_ratio says it",
                "max_position_embeddings": "image_size says how large the table of positions is",
            },
        )  # fmt: skip
        return {fields.where: fields for fields in (top, text, vision)}

    @classmethod
    def from_dict(cls, source: Mapping[str, Any]) -> Config:
        """Reads the content of config.json, in the form of the released checkpoints or that of transformers.

        Raises:
            ValueError: another model type, or a feature or size that this implementation doesn't support.
        """
        if source.get("model_type") != cls.model_type:
            raise ValueError(f"config.json says model_type={source.get('model_type')!r}: it must be {cls.model_type!r}")
        text, vision = dict(mapping(source, "text_config")), dict(mapping(source, "vision_config"))
        top = {name: value for name, value in source.items() if value is not None}
        rename(text, _TEXT_ALIASES)
        rename(vision, _VISION_ALIASES)
        for fields, part in zip(cls.fields().values(), (top, text, vision), strict=True):
            fields.check(part)
        return cls(
            text=read(TextConfig, _text(text)),
            vision=read(VisionConfig, _vision(vision)),
            **{f.name: top[f.name] for f in dataclasses.fields(cls)[2:-1] if f.name in top},
            source=copy.deepcopy(dict(source)),
        )

    def to_dict(self) -> dict[str, Any]:
        """The content of config.json: what was read, verbatim but for fields that were changed since."""
        if self.source and Config.from_dict(self.source) == self:
            return copy.deepcopy(dict(self.source))
        text, vision = plain(self.text), plain(self.vision)
        count = self.text.num_hidden_layers
        heads = text["num_sliding_attention_heads"]
        text["per_layer_config"] = {
            str(i): {"num_attention_heads": heads} for i, kind in enumerate(self.text.types) if kind == SLIDING
        }
        for name in ("swiglu_limits", "swiglu_limits_shared"):
            limits = [limit or 0.0 for limit in text[name]]  # as released
            text[name] = limits if any(limits[count:]) else limits[:count]
        text["rope_parameters"] = {
            FULL: self.text.rope.to_dict(), SLIDING: self.text.sliding_rope.to_dict()
        }  # fmt: skip
        del text["rope"], text["sliding_rope"]
        vision["mlp_ratio"] = self.vision.intermediate_size / self.vision.hidden_size
        vision["rope_parameters"] = {"rope_type": "axial", "rope_theta": vision.pop("rope_theta")}
        top_fields, text_fields, vision_fields = self.fields().values()
        return {
            **top_fields.others(self.source),
            "architectures": ["Step3p7ForConditionalGeneration"],
            "model_type": self.model_type,
            **{f.name: getattr(self, f.name) for f in dataclasses.fields(self)[2:-1]},
            "text_config": {
                **text_fields.others(mapping(self.source, "text_config")),
                "model_type": "step3p5", "tie_word_embeddings": self.tie_word_embeddings, **text,
            },
            "vision_config": {
                **vision_fields.others(mapping(self.source, "vision_config")),
                "model_type": "step3p5_vision", "hidden_act": "quick_gelu", **vision,
            },
        }  # fmt: skip


def _text(text: dict[str, Any]) -> dict[str, Any]:
    """The text_config of config.json with the names of `TextConfig`."""
    count = text.get("num_hidden_layers", TextConfig.num_hidden_layers)
    ahead = text.get("num_nextn_predict_layers") or 0
    text["num_nextn_predict_layers"] = ahead

    sparse = text.get("moe_layers_enum")
    if text.get("mlp_layer_types") is None and sparse is not None:
        try:
            numbers = {int(n) for n in (sparse.split(",") if isinstance(sparse, str) else sparse) if str(n).strip()}
        except (TypeError, ValueError):
            raise ValueError(f"text_config.moe_layers_enum is {sparse!r}: it must be numbers of layers") from None
        text["mlp_layer_types"] = [SPARSE if i in numbers else DENSE for i in range(count + ahead)]
    for name in ("layer_types", "mlp_layer_types"):  # the released files go on with the layers of the heads
        kinds = text.get(name)
        if isinstance(kinds, list) and ahead and len(kinds) == count + ahead:
            text[name], text[f"mtp_{name}"] = kinds[:count], kinds[count:]

    kinds = text.get("layer_types") or [FULL] * count
    _read_heads(text, kinds)
    _read_ropes(text, kinds)
    return text


def _read_heads(text: dict[str, Any], kinds: Sequence[str]) -> None:
    """Moves how many queries each type of layer has into fields."""
    heads = text.get("num_attention_heads", TextConfig.num_attention_heads)
    if "per_layer_config" in text:
        own = by_kind(text, kinds, {"num_attention_heads": heads})
        for kind, name in ((FULL, "num_attention_heads"), (SLIDING, "num_sliding_attention_heads")):
            if kind in own:
                text[name] = own[kind]["num_attention_heads"]
        return
    other = mapping(text, "attention_other_setting")
    for name, same in (
        ("num_attention_groups", text.get("num_key_value_heads", TextConfig.num_key_value_heads)),
        ("head_dim", text.get("head_dim", TextConfig.head_dim)), ("attention_type", SLIDING),
    ):  # fmt: skip
        if other.get(name) not in (same, None):
            raise ValueError(
                f"text_config.attention_other_setting.{name}={other[name]!r} is not supported: only {same!r} is, as in "
                "full layers"
            )
    if text.get("num_sliding_attention_heads") is None:
        text["num_sliding_attention_heads"] = other.get("num_attention_heads")


def _read_ropes(text: dict[str, Any], kinds: Sequence[str]) -> None:
    """Moves the ropes of the types of layers into fields.

    As with transformers, older files have one entry for each layer, and a `rope_scaling` of full layers; nothing of
    these counts beside `rope_parameters`.
    """
    older = [name for name in ("rope_theta", "partial_rotary_factors", "rope_scaling") if text.get(name) is not None]
    context = text.get("max_position_embeddings", TextConfig.max_position_embeddings)
    by_type = mapping(text, "rope_parameters")
    report_unknown("text_config.rope_parameters", by_type, (FULL, SLIDING))
    if by_type and (missing := sorted(set(kinds) - by_type.keys())):
        raise ValueError(f"text_config.rope_parameters has no set for {missing[0]}: give one for each type of layer")
    if by_type and older:
        report(f"text_config.rope_parameters counts, and not {', '.join(older)} beside it, as with transformers")
    if not by_type and text.get("partial_rotary_factor") is not None:
        raise ValueError(
            "text_config.partial_rotary_factor is not read: give partial_rotary_factors, one for each layer"
        )
    for kind, name in ((FULL, "rope"), (SLIDING, "sliding_rope")):
        if kind not in kinds and kind not in by_type:
            continue
        where = f"text_config.rope_parameters.{kind}"
        if by_type:
            rope = dict(mapping(by_type, kind))
            rope.setdefault("partial_rotary_factor", text.get("partial_rotary_factor"))
        else:
            rope = {"rope_theta": _of_layer(text, "rope_theta", kinds, kind)}
            rope["partial_rotary_factor"] = _of_layer(text, "partial_rotary_factors", kinds, kind)
            if kind == FULL and text.get("rope_scaling"):
                where = "text_config.rope_scaling"
                rope |= mapping(text, "rope_scaling")
                if "type" in rope and "rope_type" not in rope:
                    raise ValueError(f"{where} has type={rope['type']!r} without rope_type: call it rope_type")
        if rope.get("truncate") not in (True, None):
            raise ValueError(f"{where} has truncate={rope['truncate']!r}, which is not supported: leave it out")
        text[name] = read_rope(rope, where, original_max_position_embeddings=context)


def _of_layer(text: dict[str, Any], name: str, kinds: Sequence[str], kind: str) -> Any:
    """What the first layer of a kind has, where each has an entry of its own."""
    value = text.get(name)
    if not isinstance(value, list):
        return value
    if len(value) < len(kinds):
        raise ValueError(
            f"text_config.{name} has {len(value)} entries: it needs one for each of the {len(kinds)} layers"
        )
    return value[kinds.index(kind)]


def _vision(vision: dict[str, Any]) -> dict[str, Any]:
    """The vision_config of config.json with the names of `VisionConfig`."""
    size, ratio = vision.get("hidden_size", VisionConfig.hidden_size), vision.get("mlp_ratio", 8960 / 1536)
    if not isinstance(ratio, int | float):
        raise ValueError(f"vision_config.mlp_ratio={ratio!r} must be a number")
    vision["intermediate_size"] = int(size * ratio)
    vision["rope_theta"] = read_axial_theta(vision, "vision_config", VisionConfig.rope_theta)
    return vision


_MAY_BE_ZERO = ("pad_token_id", "num_nextn_predict_layers")
_TEXT_ALIASES = {
    "num_attention_groups": "num_key_value_heads", "moe_num_experts": "n_routed_experts",
    "moe_top_k": "num_experts_per_tok", "share_expert_dims": "share_expert_dim",
    "num_mtp_layers": "num_nextn_predict_layers",
}  # fmt: skip
_VISION_ALIASES = {
    "width": "hidden_size", "layers": "num_hidden_layers", "heads": "num_attention_heads",
    "ls_init_value": "layer_scale_init_value",
}  # fmt: skip
_TEXT_TOO = (
    *_TEXT_ALIASES, "moe_layers_enum", "attention_other_setting", "per_layer_config", "rope_parameters", "rope_theta",
    "rope_scaling", "partial_rotary_factor", "partial_rotary_factors",
)  # fmt: skip
_TEXT_ONLY: Mapping[str, Any] = {
    "attention_bias": False, "mlp_bias": False, "attention_dropout": 0, "use_bidirectional_attention": False,
    "gating": True, "yarn_only_types": [FULL], "use_moe": True, "moe_router_activation": "sigmoid",
    "use_moe_router_bias": True, "need_fp32_gate": True, "use_head_wise_attn_gate": True, "norm_expert_weight": True,
    "sparse_attention_config": {}, "moe_layer_freq": None,
}  # fmt: skip
