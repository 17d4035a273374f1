"""PEFT's configuration of LoRA, field by field, and adapters that give the one table of a tied model two values."""

import functools
import json
import shutil

import jax
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

from cpjax.models import from_pretrained
from cpjax.train.config import LoraConfig
from cpjax.train.lora import (
    READ,
    REFUSED,
    WITHOUT_EFFECT,
    add_adapters,
    load_adapter,
    merge,
    merge_adapters,
    read_adapter_config,
    save_adapter,
)
from tests.models.qwen3_5_cases import FOLDER, GOLDENS

ADAPTER = GOLDENS / "qwen3_5-lora"
CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
DEFAULTS = json.loads((GOLDENS / "peft-lora-fields.json").read_text())["fields"]
LORA_A = "base_model.model.model.language_model.layers.{}.{}.lora_A.weight"
EMBED, HEAD = "base_model.model.model.language_model.embed_tokens.weight", "base_model.model.lm_head.weight"


def changed(folder, values=None, change=None, source=ADAPTER):
    """A copy of an adapter with other values in its configuration, or other tensors."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(source, folder)
    if values:
        config = json.loads((folder / CONFIG).read_text()) | values
        (folder / CONFIG).write_text(json.dumps(config))
    if change:
        held = load_file(folder / TENSORS)
        change(held)
        save_file(held, folder / TENSORS)
    return folder


@functools.cache
def golden_model(name="qwen3_5"):
    return from_pretrained(GOLDENS / name)


def refusal(folder):
    with pytest.raises(ValueError, match=r".") as error:
        load_adapter(nnx.clone(golden_model()), folder)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_every_field_is_honoured_refused_or_without_effect():
    """Those of the version of PEFT that wrote the list."""
    listed = [*READ, *REFUSED, *WITHOUT_EFFECT]
    assert len(listed) == len(set(listed)) and set(listed) == set(DEFAULTS) and len(DEFAULTS) > 40


def test_defaults_are_read_and_what_is_not_supported_is_named(tmp_path):
    assert read_adapter_config(changed(tmp_path / "a", DEFAULTS))["r"] == 8
    values = {bool: True, dict: {"q_proj": 2}, str: "all", type(None): ["x"]}
    for name in REFUSED:
        folder = changed(tmp_path / "a", {name: values[type(DEFAULTS[name])]})
        with pytest.raises(ValueError, match=rf"has {name} .*, which is not supported: train without it"):
            read_adapter_config(folder)
    assert read_adapter_config(changed(tmp_path / "a", {"use_something": None}))["use_something"] is None
    with pytest.raises(ValueError, match="has use_something 3, which is not known"):
        read_adapter_config(changed(tmp_path / "a", {"use_something": 3}))


def test_fields_without_effect_have_none(tmp_path):
    values = {bool: True, dict: {"a": 2}, str: "other", type(None): {"b": 1}, int: 7, float: 0.5}
    folder = changed(tmp_path / "a", {name: values[type(DEFAULTS[name])] for name in WITHOUT_EFFECT})
    found, wanted = nnx.clone(golden_model()), nnx.clone(golden_model())
    assert load_adapter(found, folder) == load_adapter(wanted, ADAPTER)
    jax.tree.map(np.testing.assert_array_equal, nnx.state(found), nnx.state(wanted))


@pytest.mark.parametrize(
    "start", ["pissa", "pissa_niter_16", "olora", "OLoRA", "corda", "loftq", "lora_ga", "kasa", "some_new_one"]
)
def test_what_changes_the_base_is_refused(start, tmp_path):
    with pytest.raises(ValueError, match=rf"has init_lora_weights '{start}', which changes the model that it adapts"):
        merge(changed(tmp_path / "a", {"init_lora_weights": start}), tmp_path / "out", "no such folder")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("start", [True, False, None, "gaussian", "eva", "orthogonal", "mica"])
def test_what_only_starts_the_adapter_is_read(start, tmp_path):
    read_adapter_config(changed(tmp_path / "a", {"init_lora_weights": start}))


def test_fields_that_are_honoured(tmp_path):
    """Each says something else than the tensors: the first that differs is named."""
    other = tmp_path / "a"
    assert "peft_type 'IA3': only 'LORA'" in refusal(changed(other, {"peft_type": "IA3"}))
    for wrong in ({"r": 0}, {"r": "4"}, {"r": True}, {"lora_alpha": None}, {"lora_alpha": "8"}):
        assert "they must be numbers, r above 0" in refusal(changed(other, wrong))
    assert "needs (6, 32)" in refusal(changed(other, {"r": 6}))
    first = "model.language_model.layers.0.linear_attn.in_proj_qkv, which its target_modules do not name"
    assert first in refusal(changed(other, {"target_modules": ["q_proj", "down_proj", "attn.qkv"]}))
    assert first in refusal(changed(other, {"exclude_modules": ["in_proj_qkv"]}))
    assert first in refusal(changed(other, {"exclude_modules": r".*qkv"}))
    assert first in refusal(changed(other, {"target_modules": r".*\.(q_proj|down_proj|attn\.qkv)"}))
    named = {"target_modules": ["q_proj", "down_proj", "in_proj_qkv", "attn.qkv"]}
    for where in ({"layers_to_transform": 1}, {"layers_to_transform": [1, 2], "layers_pattern": "layers"}):
        assert "layers.0.linear_attn.in_proj_qkv, which its target_modules do not" in refusal(
            changed(other, named | where)
        ) or "layers.0.mlp.down_proj, which its target_modules do not" in refusal(changed(other, named | where))
    blocks = {"layers_to_transform": [0, 1], "layers_pattern": ["blocks"]}
    assert "layers.0" in refusal(changed(other, named | blocks))
    everywhere = {"layers_to_transform": list(range(8)), "layers_pattern": ["blocks", "layers"]}
    load_adapter(nnx.clone(golden_model()), changed(other, named | everywhere))
    assert "nothing for model.language_model.layers.3.self_attn.k_proj" in refusal(
        changed(other, {"target_modules": ["q_proj", "down_proj", "in_proj_qkv", "attn.qkv", "k_proj"]})
    )
    assert "nothing for lm_head" in refusal(changed(other, {"target_modules": [*named["target_modules"], "lm_head"]}))
    assert f"nothing at {EMBED}, which its modules_to_save name" in refusal(
        changed(other, {"modules_to_save": ["embed_tokens"]})
    )
    assert "modules_to_save 'score', which this model does not have" in refusal(
        changed(other, {"modules_to_save": ["score"]})
    )
    load_adapter(nnx.clone(golden_model()), changed(other, {"target_modules": "all-linear"}))


def test_tensors_that_no_adapter_can_have(tmp_path):
    held = load_file(ADAPTER / TENSORS)
    qkv = LORA_A.format(0, "linear_attn.in_proj_qkv")
    for name in ("base_model.model.lm_head.lora_A.weight", EMBED.replace("weight", "lora_embedding_A"), "x.y"):
        folder = changed(
            tmp_path / "a", {"target_modules": "all-linear"}, lambda t, name=name: t.update({name: held[qkv]})
        )
        assert f"holds {name}, for which the model has no adapter: only projections inside layers are" in refusal(
            folder
        )
    whole = {qkv: np.zeros(held[qkv].shape, np.int8)}
    assert f"{qkv} in" in (text := refusal(changed(tmp_path / "a", change=lambda t: t.update(whole))))
    assert "is of type I8: only F64" in text


@pytest.fixture(scope="module")
def tied(tmp_path_factory):
    """A tied model, and an adapter that trains its table whole."""
    root = tmp_path_factory.mktemp("tied")
    shutil.copytree(FOLDER, root / "base")
    config = json.loads((FOLDER / "config.json").read_text())
    config["tie_word_embeddings"] = config["text_config"]["tie_word_embeddings"] = True
    (root / "base/config.json").write_text(json.dumps(config))
    held = load_file(FOLDER / "model.safetensors")
    del held["lm_head.weight"]
    save_file(held, root / "base/model.safetensors")
    model, options = from_pretrained(root / "base"), LoraConfig(rank=2, targets=["q_proj"], modules_to_save=["^embed"])
    add_adapters(model, options)
    model.embed_tokens[...] = model.embed_tokens[...] + 0.5
    save_adapter(model, root / "adapter", options, str(root / "base"))
    return root


def merged(root, folder):
    out = folder.parent / "merged"
    shutil.rmtree(out, ignore_errors=True)
    merge(folder, out, str(root / "base"))
    config = json.loads((out / "config.json").read_text())
    assert config["tie_word_embeddings"] == config["text_config"]["tie_word_embeddings"]
    held = load_file(out / "model.safetensors")
    from_pretrained(out)
    return config["tie_word_embeddings"], held[EMBED[17:]], held.get(HEAD[17:])


def test_a_tied_table_is_saved_as_embeddings_and_head(tied, tmp_path):
    """So that PEFT has both, also a version that does not know `ensure_weight_tying`."""
    config, held = json.loads((tied / "adapter" / CONFIG).read_text()), load_file(tied / "adapter" / TENSORS)
    assert config["ensure_weight_tying"] is True
    assert config["modules_to_save"] == ["lm_head", "model.language_model.embed_tokens"]
    np.testing.assert_array_equal(held[EMBED], held[HEAD])
    is_tied, embed, head = merged(tied, changed(tmp_path / "a", source=tied / "adapter"))
    assert is_tied and head is None
    np.testing.assert_array_equal(embed, held[EMBED])
    untied = nnx.clone(golden_model())
    add_adapters(untied, LoraConfig(rank=2, targets=["q_proj"], modules_to_save=["^embed"]))
    save_adapter(untied, tmp_path / "untied", LoraConfig(rank=2), "base")
    assert json.loads((tmp_path / "untied" / CONFIG).read_text())["ensure_weight_tying"] is False
    assert HEAD not in load_file(tmp_path / "untied" / TENSORS)


WAYS = {  # what to change of that adapter; then whether the merged model is tied, and where its head is from
    "embeddings alone, the head stays": (
        {"ensure_weight_tying": False, "modules_to_save": ["embed_tokens"]},
        "",
        "base",
    ),
    "embeddings alone, tied": ({"modules_to_save": ["embed_tokens"]}, "", None),
    "both alike": ({"ensure_weight_tying": False}, "both", None),
    "both, apart": ({"ensure_weight_tying": False}, "apart", "adapter"),
    "the head alone": ({"ensure_weight_tying": False, "modules_to_save": ["lm_head"]}, "head", "adapter"),
    "saved beside the adapter": ({"ensure_weight_tying": False, "modules_to_save": None}, "both", None),
}


@pytest.mark.parametrize("way", WAYS)
def test_adapters_of_a_tied_model_merge_as_peft_applies_them(way, tied, tmp_path):
    values, keep, wanted = WAYS[way]

    def change(held):
        if keep == "apart":
            held[HEAD] = held[HEAD] - 1
        if not keep:
            del held[HEAD]
        if keep == "head":
            del held[EMBED]

    folder = changed(tmp_path / "a", values, change, tied / "adapter")
    base, given = load_file(tied / "base/model.safetensors")[EMBED[17:]], load_file(folder / TENSORS)
    is_tied, embed, head = merged(tied, folder)
    assert is_tied == (wanted is None) == (head is None)
    np.testing.assert_array_equal(embed, given.get(EMBED, base))
    if wanted:
        np.testing.assert_array_equal(head, {"base": base, "adapter": given.get(HEAD)}[wanted])


def test_a_model_that_was_untied_is_trained_and_saved_as_such(tied, tmp_path):
    """Going on from an adapter that leaves the head as it was."""
    values = {"ensure_weight_tying": False, "modules_to_save": ["embed_tokens"]}
    before = changed(tmp_path / "a", values, lambda held: held.pop(HEAD), tied / "adapter")
    model, options = from_pretrained(tied / "base"), LoraConfig(rank=2, targets=["q_proj"], modules_to_save=["^embed"])
    load_adapter(model, before, options)
    assert not model.config.tie_word_embeddings and isinstance(model.embed_tokens, nnx.LoRAParam)
    save_adapter(model, tmp_path / "again", options, "base")
    assert json.loads((tmp_path / "again" / CONFIG).read_text())["ensure_weight_tying"] is False
    held, wanted = load_file(tmp_path / "again" / TENSORS), load_file(before / TENSORS)
    assert held.keys() == wanted.keys()
    for name in held:
        np.testing.assert_array_equal(held[name], wanted[name])


def test_a_family_that_is_always_tied_refuses_a_head_of_its_own(tmp_path):
    model, options = nnx.clone(golden_model("gemma4")), LoraConfig(rank=2, modules_to_save=["^embed_tokens"])
    add_adapters(model, options)
    save_adapter(model, tmp_path / "adapter", options, "base")
    load_adapter(nnx.clone(golden_model("gemma4")), tmp_path / "adapter")
    values = {"ensure_weight_tying": False, "modules_to_save": ["embed_tokens"]}
    other = changed(tmp_path / "a", values, lambda held: held.pop(HEAD), tmp_path / "adapter")
    with pytest.raises(ValueError, match=r"token embeddings and head differ, which are one in every gemma4 model"):
        load_adapter(nnx.clone(golden_model("gemma4")), other)


@pytest.mark.parametrize("name", ["qwen3_5_moe", "step3p7"])
def test_experts_and_routers_are_saved_as_the_modules_of_transformers(name, tmp_path):
    """Stacked, a router with its bias, which is not trained; and loaded again, bit for bit."""
    model, options = (
        nnx.clone(golden_model(name)),
        LoraConfig(rank=2, targets=["q_proj"], modules_to_save=["experts", r"mlp\.gate\."]),
    )
    add_adapters(model, options)
    save_adapter(model, tmp_path / "adapter", options, "base")
    held = load_file(tmp_path / "adapter" / TENSORS)
    layer = "base_model.model.model.language_model.layers.1.mlp."
    assert held[f"{layer}experts.gate_up_proj"].shape[0] == held[f"{layer}gate.weight"].shape[0]
    assert (f"{layer}gate.e_score_correction_bias" in held) == (name == "step3p7")
    again = nnx.clone(golden_model(name))
    load_adapter(again, tmp_path / "adapter")
    jax.tree.map(np.testing.assert_array_equal, *(nnx.state(m, nnx.LoRAParam) for m in (model, again)))
    merge_adapters(again)
    with pytest.raises(ValueError, match="matches no parameter"):
        add_adapters(again, LoraConfig(rank=2, targets=[r"mlp\.gate\."]))


def test_heads_ahead_are_no_part_of_what_an_adapter_must_have(tmp_path):
    """PEFT does not know them, though the patterns of an adapter match their names."""
    model, options = nnx.clone(golden_model("step3p7")), LoraConfig(rank=2, targets=["language_model.*q_proj"])
    add_adapters(model, options)
    save_adapter(model, tmp_path / "adapter", options, "base")
    values = {"target_modules": r".*language_model.*q_proj"}
    again = nnx.clone(golden_model("step3p7"))
    assert len(again.mtp) == 2
    load_adapter(again, changed(tmp_path / "a", values, source=tmp_path / "adapter"))
    jax.tree.map(np.testing.assert_array_equal, *(nnx.state(m, nnx.LoRAParam) for m in (model, again)))
