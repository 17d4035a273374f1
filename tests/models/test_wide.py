"""Parameters that may not be rounded: bits and dtypes from the folder to the export, and what the layers compute in."""

import collections
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

from cpjax.mesh import make_mesh
from cpjax.models import family, from_pretrained, save_pretrained
from cpjax.models.common.checkpoint import leaves_by_path
from cpjax.shard import Identity, layout_from_name, make_batch
from cpjax.train.step import place_batch
from tests.jaxprs import equations
from tests.train import small

from .qwen3_5_cases import GOLDENS, golden, golden_rows

WIDE = {
    "qwen3_5": r"linear_attn\.(A_log|dt_bias|norm\.weight)$",
    "qwen3_5_moe": r"linear_attn\.(A_log|dt_bias|norm\.weight)$",
    "gemma4": r"\.(in|out)put_(min|max)$|vision_tower\.std_(bias|scale)$",
    "gemma4_e": r"\.(in|out)put_(min|max)$|per_dim_scale$",
    "gemma4_moe": r"per_expert_scale$|\.(in|out)put_(min|max)$|vision_tower\.std_(bias|scale)$",
    "step3p7": r"moe\.(gate\.weight|router_bias)$",
}
"""Names on disk."""


def tensors(folder):
    return load_file(folder / "model.safetensors")


def wide_names(name):
    return {key for key in tensors(GOLDENS / name) if re.search(WIDE[name], key)}


@functools.cache
def narrow(name):
    return from_pretrained(GOLDENS / name, dtype=jnp.bfloat16)


@pytest.mark.parametrize("name", WIDE)
def test_no_bit_is_lost_from_the_folder_to_the_export(name, tmp_path):
    before, wide = tensors(GOLDENS / name), wide_names(name)
    table = family(narrow(name).config.model_type).weights(narrow(name).config)
    assert wide and wide == {key for weight in table if weight.wide for key in weight.names}
    save_pretrained(narrow(name), tmp_path / "out")
    after = tensors(tmp_path / "out")
    assert after.keys() == before.keys()
    for key, value in after.items():
        assert value.dtype == (np.float32 if key in wide else jnp.bfloat16), key
        np.testing.assert_array_equal(value, before[key] if key in wide else before[key].astype(jnp.bfloat16))
    dtypes = {weight.path: jnp.float32 if weight.wide else jnp.bfloat16 for weight in table}
    for model in (from_pretrained(tmp_path / "out"), from_pretrained(GOLDENS / name, make_mesh(fsdp=2), jnp.bfloat16)):
        assert {path: leaf.dtype for path, leaf in leaves_by_path(model).items()} == dtypes


@pytest.mark.parametrize(
    ("held", "asked", "got"),
    [("bfloat16", "bfloat16", "bfloat16"), ("bfloat16", "float32", "float32"), ("float16", "bfloat16", "float32"),
     ("float32", "float16", "float32"), ("float16", None, "float16")],
)  # fmt: skip
def test_nothing_is_wider_than_the_folder_or_what_is_asked_for(held, asked, got, tmp_path):
    before = {key: value.astype(jnp.dtype(held)) for key, value in tensors(GOLDENS / "step3p7").items()}
    save_file(before, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_bytes((GOLDENS / "step3p7/config.json").read_bytes())
    model = from_pretrained(tmp_path, dtype=asked and jnp.dtype(asked))
    bias = model.layers[1].slots[0].mlp.router_bias[...]
    assert bias.dtype == got and model.embed_tokens[...].dtype == (asked or held)
    np.testing.assert_array_equal(bias[0], before["model.layers.1.moe.router_bias"])


def traced(model):
    """How often which dtypes are multiplied, and the final hidden states' dtype."""
    module, config, rng = family(model.config.model_type), model.config, np.random.default_rng(0)
    row = module.synthetic_row(config, 24, 32, rng)
    batch, sharder = make_batch(module.prepare(config, [row]), Identity(), streams=module.STREAMS)
    assert "pixel_values" in batch
    graph, state = nnx.split(model)

    def run(state):
        model = nnx.merge(graph, state)
        return model(batch, sharder, remat="none")

    found = equations(jax.make_jaxpr(run)(state).jaxpr)
    dots = [tuple(v.aval.dtype.name for v in e.invars) for e in found if e.primitive.name == "dot_general"]
    return collections.Counter(dots), jax.eval_shape(run, state).dtype


@pytest.mark.parametrize("name", WIDE)
def test_what_is_wide_makes_no_activation_wide(name):
    """As where all is bfloat16, but for the logits of Step's routers."""
    graph, state = nnx.split(narrow(name))
    rounded = nnx.merge(graph, jax.tree.map(lambda x: x.astype(jnp.bfloat16), state))
    (dots, hidden), (wanted, _) = traced(narrow(name)), traced(rounded)
    assert hidden == jnp.bfloat16 and wanted["bfloat16", "bfloat16"] > 10
    routers = 2 if name == "step3p7" else 0  # one in each stack that has some
    assert dots - wanted == collections.Counter({("float32", "float32"): routers} if routers else {})
    assert (wanted - dots).total() == routers


def test_bfloat16_is_no_further_from_float32():
    """Than where what is wide is rounded as well; most of the distance is that of the activations."""
    case, model, module = golden("text"), narrow("qwen3_5"), family("qwen3_5")
    rows = module.prepare(model.config, golden_rows(case, model.config))
    batch, sharder = make_batch(rows, Identity(), streams=module.STREAMS)
    graph, state = nnx.split(model)

    @functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})
    def logits(state):
        model = nnx.merge(graph, state)
        return model.logits(model(batch, sharder, remat="none"))

    def distance(state):
        real = case["attention_mask"] == 1
        return np.square(np.float32(logits(state)) - case["logits"])[real].mean() ** 0.5

    rounded = jax.tree.map(lambda x: x.astype(jnp.bfloat16).astype(x.dtype), state)  # for the same program
    assert 0 < distance(state) < 1.1 * distance(rounded) < 0.1


@pytest.mark.parametrize("name", ["qwen3_5", "step3p7"])
def test_training_keeps_the_dtypes(name):
    """Under context parallelism, and of what the optimizer keeps of parameters; nothing is compiled."""
    model, module = nnx.clone(narrow(name)), family(narrow(name).config.model_type)
    row = module.synthetic_row(model.config, 24, 32, np.random.default_rng(0))
    batch = make_batch(module.prepare(model.config, [row]), layout_from_name("zigzag", 2), streams=module.STREAMS)
    run = small.Uncompiled(cp=2, model=model, freeze=(), batch=batch)
    batch = place_batch(run.batch, run.mesh)
    state, _ = jax.eval_shape(run.step, run.state, batch, run.sharder)
    assert jax.tree.map(lambda x: x.dtype, state) == jax.tree.map(lambda x: x.dtype, run.state)
    arrays = run.state.params | run.state.frozen
    assert {weight.path for weight in module.weights(model.config) if arrays[weight.path].dtype == jnp.float32} == {
        weight.path for weight in module.weights(model.config) if weight.wide
    }
