"""Hugging Face folders of Step 3.7: as released, as transformers names its modules, and opened by transformers."""

import json
import shutil

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from cpjax.mesh import make_mesh
from cpjax.models import from_pretrained, save_pretrained, to_hf_names

from .step3p7_cases import FOLDER, golden_model


def tensors(folder):
    return load_file(folder / "model.safetensors")


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert np.asarray(found[name]).tobytes() == tensor.tobytes(), name


def test_round_trip_keeps_every_bit(tmp_path):
    save_pretrained(golden_model(), tmp_path / "out")
    assert_same(tensors(tmp_path / "out"), tensors(FOLDER))
    assert json.loads((tmp_path / "out/config.json").read_text()) == json.loads((FOLDER / "config.json").read_text())


def test_parameters_are_placed_on_the_mesh():
    model = from_pretrained(FOLDER, mesh=make_mesh(fsdp=2, cp=2))
    assert_same(to_hf_names(model, model), tensors(FOLDER))
    kernel = model.layers[1].slots[0].mlp.experts.gate_proj[...]
    assert kernel.shape == (2, 4, 32, 16) and kernel.addressable_shards[0].data.size < kernel.size


def test_a_folder_without_heads_ahead(tmp_path):
    """As transformers saves: the configuration still counts them."""
    shutil.copy(FOLDER / "config.json", tmp_path)
    kept = {
        name: t for name, t in tensors(FOLDER).items() if not name.startswith(("model.layers.5.", "model.layers.6."))
    }
    save_file(kept, tmp_path / "model.safetensors")
    model = from_pretrained(tmp_path)
    assert len(model.mtp) == model.config.text.num_nextn_predict_layers == 0
    save_pretrained(model, tmp_path / "out")
    assert_same(tensors(tmp_path / "out"), kept)
    assert from_pretrained(tmp_path / "out").config == model.config


def test_transformers_opens_the_export_and_we_what_it_saves(tmp_path):
    """With nothing missing and nothing unexpected, in both layouts."""
    pytest.importorskip("torch", reason="torch is not installed: this test opens exports with transformers")
    transformers = pytest.importorskip("transformers", reason="transformers is not installed: this test needs it")
    from transformers.modeling_layers import MtpModel

    save_pretrained(golden_model(), tmp_path / "out")
    theirs, info = transformers.Step3p7ForConditionalGeneration.from_pretrained(
        tmp_path / "out", output_loading_info=True
    )
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    theirs.config.text_config.mtp_per_layer_config = {0: {"num_attention_heads": 6}}
    heads = MtpModel.from_pretrained(theirs)
    kernel = tensors(FOLDER)["model.layers.6.shared_head.norm.weight"]
    np.testing.assert_array_equal(heads.layers[1].post_norm.weight.detach(), kernel)

    own = {
        name: t for name, t in tensors(FOLDER).items() if not name.startswith(("model.layers.5.", "model.layers.6."))
    }
    for name, options in (("released", {}), ("modules", {"save_original_format": False})):
        theirs.save_pretrained(tmp_path / name, **options)
        again = from_pretrained(tmp_path / name)
        assert_same(to_hf_names(again, again), own)
    assert "model.language_model.layers.1.mlp.experts.gate_up_proj" in tensors(tmp_path / "modules")
    save_pretrained(again, tmp_path / "again")
    _, info = transformers.Step3p7ForConditionalGeneration.from_pretrained(tmp_path / "again", output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
