"""config.json on its way out: what a family does not use is written as it was read, whatever else changed."""

import copy
import dataclasses
import json
import shutil

import pytest
from safetensors.numpy import load_file, save_file

from cpjax.models import family, from_pretrained, save_pretrained
from cpjax.models.common.rope import Rope

from .qwen3_5_cases import GOLDENS

pytestmark = pytest.mark.filterwarnings("ignore:.* not known here")

UNUSED = {
    "dtype": "float32", "eos_token_id": [3, 4], "bos_token_id": 2, "max_position_embeddings": 4096, "use_cache": False,
    "initializer_range": 0.01, "embd_pdrop": 0.1, "auto_map": {"AutoConfig": "own.Config"},
    "made_by": ["me", None, 0.0],
}  # fmt: skip
CHANGES = {
    "qwen3_5": {"vocab_size": 112, "rope_theta": 10.0},
    "qwen3_5_moe": {"router_aux_loss_coef": 0.5},
    "gemma4": {"sliding_window": 5, "sliding_rope": Rope(theta=10.0)},
    "gemma4_e": {"final_logit_softcapping": 3.0},
    "step3p7": {"moe_router_scaling_factor": 2.0, "num_key_value_heads": 1, "num_experts_per_tok": 1},
}  # fmt: skip


def read(name):
    return json.loads((GOLDENS / name / "config.json").read_text())


def with_unused(name):
    """A config.json with things that nobody here knows, at every depth."""
    source = read(name)
    parts = [source, *(part for part in source.values() if isinstance(part, dict))]
    for part in parts:
        part.update({key: value for key, value in UNUSED.items() if key not in part})
    return source


@pytest.mark.parametrize("name", CHANGES)
def test_unused_fields_outlive_a_change_of_others(name):
    source = with_unused(name)
    config = family(source["model_type"]).Config.from_dict(source)
    changed = dataclasses.replace(config, text=dataclasses.replace(config.text, **CHANGES[name]))
    written = changed.to_dict()
    assert type(config).from_dict(written) == changed != config
    for old, new in [(source, written), *((source[key], written[key]) for key in source if key.endswith("_config"))]:
        if old is not None:
            assert {key: new[key] for key in UNUSED} == {key: old[key] for key in UNUSED}
    assert config.to_dict() == source == with_unused(name)  # untouched


def test_names_that_released_files_have_do_not_contradict_the_changed_ones():
    source = read("step3p7")
    config = family("step3p7").Config.from_dict(source)
    text = dataclasses.replace(config.text, num_key_value_heads=1, num_nextn_predict_layers=0, mtp_layer_types=(),
                               mtp_mlp_layer_types=(), swiglu_limits=config.text.swiglu_limits[:5],
                               swiglu_limits_shared=config.text.swiglu_limits_shared[:5])  # fmt: skip
    written = dataclasses.replace(config, text=text).to_dict()["text_config"]
    assert written["num_key_value_heads"] == 1 and "num_attention_groups" not in written
    assert written["swiglu_limits"] == source["text_config"]["swiglu_limits"][:5]


@pytest.mark.parametrize(("name", "count", "prefixes"), [
    ("step3p7", "num_nextn_predict_layers", ("model.layers.5.", "model.layers.6.")),
    ("qwen3_5", "mtp_num_hidden_layers", ("mtp.",)),
    ("qwen3_5_moe", "mtp_num_hidden_layers", ("mtp.",)),
])  # fmt: skip
def test_a_folder_without_the_heads_that_its_configuration_counts(name, count, prefixes, tmp_path):
    """Exports say so, and keep all else bit for bit."""
    shutil.copytree(GOLDENS / name, tmp_path / "in")
    source = with_unused(name)
    source["text_config"].setdefault(count, 1)
    (tmp_path / "in/config.json").write_text(json.dumps(source))
    held = load_file(tmp_path / "in/model.safetensors")
    save_file({key: held[key] for key in held if not key.startswith(prefixes)}, tmp_path / "in/model.safetensors")

    model = from_pretrained(tmp_path / "in")
    save_pretrained(model, tmp_path / "out")
    written, wanted = json.loads((tmp_path / "out/config.json").read_text()), copy.deepcopy(source)
    wanted["text_config"][count] = 0
    for key, value in wanted["text_config"].items():
        if name == "step3p7" and isinstance(value, list) and len(value) == 7:  # five layers, two heads
            wanted["text_config"][key] = value[:5]
    assert written == wanted
    assert from_pretrained(tmp_path / "out").config == model.config
