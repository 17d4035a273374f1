"""Qwen3.5 with mixtures of experts: its folders, sizes and routers. Parity and context parallelism: with the dense."""

import dataclasses
import json

import jax
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file

from cpjax.mesh import make_mesh
from cpjax.models import from_pretrained, save_pretrained, to_hf_names
from cpjax.models.common import checkpoint
from cpjax.models.generate import generate
from cpjax.models.qwen3_5_moe import Config, Qwen3_5Moe, Row, TextConfig, VisionConfig, prepare, stacked_weights
from cpjax.shard import Identity, make_batch

from .qwen3_5_cases import GOLDENS, golden, golden_model

FOLDER = GOLDENS / "qwen3_5_moe"


def model_and_config():
    model = golden_model("qwen3_5_moe")
    return model, model.config


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert np.asarray(found[name]).tobytes() == np.asarray(tensor).tobytes(), name


def test_pads_reach_no_expert_and_no_statistic():
    model, config = model_and_config()
    rng = np.random.default_rng(0)
    rows = [Row(rng.integers(1, 90, length)) for length in (21, 9)]

    @jax.jit
    def sums(batch, sharder):
        return model.outputs(batch, sharder)[1]

    batch, sharder = make_batch(prepare(config, rows, length=32), Identity())
    other = {**batch, "input_ids": jax.numpy.where(batch["padding_mask"], 7, batch["input_ids"])}
    found = [sums(batch, sharder), sums(other, sharder)]
    layers, text = config.text.num_hidden_layers, config.text
    for part in found:
        assert part.tokens == layers * 30 and part.chosen.sum() == text.num_experts_per_tok * layers * 30
        np.testing.assert_allclose(part.probabilities.sum(), layers * 30, rtol=1e-6)
    jax.tree.map(np.testing.assert_array_equal, *found)
    assert len(set(found[0].chosen.tolist())) > 4


def test_tokens_that_follow_are_those_of_transformers():
    model, config = model_and_config()
    wanted = golden("generated", "qwen3_5_moe")["tokens"].tolist()
    prompt = Row(golden("text", "qwen3_5_moe")["input_ids"][0])
    assert generate(model, [prompt], 8, stop_tokens=[0]) == wanted
    assert len(set(wanted[0])) > 2


def test_folders_in_both_layouts(tmp_path):
    """As released, an expert at a time, and with all experts of a layer in one tensor; on a mesh as well."""
    model, config = model_and_config()
    save_pretrained(model, tmp_path / "out")
    assert json.loads((tmp_path / "out/config.json").read_text()) == json.loads((FOLDER / "config.json").read_text())
    released = load_file(FOLDER / "model.safetensors")
    assert_same(load_file(tmp_path / "out/model.safetensors"), released)
    checkpoint.save(stacked_weights(config), model, config.to_dict(), tmp_path / "stacked", 10**9)
    stacked = load_file(tmp_path / "stacked/model.safetensors")
    name = "model.language_model.layers.2.mlp.experts"
    one = [released[f"{name}.5.{part}_proj.weight"] for part in ("gate", "up")]
    np.testing.assert_array_equal(stacked[f"{name}.gate_up_proj"][5], np.concatenate(one))
    for mesh in (None, make_mesh(fsdp=2, cp=2)):
        again = from_pretrained(tmp_path / "stacked", mesh=mesh)
        assert_same(to_hf_names(again, again), released)


@pytest.mark.parametrize("original", [True, False])
def test_transformers_opens_the_export_and_we_open_its_own(tmp_path, original):
    """With nothing missing and nothing unexpected, and every bit the same there and back, in both layouts."""
    pytest.importorskip("torch", reason="torch is not installed: this test opens exports with transformers")
    transformers = pytest.importorskip("transformers", reason="transformers is not installed: this test needs it")
    model, config = model_and_config()
    if original:
        save_pretrained(model, tmp_path / "out")
    else:
        checkpoint.save(stacked_weights(config), model, config.to_dict(), tmp_path / "out", 10**9)
    theirs, info = transformers.Qwen3_5MoeForConditionalGeneration.from_pretrained(
        tmp_path / "out", output_loading_info=True
    )
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    theirs.save_pretrained(tmp_path / "theirs", save_original_format=original)
    names = load_file(tmp_path / "theirs/model.safetensors").keys()
    assert any(name.endswith("experts.gate_up_proj") for name in names) is not original
    assert_same(to_hf_names(model, from_pretrained(tmp_path / "theirs")), to_hf_names(model, model))


def released_config():
    """The sizes of the classes' defaults, those of Qwen3.5-35B-A3B, with a tower as wide as the text."""
    return Config(vision=VisionConfig(out_hidden_size=2048))


def parameters(config):
    shapes = nnx.state(nnx.eval_shape(lambda: Qwen3_5Moe(config, rngs=nnx.Rngs(0))), nnx.Param)
    return sum(int(np.prod(leaf.shape)) for leaf in jax.tree.leaves(shapes))


def test_parameters_of_the_released_size_are_those_of_transformers():
    found = parameters(released_config())
    assert found == 35_107_181_936  # those of transformers 5.24
    torch = pytest.importorskip("torch", reason="torch is not installed: compared to a figure alone")
    transformers = pytest.importorskip(
        "transformers", reason="transformers is not installed: only a figure was checked"
    )
    with torch.device("meta"):
        theirs = transformers.Qwen3_5MoeForConditionalGeneration(
            transformers.Qwen3_5MoeConfig(vision_config=dict(out_hidden_size=2048))
        )
    assert found == sum(p.numel() for p in theirs.parameters())


def test_the_program_does_not_grow_with_depth():
    """Neither do its trace nor, therefore, the time to compile it: 40 layers are as long as 8."""

    def size(layers):
        config = golden_model("qwen3_5_moe").config
        text = dataclasses.replace(config.text, num_hidden_layers=layers, layer_types=None)
        config = dataclasses.replace(config, text=text)
        graph, params = nnx.split(nnx.eval_shape(lambda: Qwen3_5Moe(config, rngs=nnx.Rngs(0))))
        batch, sharder = make_batch(prepare(config, [Row([1, 2, 3])]), Identity())

        def loss(params):
            return nnx.merge(graph, params)(batch, sharder).sum()

        return len(jax.jit(jax.grad(loss)).lower(params).as_text().splitlines())

    assert size(8) == size(40)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_experts_per_tok": 9}, r"num_experts_per_tok=9 is more than num_experts=8"),
        ({"num_experts": 0}, r"text_config.num_experts=0 must be an integer >= 1"),
        ({"hidden_act": "gelu"}, r"hidden_act='gelu' is not supported"),
    ],
)
def test_config_refuses(change, message):
    source = json.loads((FOLDER / "config.json").read_text())
    source["text_config"] |= change
    with pytest.raises(ValueError, match=message):
        Config.from_dict(source)


def test_config_is_written_verbatim_until_a_field_changes():
    source = json.loads((FOLDER / "config.json").read_text())
    config = Config.from_dict(source)
    assert config.to_dict() == source and config.text.router_loss == 0.3 and TextConfig().router_loss == 0
    changed = dataclasses.replace(config, tie_word_embeddings=True)
    assert Config.from_dict(changed.to_dict()) == changed
    assert changed.to_dict()["text_config"]["model_type"] == "qwen3_5_moe_text"
