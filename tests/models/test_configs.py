"""Every field of config.json: read, refused by name, or listed as one that changes nothing; what transformers reads."""

import copy
import importlib
import json
import warnings

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

from cpjax.models import family, from_pretrained
from cpjax.models.common.hf_config import report
from cpjax.models.common.rope import KINDS
from cpjax.shard import Identity, make_batch

from .qwen3_5_cases import GOLDENS

FULL, SLIDING = "full_attention", "sliding_attention"
FIELDS = json.loads((GOLDENS / "config-fields.json").read_text())
CASES = json.loads((GOLDENS / "config-cases.json").read_text())
FAMILIES = ("qwen3_5", "qwen3_5_moe", "gemma4", "step3p7")
BASES = {"gemma4": "gemma4_e"}  # which has sound
YARN = {"rope_type": "yarn", "factor": 2.0, "rope_theta": 100.0}


def source(name):
    return json.loads((GOLDENS / name / "config.json").read_text())


def changed(config, room, values):
    """With fields of an object changed; "-name" takes a field away, None as a room is the top level."""
    config = copy.deepcopy(config)
    own = config if room == "config.json" else config[room]
    for name, value in values.items():
        own.pop(name.removeprefix("-"), None)
        if not name.startswith("-"):
            own[name] = value
    return config


def parsed(name, config):
    return family(name).Config.from_dict(config)


# the three lists


@pytest.mark.parametrize("name", FAMILIES)
def test_every_field_of_the_configuration_classes_is_in_one_list(name):
    """Names are those of the classes of transformers, their aliases, what they document and what they pop."""
    lists = family(name).Config.fields()
    assert lists.keys() == FIELDS[name].keys()
    for room, fields in FIELDS[name].items():
        read, only, unused = lists[room].read, set(lists[room].only), set(lists[room].unused)
        assert len(fields) > 30 and not (read & only or read & unused or only & unused)
        assert sorted(fields.keys() - read - only - unused) == [], room
        assert all(len(why) > 10 for why in lists[room].unused.values())


def test_every_parameter_of_rope_belongs_to_a_kind():
    """But for those of "longrope", a kind that is refused."""
    known = {
        "rope_type",
        "rope_theta",
        "partial_rotary_factor",
        "mrope_section",
        *{n for k in KINDS.values() for n in k},
    }
    assert set(FIELDS["rope_parameters"]) - known == {"short_factor", "long_factor"}


def candidates(value):
    """Other values of a field."""
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int | float):
        return [value + 1, 2 * value, value / 2, value - 1]
    if isinstance(value, str):
        return [value[2:], f"{value}_"]
    if isinstance(value, list):
        return [value[::-1], value[:-1], value[1:], [2 * x for x in value if isinstance(x, int | float)]]
    return [1, 3, True, "vision", {"rope_theta": 123.0}, {"rope_type": "axial", "rope_theta": 123.0}, [1.5] * 5]


MATTERS = {
    "qwen3_5": {
        "text_config.rope_theta": {"rope_parameters": {"mrope_section": [3, 2, 1], "partial_rotary_factor": 0.75}},
        "text_config.partial_rotary_factor": {
            "rope_parameters": {"mrope_section": [1, 1, 0]}, "partial_rotary_factor": 0.25,
        },
        "text_config.original_max_position_embeddings": {
            "rope_parameters": YARN | {"mrope_section": [3, 2, 1], "partial_rotary_factor": 0.75},
            "original_max_position_embeddings": 64,
        },
        "text_config.full_attention_interval": {"-layer_types": None, "full_attention_interval": 4},
        "vision_config.rope_theta": {"-rope_parameters": None},
    },
    "gemma4": {
        "text_config.layer_types": {"per_layer_config": {}},
        "text_config.global_head_dim": {"-per_layer_config": None, "global_head_dim": 24},
        "text_config.num_global_key_value_heads": {"-per_layer_config": None, "attention_k_eq_v": True},
        "vision_config.rope_theta": {"-rope_parameters": None},
    },
    "step3p7": {
        "text_config.mtp_layer_types": {"layer_types": [FULL] * 5, "mtp_layer_types": [FULL, SLIDING]},
        "text_config.mtp_mlp_layer_types": {
            "-moe_layers_enum": None, "mlp_layer_types": ["dense"] * 5, "mtp_mlp_layer_types": ["dense", "sparse"],
        },
        "text_config.mlp_layer_types": {"-moe_layers_enum": None, "mlp_layer_types": ["dense"] * 4 + ["sparse"] * 3},
        "text_config.n_routed_experts": {"-moe_num_experts": None, "n_routed_experts": 4},
        "text_config.num_experts_per_tok": {"-moe_top_k": None, "num_experts_per_tok": 2},
        "text_config.num_key_value_heads": {"-num_attention_groups": None, "num_key_value_heads": 2},
        "text_config.num_nextn_predict_layers": {"num_nextn_predict_layers": 2},
        "text_config.num_mtp_layers": {
            "layer_types": [FULL] * 5, "-swiglu_limits": None, "-swiglu_limits_shared": None,
        },
        "text_config.partial_rotary_factor": {
            "rope_parameters": {FULL: {}, SLIDING: {}}, "partial_rotary_factor": 0.5,
        },
        "vision_config.hidden_size": {"-width": None, "hidden_size": 16},
        "vision_config.num_hidden_layers": {"-layers": None, "num_hidden_layers": 2},
        "vision_config.num_attention_heads": {"-heads": None, "num_attention_heads": 2},
        "vision_config.layer_scale_init_value": {"-ls_init_value": None, "layer_scale_init_value": 0.1},
    },
}  # fmt: skip
"""What makes fields count in whose place others stand."""


def rooms(name):
    """A family's config.json, and for each of its objects the name, its lists and its content."""
    base = source(BASES.get(name, name))
    return base, [(room, fields, base if room == "config.json" else base[room])
                  for room, fields in family(name).Config.fields().items()]  # fmt: skip


@pytest.mark.parametrize("name", FAMILIES)
def test_what_is_read_changes_the_configuration_or_is_refused(name):
    base, objects = rooms(name)
    for room, fields, _ in objects:
        for field in sorted(fields.read):
            start = changed(base, room, MATTERS[name.removesuffix("_moe")].get(f"{room}.{field}", {}))
            before, told = parsed(name, start), False
            own = start if room == "config.json" else start[room]
            for value in candidates(own.get(field, FIELDS[name][room].get(field))):
                try:
                    told |= parsed(name, changed(start, room, {field: value})) != before
                except ValueError as error:
                    told |= field in str(error)
            assert told, (room, field)


@pytest.mark.parametrize("name", FAMILIES)
def test_other_values_of_what_is_fixed_are_refused_by_name(name):
    base, objects = rooms(name)
    for room, fields, own in objects:
        for field, value in fields.only.items():
            other = not value if isinstance(value, bool) else [1] if isinstance(value, list) else {"0": {"x": 1}}
            with pytest.raises(ValueError, match=rf"^{room}\.{field}=.* is not supported"):
                parsed(name, changed(base, room, {field: other}))
            for same in (value, None, *([float(value)] if value == 0 else [])):
                assert parsed(name, changed(base, room, {field: same})) == parsed(name, base)
        assert own


@pytest.mark.parametrize("name", FAMILIES)
def test_what_changes_nothing_may_say_anything(name):
    base, objects = rooms(name)
    before = parsed(name, base)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for room, fields, own in objects:
            values = {field: [own.get(field), "other"] for field in fields.unused}
            if room == "config.json":
                del values["model_type"]
            assert parsed(name, changed(base, room, values)) == before


@pytest.mark.parametrize("name", FAMILIES)
def test_unknown_fields_are_reported_once(name):
    report.cache_clear()
    base, objects = rooms(name)
    for room, _, _ in objects:
        odd = changed(base, room, {f"odd_{name}": 1, "another": [2], "nothing": None})
        with pytest.warns(UserWarning, match=rf"{room} has fields .*: another, odd_{name}$"):
            assert parsed(name, odd) == parsed(name, base)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert parsed(name, odd).to_dict() == odd


@pytest.mark.parametrize("name", FAMILIES)
def test_what_is_not_read_is_written_back(name):
    base, objects = rooms(name)
    for room, fields, _ in objects:
        values = {field: 17 for field in fields.unused if field not in ("model_type", "architectures")}
        values.pop("tie_word_embeddings", None)
        odd = changed(base, room, {"initializer_range": 0.5, **values})
        config = parsed(name, odd)
        again = parsed(name, {**odd, "image_token_id": 5}).to_dict()
        own = again if room == "config.json" else again[room]
        assert values.items() <= own.items()
        assert parsed(name, again).text == config.text and parsed(name, again).vision == config.vision


# what transformers reads


@pytest.mark.quick
@pytest.mark.parametrize("name", CASES)
def test_ropes_and_heads_are_those_of_transformers(name):
    """All kinds, in all spellings, in places and beside each other; heads and widths by layer; towers."""
    kinds = set()
    for number, case in enumerate(CASES[name]):
        config = source(name)
        for room, values in case["change"].items():
            config = changed(config, room, values)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*fields that are not known")
            warnings.filterwarnings("ignore", message=".*as with transformers")
            found = parsed(name, config)
        again = type(found).from_dict(type(found).from_dict(config | {"odd": 1}).to_dict())
        assert again == found
        for kind, (heads, kv_heads, width, factor, frequencies) in case["layers"].items():
            rope, own = layer_of(found.text, kind)
            kinds.add(rope.kind)
            assert own == (heads, kv_heads, width), (number, kind)
            wanted = pytest.approx(frequencies, rel=2e-6, abs=1e-12)
            assert rope.frequencies(width).tolist() == wanted, (number, kind, rope)
            assert rope.attention_factor == pytest.approx(factor, rel=1e-6), (number, kind)
        base = found.vision.rope_theta ** (-np.arange(len(case["vision"])) / len(case["vision"]))
        assert base.tolist() == pytest.approx(case["vision"], rel=1e-6), number
    assert kinds == set(KINDS)


def layer_of(text, kind):
    """The rope of a kind of layers, and their heads, key heads and width."""
    if hasattr(text, "rope_of"):
        return text.rope_of(kind), (text.num_attention_heads, text.kv_heads(kind), text.width(kind))
    sliding = kind == SLIDING
    heads = text.num_sliding_attention_heads if sliding else text.num_attention_heads
    return (text.sliding_rope if sliding else text.rope), (heads, text.num_key_value_heads, text.head_dim)


@pytest.mark.parametrize(
    ("name", "room", "change", "message"),
    [
        ("qwen3_5", "text_config", {"rope_scaling": {"type": "dynamic", "factor": 2}}, r"'dynamic', .* length of the"),
        ("qwen3_5", "text_config", {"rope_scaling": {"rope_type": "linear"}}, r"rope_scaling .* without factor"),
        ("qwen3_5", "text_config", {"rope_parameters": {FULL: {}}}, r"rope_parameters has a set of its own for full"),
        ("qwen3_5", "text_config", {"rope_parameters": {"mrope_interleaved": False}}, r"mrope_interleaved=False"),
        ("qwen3_5", "text_config", {"rope_parameters": {"rope_theta": "1e4"}}, r"rope_theta='1e4': .* number above 0"),
        ("qwen3_5", "text_config", {"rope_parameters": {"rope_theta": 0}}, r"rope_theta=0: it must be a number above"),
        ("qwen3_5", "text_config", {"rope_parameters": YARN | {"truncate": 1}}, r"truncate=1: it must be true or"),
        ("qwen3_5", "text_config", {"rms_norm_eps": None}, r"text_config.rms_norm_eps=None must be a number"),
        ("qwen3_5", "text_config", {"full_attention_interval": 0, "-layer_types": 0}, r"interval=0 must be an integer"),
        ("gemma4", "vision_config", {"standardize": 1}, r"vision_config.standardize=1 must be true or false"),
        ("step3p7", "text_config", {"layer_types": [1] * 5}, r"layer_types=.* must be a list, each entry text"),
        ("step3p7", "vision_config", {"mlp_ratio": "2"}, r"vision_config.mlp_ratio='2' must be a number"),
        ("qwen3_5", "vision_config", {"rope_scaling": {"type": "linear"}}, r"rope_type='linear', .* only 'axial' is"),
        ("qwen3_5", "vision_config", {"rope_parameters": None, "rope_theta": -1}, r"rope_theta=-1: it must be a"),
        ("gemma4", "text_config", {"rope_parameters": {SLIDING: YARN}}, r"full_attention has no rope_theta"),
        ("gemma4", "text_config", {"rope_parameters": {FULL: YARN | {"truncate": False}}}, r"truncate=False: say it"),
        (
            "gemma4", "text_config",
            {"rope_parameters": {kind: {"rope_theta": 9, "partial_rotary_factor": 0.5} for kind in (FULL, SLIDING)}},
            r"only 'proportional' turns",
        ),
        ("gemma4", "text_config", {"rope_theta": 5.0}, r"text_config.rope_theta=5.0 is not supported: only null is"),
        ("gemma4", "text_config", {"per_layer_config": {"4": {}}}, r"an entry for layer 4, but there are 4 layers"),
        ("gemma4", "text_config", {"per_layer_config": {"1": {"sliding_window": 3}}}, r"only head_dim and num_key"),
        ("step3p7", "text_config", {"rope_parameters": {FULL: YARN}}, r"rope_parameters has no set for sliding_"),
        ("step3p7", "text_config", {"rope_scaling": {"type": "linear", "factor": 2}}, r"without rope_type: call it"),
        (
            "step3p7", "text_config",
            {"rope_scaling": {"rope_type": "llama3", "factor": 2, "low_freq_factor": 4, "high_freq_factor": 4}},
            r"low_freq_factor=4: it must be less than high_freq_factor=4",
        ),
        ("step3p7", "text_config", {"partial_rotary_factor": 0.5}, r"give partial_rotary_factors, one for each layer"),
        ("step3p7", "text_config", {"attention_other_setting": {"head_dim": 4}}, r"head_dim=4 is not supported"),
        ("step3p7", "text_config", {"per_layer_config": {"0": {"num_attention_heads": 8}}}, r"all layers of type"),
    ],
)  # fmt: skip
def test_what_cannot_be_computed_is_refused_by_name(name, room, change, message):
    with pytest.raises(ValueError, match=message):
        parsed(name, changed(source(name), room, change))


@pytest.mark.parametrize(
    ("name", "room", "change", "told"),
    [
        ("qwen3_5", "text_config", {"rope_scaling": {"mrope_section": [1, 1, 0]}}, "rope_scaling counts"),
        ("qwen3_5", "vision_config", {"rope_scaling": {"rope_theta": 5.0}}, "rope_scaling counts"),
        ("step3p7", "text_config", {"rope_parameters": {FULL: {}, SLIDING: {}}}, "rope_parameters counts"),
        ("gemma4", "text_config", {"layer_types": [SLIDING] * 4, "per_layer_config": {}}, "the last layer is"),
    ],
)
def test_what_gives_way_is_reported(name, room, change, told):
    report.cache_clear()
    with pytest.warns(UserWarning, match=rf"text_config.*{told}|vision_config.*{told}"):
        parsed(name, changed(source(name), room, change))


def test_heads_of_prediction_keep_what_no_layer_has():
    """Step 3.7's heads may slide where no layer does."""
    base = changed(
        source("step3p7"), "text_config",
        {"layer_types": [FULL] * 5, "mtp_layer_types": [SLIDING, FULL], "-attention_other_setting": None,
         "num_sliding_attention_heads": 6, "rope_parameters": {FULL: {}, SLIDING: {"rope_theta": 5.0}}},
    )  # fmt: skip
    config = parsed("step3p7", base)
    again = parsed("step3p7", parsed("step3p7", base | {"image_token_id": 5}).to_dict())
    assert config.text == again.text
    assert (config.text.num_sliding_attention_heads, config.text.sliding_rope.theta) == (6, 5.0)


def test_masked_sound_stays_unheard():
    base = source("gemma4_e")
    config = parsed("gemma4", changed(base, "audio_config", {"attention_invalid_logits_value": -1e5}))
    assert config.audio.attention_invalid_logits_value == -1e5
    for value in (0, 1e-9, -100, "-inf"):
        with pytest.raises(ValueError, match=r"audio_config.attention_invalid_logits_value"):
            parsed("gemma4", changed(base, "audio_config", {"attention_invalid_logits_value": value}))


GOLDEN_CASES = {"qwen3_5": "qwen3_5-images", "gemma4": "gemma4-media", "step3p7": "step3p7-images"}


@pytest.mark.parametrize(
    ("name", "number"), [("qwen3_5", 3), ("qwen3_5", 9), ("gemma4", 4), ("gemma4", 8), ("step3p7", 4), ("step3p7", 12)]
)
def test_logits_of_a_changed_configuration_are_those_of_transformers(name, number, tmp_path):
    """Text and images; YaRN multiplies what it turns, heads differ by layer, and towers turn faster."""
    torch = pytest.importorskip("torch", reason="torch is not installed: this test runs a model of transformers")
    pytest.importorskip("transformers", reason="transformers is not installed: this test needs it")
    from .make_goldens.configs import CLASSES, changed, model_of

    config = changed(source(name), CASES[name][number]["change"])
    theirs = model_of(name, CLASSES[name].from_dict(copy.deepcopy(config)), seed=number)
    theirs.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(config))
    cases = importlib.import_module(f".{name}_cases", __package__)
    case = load_file(GOLDENS / f"{GOLDEN_CASES[name]}.safetensors")
    with torch.no_grad():
        wanted = theirs(**inputs_of(name, case, torch), use_cache=False).logits.numpy()

    ours, module = from_pretrained(tmp_path), family(name)
    batch = module.prepare(ours.config, cases.golden_rows(case, ours.config))
    batch, sharder = make_batch(batch, Identity(), streams=module.STREAMS)
    forward = jax.jit(lambda batch: ours.logits(ours(batch, sharder, remat="none")))
    real = case["attention_mask"] == 1
    assert wanted[real].std() > 0.1
    np.testing.assert_allclose(np.asarray(forward(batch))[real], wanted[real], rtol=0, atol=1e-4)


def inputs_of(name, case, torch):
    """What transformers takes of a golden case."""
    names = ("input_ids", "attention_mask", "pixel_values", "image_", "video_", "num_frames")
    inputs = {key: torch.tensor(case[key]) for key in case if key.startswith(names)}
    if name == "step3p7":
        return inputs | {"num_local_patches": case["num_local_patches"].tolist()}
    image, video = (source(name)[key] for key in ("image_token_id", "video_token_id"))
    ids = inputs["input_ids"]
    return inputs | {"mm_token_type_ids": (ids == image) * 1 + (ids == video) * 2}
