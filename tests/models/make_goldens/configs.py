"""What transformers makes of config.json: names and defaults of all fields, and ropes in all spellings."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import json
import pathlib
import re
from typing import Any

import numpy as np
import torch
import transformers
from transformers.modeling_rope_utils import RopeParameters, RotaryEmbeddingConfigMixin
from transformers.models.gemma4 import modeling_gemma4
from transformers.models.qwen3_5 import modeling_qwen3_5
from transformers.models.step3p7 import modeling_step3p7

from tests.models.make_goldens import gemma4 as gemma
from tests.models.make_goldens.spread import spread

FULL, SLIDING = "full_attention", "sliding_attention"
CLASSES = {
    "qwen3_5": transformers.Qwen3_5Config,
    "qwen3_5_moe": transformers.Qwen3_5MoeConfig,
    "gemma4": transformers.Gemma4Config,
    "step3p7": transformers.Step3p7Config,
}
ROTARY = {
    "qwen3_5": (modeling_qwen3_5.Qwen3_5TextRotaryEmbedding, modeling_qwen3_5.Qwen3_5VisionRotaryEmbedding),
    "gemma4": (modeling_gemma4.Gemma4TextRotaryEmbedding, modeling_gemma4.Gemma4VisionRotaryEmbedding),
    "step3p7": (modeling_step3p7.Step3p7RotaryEmbedding, modeling_step3p7.Step3p7VisionRotaryEmbedding),
}


def configs(root: pathlib.Path) -> None:
    """After the folders of the families, whose config.json the cases change."""
    rooms = {
        name: {"config.json": fields_of(cls)}
        | {room: fields_of(spec.config_class) for room, spec in cls.sub_configs_defaults.items()}
        for name, cls in CLASSES.items()
    }
    write(root / "config-fields.json", {"rope_parameters": sorted(RopeParameters.__annotations__), **rooms})
    cases = {name: [resolved(root, name, change) for change in changes] for name, changes in all_changes().items()}
    write(root / "config-cases.json", cases)


def model_of(name: str, config: transformers.PreTrainedConfig, seed: int) -> transformers.PreTrainedModel:
    """A random model that hides nothing, in float32."""
    config._attn_implementation = config._experts_implementation = "eager"
    if name == "gemma4":
        return gemma.make_model(config, seed)
    model = getattr(transformers, type(config).__name__.replace("Config", "ForConditionalGeneration"))(config)
    spread(model, seed)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if key.endswith(("gate_up_proj", "experts.down_proj")):
                parameter *= parameter.shape[1] ** 0.5  # spread takes all of an expert for one row
    return model.float().eval()


def write(path: pathlib.Path, content: Any) -> None:
    lines = (f"{json.dumps(key)}: {json.dumps(value, sort_keys=True)}" for key, value in content.items())
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def fields_of(cls: type) -> dict[str, Any]:
    """Fields of a configuration class with their defaults; null for aliases, and for those that are only documented or
    popped from the rest."""
    base = transformers.PreTrainedConfig
    out: dict[str, Any] = dict.fromkeys(re.findall(r"^ {8}(\w+) \(`", base.__doc__ or "", re.M))
    out |= dict.fromkeys(cls.attribute_map) | dict.fromkeys(
        transformers.GenerationConfig._get_default_generation_params()
    )
    readers = [base.__post_init__, cls.__post_init__]
    if "rope_parameters" in cls.__dataclass_fields__:
        readers.append(RotaryEmbeddingConfigMixin.convert_rope_params_to_dict)
    for reader in readers:
        out |= dict.fromkeys(re.findall(r'kwargs\.(?:pop|get|setdefault)\(\s*"(\w+)"', inspect.getsource(reader)))
    for field in dataclasses.fields(cls):
        default = None if field.default is dataclasses.MISSING else field.default
        out[field.name] = list(default) if isinstance(default, tuple) else default
    return out


def changed(source: dict, change: dict) -> dict:
    """A config.json with the fields of its objects changed; "-name" takes a field away."""
    source = copy.deepcopy(source)
    for room, values in change.items():
        for name, value in values.items():
            source[room].pop(name.removeprefix("-"), None)
            if not name.startswith("-"):
                source[room][name] = value
    return source


def resolved(root: pathlib.Path, family: str, change: dict) -> dict[str, Any]:
    """A change, and by type of layer: heads, key heads, width, attention factor and frequencies; those of the tower."""
    source = changed(json.loads((root / family / "config.json").read_text()), change)
    config = CLASSES[family].from_dict(source)
    text, (rotary, axial) = config.text_config, ROTARY[family]
    module, layers = rotary(text), {}
    for kind in sorted(set(text.layer_types) - {"linear_attention"}):
        own, prefix = (text, "") if family == "qwen3_5" else (text.per_layer_config[kind], f"{kind}_")
        sizes = [own.num_attention_heads, own.num_key_value_heads, own.head_dim]
        factor = getattr(module, f"{prefix}attention_scaling")
        layers[kind] = [*sizes, short(factor), [short(x) for x in getattr(module, f"{prefix}inv_freq").tolist()]]
    vision = axial(config.vision_config).inv_freq
    return {"change": change, "layers": layers, "vision": [short(x) for x in vision.flatten().tolist()]}


def short(value: float) -> float:
    return float(f"{value:.8g}")


def all_changes() -> dict[str, list[dict]]:
    rng = np.random.default_rng(7)
    yarn = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}
    beside = {"text_config": {"rope_parameters": {FULL: yarn, SLIDING: yarn | {"factor": None}, "truncate": False}}}
    out = {
        make.__name__: [make(rng, number) for number in range(40)] for make in (qwen3_5, gemma4, step3p7)
    }  # fmt: skip
    out["gemma4"].append(beside)  # which counts for both sets
    return out


def pick(rng: np.random.Generator, *options: Any) -> Any:
    return options[rng.integers(len(options))]


def rope(rng: np.random.Generator, kind: str, whole: bool) -> dict[str, Any]:
    """A set of parameters, spelled in one of the ways; `whole` leaves out none that has a default elsewhere."""
    spelled = pick(rng, "rope_type", "type", "both", *(["neither"] if kind == "default" else []))
    out: dict[str, Any] = {name: kind for name in ("rope_type", "type") if spelled in (name, "both")}
    if whole or rng.random() < 0.5:
        out["rope_theta"] = pick(rng, 100, 5000.0, 1e6)
    if kind in ("linear", "llama3", "yarn") or (kind == "proportional" and rng.random() < 0.3):
        out["factor"] = pick(rng, 2, 2.5, 8.0)
    if kind in ("llama3", "yarn") and (whole or rng.random() < 0.6):
        out["original_max_position_embeddings"] = pick(rng, 32, 64, 4096)
    if kind == "llama3":
        out |= {"low_freq_factor": pick(rng, 1, 0.5), "high_freq_factor": pick(rng, 4.0, 32.0)}
    if kind == "yarn":
        for name, value in (("beta_fast", 8), ("beta_slow", 0.5), ("attention_factor", 0.9)):
            if rng.random() < 0.4:
                out[name] = value
        if rng.random() < 0.4:
            out |= {"mscale": 0.7, "mscale_all_dim": pick(rng, 0.5, None)}
    return out


def kind_of(rng: np.random.Generator, number: int) -> str:
    return ("default", "linear", "proportional", "llama3", "yarn")[number % 5]


def tower(rng: np.random.Generator) -> dict[str, Any]:
    """What a vision_config may say of its rope."""
    out: dict[str, Any] = {"-rope_parameters": None}
    if rng.random() < 0.4:
        out["rope_theta"] = 300.0
    name = pick(rng, "rope_parameters", "rope_scaling", None)
    if name:
        out[name] = {pick(rng, "rope_type", "type"): pick(rng, "axial", "default")}
        if rng.random() < 0.6:
            out[name]["rope_theta"] = 700
    if name == "rope_scaling" and rng.random() < 0.5:
        out["rope_parameters"] = {"rope_type": "axial", "rope_theta": 40.0}
    return out


def qwen3_5(rng: np.random.Generator, number: int) -> dict:
    kind = kind_of(rng, number)
    own, text = rope(rng, kind, whole=False), {"-rope_parameters": None, "max_position_embeddings": pick(rng, 64, 512)}
    partial: Any = 0.25
    if rng.random() < 0.4:
        text["partial_rotary_factor"] = partial = pick(rng, 0.5, 1, None)
    if rng.random() < 0.4:
        own["partial_rotary_factor"] = partial = pick(rng, 0.5, 0.75)
    if rng.random() < 0.4:
        text["rope_theta"] = pick(rng, 50.0, 20000)
    if kind == "yarn" and rng.random() < 0.5:
        own["truncate"] = False
    if kind in ("llama3", "yarn") and rng.random() < 0.3:
        text["original_max_position_embeddings"] = 48
    pairs = int(16 * (1 if partial is None or kind == "proportional" else partial)) // 2
    own["mrope_section"] = [pairs - 2 * (pairs // 3), pairs // 3, pairs // 3]
    name = pick(rng, "rope_parameters", "rope_scaling")
    text[name] = own
    if name == "rope_scaling" and rng.random() < 0.5:  # which takes the place of this
        text["rope_parameters"] = {"rope_type": "default", "rope_theta": 10.0, "mrope_section": [1, 1, 1]}
    return {"text_config": text | {"head_dim": 16}, "vision_config": tower(rng)}


def gemma4(rng: np.random.Generator, number: int) -> dict:
    text: dict[str, Any] = {"max_position_embeddings": pick(rng, 64, 512), "rope_parameters": {}}
    for kind, at in ((FULL, number), (SLIDING, int(rng.integers(5)))):
        text["rope_parameters"][kind] = own = rope(rng, kind_of(rng, at), whole=True)
        if "proportional" in own.values() and rng.random() < 0.6:
            own["partial_rotary_factor"] = pick(rng, 0.25, 0.5)
    if number % 8 == 0:
        text["-rope_parameters"] = text.pop("rope_parameters")
    sizes = number % 6
    if sizes == 1:
        text["per_layer_config"] = {}
    elif sizes == 2:
        text["per_layer_config"] = {str(i): {"head_dim": 8, "num_key_value_heads": 4} for i in (1, 3)}
    elif sizes == 3:
        text |= {"-per_layer_config": None, "global_head_dim": 32, "num_global_key_value_heads": 4}
        text["attention_k_eq_v"] = bool(rng.integers(2))
    elif sizes == 4:
        text["per_layer_config"] = {"0": {"head_dim": 8}, "02": {"head_dim": 8}, "03": {"head_dim": 16}}
    elif sizes == 5:
        text["layer_types"] = [SLIDING, FULL, SLIDING, SLIDING]
        text["per_layer_config"] = {"1": {"head_dim": 24}, "3": {"head_dim": 24}}
    return {"text_config": text, "vision_config": tower(rng)}


def step3p7(rng: np.random.Generator, number: int) -> dict:
    text: dict[str, Any] = {"max_position_embeddings": pick(rng, 64, 512)}
    if number % 3:
        kinds = {FULL: kind_of(rng, number), SLIDING: kind_of(rng, int(rng.integers(5)))}
        text["rope_parameters"] = {kind: rope(rng, at, whole=False) for kind, at in kinds.items()}
        text["rope_parameters"][FULL] |= pick(rng, {}, {"partial_rotary_factor": 0.5})
        if rng.random() < 0.4:
            text["partial_rotary_factor"] = pick(rng, 0.5, 1)
    else:
        own = rope(rng, kind_of(rng, number // 3), whole=False)
        own.setdefault("rope_type", own.get("type", "default"))
        if own["rope_type"] in ("llama3", "yarn"):
            own.setdefault("original_max_position_embeddings", 96)  # which transformers fills in only below
        text["rope_scaling"] = own
        if rng.random() < 0.4:
            text["rope_theta"] = 300
        if rng.random() < 0.4:
            text["-partial_rotary_factors"] = None
    heads = number % 5
    if heads == 1:
        text |= {
            "-attention_other_setting": None,
            "per_layer_config": {str(i): {"num_attention_heads": 8} for i in (0, 2, 4)},
        }
    elif heads == 2:
        text["per_layer_config"] = {}
    elif heads == 3:
        text |= {"-attention_other_setting": None, "num_sliding_attention_heads": 2}
    elif heads == 4:
        text["per_layer_config"] = {"1": {"num_attention_heads": 2}, "03": {"num_attention_heads": 2}}
    if rng.random() < 0.3:
        text |= {"num_key_value_heads": 4, "num_attention_groups": 2}  # an older name, which wins
    return {"text_config": text, "vision_config": tower(rng)}
