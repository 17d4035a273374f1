"""`--check` says that a mesh is right, and names the tensors that a fault spoils."""

import dataclasses
import json

import jax
import numpy as np
import pytest
from jax import lax

from cpjax.models.qwen3_5 import Config as Model
from cpjax.models.qwen3_5 import TextConfig, VisionConfig, reduced, weights
from cpjax.train import check as checking
from cpjax.train.check import LOSS, check, difference, make_rows, named_in_order
from cpjax.train.config import Config, MeshConfig, ModelConfig, RecordsConfig, RunConfig, parse_command
from tests.models.families import CONFIGS
from tests.train.small import MODEL

ONE_DEVICE = {}
"""What the checks of each model here compare with."""


@pytest.fixture(autouse=True)
def fast(monkeypatch):
    """Compiles without optimization, in half the time, and computes on one device once for each model."""
    make_step, gradients = checking.make_train_step, checking.gradients

    def make(*args, **options):
        step = make_step(*args, **options)

        def run(*inputs):
            return step.lower(*inputs).compile(compiler_options={"xla_backend_optimization_level": 0})(*inputs)

        return run

    def once(config, small, rows, axes, accumulate):
        if set(axes.values()) != {1}:
            return gradients(config, small, rows, axes, accumulate)
        if small not in ONE_DEVICE:
            ONE_DEVICE[small] = gradients(config, small, rows, axes, accumulate)
        return ONE_DEVICE[small]

    monkeypatch.setattr(checking, "make_train_step", make)
    monkeypatch.setattr(checking, "gradients", once)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with nothing but the config.json of two attention layers."""
    path = tmp_path_factory.mktemp("check")
    (path / "config.json").write_text(json.dumps(MODEL.to_dict()))
    return path


def options(folder, **run):
    mesh = MeshConfig(cp=2, dp=2)
    return Config(model=ModelConfig(path=str(folder), remat="none"), mesh=mesh, run=RunConfig(batch_size=2, **run))


def test_a_mesh_that_is_right(folder, capsys):
    assert check(options(folder)) == 0
    said = capsys.readouterr().out
    assert "dp 2 x fsdp 1 x cp 2" in said and "right" in said and "WRONG" not in said
    assert f"of {len([n for w in weights(reduced(MODEL)) for n in w.names])} tensors" in said


def test_labels_shifted_in_chunks_are_seen_in_the_loss(folder, capsys, monkeypatch):
    prepare = checking.host_batch

    def shifted(small, rows, layout, *shape):
        batch, sharder = prepare(small, rows, layout, *shape)
        if layout.cp > 1:  # each chunk has lost the label of its last token
            batch["labels"][:, sharder.padded_length // 4 - 1 :: sharder.padded_length // 4] = -100
        return batch, sharder

    monkeypatch.setattr(checking, "host_batch", shifted)
    assert check(options(folder)) == 1
    said = capsys.readouterr().out
    assert "WRONG" in said
    assert float(said.split("relative difference ")[1].split()[0]) > 100 * LOSS


def test_a_permute_that_drops_what_it_carries_is_named(folder, capsys, monkeypatch):
    """Keys and values of other ranks arrive as zeros."""
    permute = lax.ppermute
    monkeypatch.setattr(
        lax, "ppermute", lambda x, *args, **options: jax.tree.map(lambda y: 0 * y, permute(x, *args, **options))
    )
    assert check(options(folder)) == 1
    said = capsys.readouterr().out
    assert "first is model.visual.patch_embed.proj.weight" in said


def test_gradients_come_in_the_order_of_the_forward_pass():
    text, vision = TextConfig(mtp_num_hidden_layers=1), dataclasses.replace(VisionConfig(), out_hidden_size=4096)
    small = reduced(Model(text, vision))
    shapes = {
        weight.path: jax.numpy.ones((len(weight.names), 2, 2) if weight.stacked else (2, 2))
        for weight in weights(small)
    }
    table = [dataclasses.replace(weight, disk_shape=None) for weight in weights(small)]
    names = list(named_in_order(shapes, table))
    wanted = [
        "model.visual.patch_embed.proj.weight", "model.visual.blocks.0.norm1.weight",
        "model.visual.merger.linear_fc2.weight", "model.language_model.embed_tokens.weight",
        "model.language_model.layers.0.input_layernorm.weight", "model.language_model.layers.0.linear_attn.A_log",
        "model.language_model.layers.0.mlp.down_proj.weight", "model.language_model.layers.3.self_attn.q_proj.weight",
        "model.language_model.norm.weight", "mtp.fc.weight", "mtp.layers.0.mlp.down_proj.weight", "lm_head.weight",
    ]  # fmt: skip
    places = [names.index(name) for name in wanted]
    assert places == sorted(places) and names[-1] == "lm_head.weight" and len(names) == len(set(names))


def test_rows_are_hard(folder):
    config = dataclasses.replace(
        options(folder), mesh=MeshConfig(cp=4, fsdp=2), run=RunConfig(batch_size=4, accumulate=2)
    )
    rows = make_rows(config, reduced(MODEL))
    counts = [(row.labels != -100).sum() for row in rows]
    assert len(rows) == 4 and counts[1:3] == [1, 0] and min(counts[0], counts[3]) > 8
    assert len({len(row.input_ids) for row in rows}) == 4 and all(set(row.document_ids) == {1, 2} for row in rows)
    assert all(len(row.media) == 2 for row in rows)


def test_differences_are_relative_to_the_largest_entry():
    assert difference(np.array([1.0, 2.0]), np.array([1.5, 2.0])) == 0.25
    assert difference(np.zeros(2), np.zeros(2)) == 0 and difference(np.ones(2), np.zeros(2)) == float("inf")


def test_commands():
    assert parse_command(["--check", "--mesh.cp", "2"]) == ("check", Config(mesh=MeshConfig(cp=2)))
    assert parse_command([])[0] == "train"
    assert parse_command(["--plan", "--plan.gpu", "h100"])[1].plan.gpu == "h100"
    with pytest.raises(ValueError, match="--check and --plan are given: give one"):
        parse_command(["--plan", "--check"])


def test_reduced_models_keep_what_matters():
    text = TextConfig()
    small = reduced(Model(text, dataclasses.replace(VisionConfig(), out_hidden_size=4096))).text
    assert small.types == text.types[:4] and small.num_key_value_heads == text.num_key_value_heads


@pytest.mark.parametrize("anew", [False, True])
def test_gemma4(anew, tmp_path, capsys, monkeypatch):
    """Text alone, layers that share keys and values: right, and wrong where every chunk counts positions anew."""
    prepare = checking.host_batch

    def count_anew(small, rows, layout, length, patches, parts):
        batch, sharder = prepare(small, rows, layout, length, patches, parts)
        if layout.cp > 1:
            batch["position_ids"] = batch["position_ids"] % (sharder.local_length // 2)
        return batch, sharder

    model = CONFIGS["gemma4"]
    model = dataclasses.replace(model, text=dataclasses.replace(model.text, enable_moe_block=False), audio=None)
    (tmp_path / "config.json").write_text(json.dumps(model.to_dict()))
    if anew:
        monkeypatch.setattr(checking, "host_batch", count_anew)
    config = Config(
        model=ModelConfig(path=str(tmp_path)), records=RecordsConfig(files=["text.jsonl"], patches=0),
        mesh=MeshConfig(cp=2), run=RunConfig(batch_size=2),
    )  # fmt: skip
    assert check(config) == anew
    said = capsys.readouterr().out
    assert "a small gemma4" in said and ("WRONG" in said) is anew
