"""Hugging Face folders of Gemma 4: round trips, and transformers opening what was written."""

import dataclasses
import json

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

from cpjax.models import from_pretrained, save_pretrained, to_hf_names
from cpjax.models.common.checkpoint import leaves_by_path
from cpjax.models.gemma4 import Config, Gemma4, weights
from cpjax.train.step import split_model

from .gemma4_cases import golden_model
from .qwen3_5_cases import GOLDENS

FAMILIES = ("gemma4", "gemma4_e", "gemma4_moe")


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape), name
        assert np.asarray(found[name]).tobytes() == np.asarray(tensor).tobytes(), name


@pytest.mark.parametrize("family", FAMILIES)
def test_round_trip_keeps_every_bit(family, tmp_path):
    save_pretrained(golden_model(family), tmp_path / "out")
    assert_same(load_file(tmp_path / "out/model.safetensors"), load_file(GOLDENS / family / "model.safetensors"))
    written, read = ((folder / "config.json").read_text() for folder in (tmp_path / "out", GOLDENS / family))
    assert json.loads(written) == json.loads(read)


def test_a_folder_of_one_s_own(tmp_path):
    """Fresh weights in bfloat16 and a configuration from code."""
    config = dataclasses.replace(golden_model("gemma4_e").config, source={})
    model = Gemma4(config, rngs=nnx.Rngs(1), dtype=jnp.bfloat16)
    save_pretrained(model, tmp_path / "out", max_shard_bytes=100_000)
    again = from_pretrained(tmp_path / "out")
    assert again.config == config
    assert_same(to_hf_names(again, again), to_hf_names(model, model))


@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_saved_but_not_trained(family):
    _, params, buffers = split_model(golden_model(family))
    kinds = {name.split(".")[-1] for name in buffers}
    clips = {"input_min", "input_max", "output_min", "output_max"}
    wanted = {"gemma4": {"std_bias", "std_scale"}, "gemma4_e": clips, "gemma4_moe": set()}[family]
    assert kinds == {"layer_scalar"} | wanted
    assert not kinds & {name.split(".")[-1] for name in params}


def test_keys_of_layers_that_share_them_are_ignored(tmp_path, recwarn):
    """Released files hold some that no layer uses."""
    tensors = load_file(GOLDENS / "gemma4_e/model.safetensors")
    extra = ("self_attn.k_proj.weight", "self_attn.v_proj.weight", "self_attn.k_norm.weight")
    tensors |= {f"model.language_model.layers.7.{name}": np.zeros((2, 2), np.float32) for name in extra}
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_bytes((GOLDENS / "gemma4_e/config.json").read_bytes())
    from_pretrained(tmp_path)
    assert not recwarn.list


@pytest.mark.parametrize("family", FAMILIES)
def test_transformers_opens_the_export(family, tmp_path):
    """With nothing missing, nothing unexpected, and every tensor bit for bit."""
    pytest.importorskip("torch", reason="torch is not installed: this test opens exports with transformers")
    transformers = pytest.importorskip("transformers", reason="transformers is not installed: this test needs it")
    config = dataclasses.replace(golden_model(family).config, source={})
    model = from_pretrained(GOLDENS / family)
    model.config = config
    save_pretrained(model, tmp_path / "out", max_shard_bytes=100_000)
    theirs, info = transformers.Gemma4ForConditionalGeneration.from_pretrained(
        tmp_path / "out", output_loading_info=True, attn_implementation="eager"
    )
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    found = {name: tensor.numpy() for name, tensor in theirs.state_dict().items() if name != "lm_head.weight"}
    assert_same(found, {name: np.asarray(value) for name, value in to_hf_names(model, model).items()})
    theirs.save_pretrained(tmp_path / "theirs")
    assert Config.from_dict(json.loads((tmp_path / "theirs/config.json").read_text())) == config


RELEASED = {
    "31B": dict(
        text=dict(
            hidden_size=5376, intermediate_size=21504, num_hidden_layers=60, num_attention_heads=32,
            num_key_value_heads=16, num_global_key_value_heads=4, attention_k_eq_v=True, sliding_window=1024,
            hidden_size_per_layer_input=0, use_bidirectional_attention="vision", final_logit_softcapping=30.0,
        ),
        vision=dict(
            hidden_size=1152, intermediate_size=4304, num_hidden_layers=27, num_attention_heads=16,
            num_key_value_heads=16, head_dim=72, standardize=True,
        ),
        audio=None,
    ),
    "26B-A4B": dict(
        text=dict(
            hidden_size=2816, intermediate_size=2112, num_hidden_layers=30, num_attention_heads=16,
            num_key_value_heads=8, num_global_key_value_heads=2, attention_k_eq_v=True, sliding_window=1024,
            hidden_size_per_layer_input=0, use_bidirectional_attention="vision", final_logit_softcapping=30.0,
            enable_moe_block=True, num_experts=128, top_k_experts=8, moe_intermediate_size=704,
        ),
        vision=dict(
            hidden_size=1152, intermediate_size=4304, num_hidden_layers=27, num_attention_heads=16,
            num_key_value_heads=16, head_dim=72, standardize=True,
        ),
        audio=None,
    ),
    "E2B": dict(
        text=dict(
            hidden_size=1536, intermediate_size=6144, num_hidden_layers=35, num_attention_heads=8,
            num_key_value_heads=1, num_kv_shared_layers=20, use_double_wide_mlp=True, final_logit_softcapping=30.0,
            layer_types=[*["sliding_attention"] * 4, "full_attention"] * 7,
        ),
        vision=dict(use_clipped_linears=True),
        audio={},
    ),
}  # fmt: skip
"""Sizes like those of released models."""


@pytest.mark.parametrize("name", RELEASED)
def test_tensors_of_released_sizes_are_those_of_transformers(name):
    torch = pytest.importorskip("torch", reason="torch is not installed: this test builds models of transformers")
    transformers = pytest.importorskip("transformers", reason="transformers is not installed: this test needs it")
    parts = RELEASED[name]
    source = {"model_type": "gemma4", "text_config": parts["text"], "vision_config": parts["vision"]}
    if parts["audio"] is not None:
        source["audio_config"] = {"hidden_size": 1024}
    config = Config.from_dict(source)
    abstract = nnx.eval_shape(lambda: Gemma4(config, rngs=nnx.Rngs(0)))
    leaves = leaves_by_path(abstract)
    ours = {n: w.shape_on_disk(leaves[w.path].shape) for w in weights(config) for n in w.names}
    assert leaves.keys() == {weight.path for weight in weights(config)}
    with torch.device("meta"):
        theirs = transformers.Gemma4ForConditionalGeneration(transformers.Gemma4Config(**config.to_dict()))
    assert ours == {name: tuple(t.shape) for name, t in theirs.state_dict().items() if name != "lm_head.weight"}
