"""The default job trains a small model of every family, exports it, and asks the export."""

import json
import re
import sys

import numpy as np
import pytest

from cpjax.shard import layout_from_name
from cpjax.train import digits, presets
from cpjax.train.__main__ import main
from cpjax.train.config import Config, DataConfig, ModelConfig
from cpjax.train.digits_task import DigitsTask
from cpjax.train.evaluate import digits_batch
from cpjax.train.evaluate import main as evaluate
from cpjax.train.metrics import read_metrics

OPTIONS = {
    "model": {
        "hidden_size": 16, "layers": 2, "heads": 2, "kv_heads": 1, "head_dim": 16, "vision_hidden_size": 16,
        "vision_layers": 1, "vision_heads": 2,
    },
    "data": {"tokens": 96, "images": 8},
    "mesh": {"cp": 1},
    "optimizer": {"warmup": 0, "schedule": "constant"},
    "run": {"steps": 20, "batch_size": 1, "eval_batches": 1},
}  # fmt: skip


@pytest.mark.parametrize("name", [name for name in presets.PRESETS if name != "qwen3_5"])  # which test_run.py trains
def test_a_family_trains_and_its_export_answers(name, tmp_path, monkeypatch, capsys):
    out = tmp_path / "run"
    values = [
        f"--{section}.{option}={value}" for section, options in OPTIONS.items() for option, value in options.items()
    ]
    monkeypatch.setattr(sys, "argv", ["train", f"--model.family={name}", f"--run.out={out}", *values])
    assert main() == 0
    said = capsys.readouterr().out
    records = read_metrics(out / "metrics.jsonl")
    losses = [record["loss"] for record in records]
    assert np.mean(losses[-5:]) < 0.8 * np.mean(losses[:5])
    moved = dict(re.findall(r"(vision tower|merger|embeddings|layers) ([\d.e-]+)", said.split("moved")[1]))
    assert len(moved) == (3 if name == "gemma4" else 4), moved
    assert all(float(change) > 1e-3 for change in moved.values()), moved

    source = json.loads((out / "export" / "config.json").read_text())
    assert source["model_type"] == name
    card = (out / "export" / "README.md").read_text()
    assert f"{source['architectures'][0]}, trained from scratch" in card
    monkeypatch.setattr(sys, "argv", ["evaluate", str(out / "export"), "--documents", "1"])
    assert evaluate() == 0  # of the same documents as the run's own evaluation
    assert f"held-out accuracy {records[-1]['held_out_accuracy']:.4f}" in capsys.readouterr().out


@pytest.mark.parametrize("name", presets.PRESETS)
def test_an_image_is_one_token_that_all_of_its_pixels_reach(name):
    data = DataConfig(tokens=96, images=8)
    [document] = digits.documents(data, 0, 0, 1, "held_out")
    config = presets.model_config(ModelConfig(family=name))
    batch, _ = digits_batch(config, data, [document], layout_from_name("zigzag", 1))
    assert (batch["vision_index"] >= 0).sum() == data.images == len(np.unique(batch["vision_segment_ids"]))
    pixels = batch["pixel_values"].reshape(data.images, -1)
    shown = document.images.reshape(data.images, -1)
    shown = shown if name == "gemma4" else 2 * shown - 1
    for own, scan in zip(pixels, shown, strict=True):
        copies = own.size // scan.size  # channels, and frames that Qwen3.5 has twice
        np.testing.assert_allclose(np.sort(own), np.sort(np.repeat(scan, copies)), rtol=1e-6)


def test_a_model_with_other_words_is_refused(tmp_path):
    config = presets.model_config(ModelConfig()).to_dict()
    config["text_config"]["vocab_size"] += 1
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"model.path \S+ has a vocabulary of its own, .*: give --records.files"):
        DigitsTask(Config(model=ModelConfig(path=str(tmp_path))), layout_from_name("zigzag", 1))


def test_sizes_without_a_meaning_are_refused():
    with pytest.raises(ValueError, match="linear_heads is given, but gemma4 has no linear attention: leave it out"):
        presets.model_config(ModelConfig(family="gemma4", linear_heads=2))
    assert ModelConfig(family="step3p7", layers=8).sizes_given() == ["--model.family", "--model.layers"]
