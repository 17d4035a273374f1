"""Adapters of a family whose released folders name tensors otherwise than transformers its modules, as PEFT does."""

import jax
import numpy as np
from flax import nnx
from safetensors.numpy import load_file

from cpjax.models import from_pretrained
from cpjax.train.config import LoraConfig
from cpjax.train.lora import add_adapters, load_adapter, save_adapter
from tests.models.step3p7_cases import FOLDER


def test_adapters_are_named_and_ordered_as_the_modules_of_transformers(tmp_path):
    options = LoraConfig(rank=2, targets=["language_model.*_proj", "vision_model.*q_proj"])
    model, again = from_pretrained(FOLDER), from_pretrained(FOLDER)
    add_adapters(model, options)
    rng = np.random.default_rng(0)
    fresh = nnx.state(model, nnx.LoRAParam)
    nnx.update(model, jax.tree.map(lambda x: rng.normal(size=x.shape).astype(np.float32), fresh))
    save_adapter(model, tmp_path / "adapter", options, "base")
    held = load_file(tmp_path / "adapter/adapter_model.safetensors")
    modules = {name.removeprefix("base_model.model.model.").rsplit(".lora_", 1)[0] for name in held}
    assert "language_model.layers.1.mlp.shared_experts.up_proj" in modules
    assert not any(".layers.5." in name or ".layers.6." in name for name in modules)  # the heads ahead
    # The pairs that rope turns lie side by side in released folders, half a head apart in modules: heads of 8.
    ours = np.asarray(model.visual.blocks.attn.q_proj.adapter.b[...])[0]
    theirs = held["base_model.model.model.vision_model.layers.0.self_attn.q_proj.lora_B.weight"]
    np.testing.assert_array_equal(ours[:, :8].T, theirs[[0, 4, 1, 5, 2, 6, 3, 7]])

    load_adapter(again, tmp_path / "adapter")
    found, expected = (jax.tree.leaves(nnx.state(m, nnx.LoRAParam)) for m in (again, model))
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(one, other)
