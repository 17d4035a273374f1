"""Whole runs of a tiny model: artefacts, interruptions, resuming, and bad input."""

import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import yaml

from cpjax.models import from_pretrained, to_hf_names
from cpjax.train.__main__ import main
from cpjax.train.config import Config
from cpjax.train.errors import run_command
from cpjax.train.evaluate import main as evaluate
from cpjax.train.export import export
from cpjax.train.lora import load_adapter, merge_adapters
from cpjax.train.metrics import read_metrics
from cpjax.train.replay import replay

TINY = {
    "model": {
        "hidden_size": 16,
        "layers": 2,
        "heads": 2,
        "kv_heads": 1,
        "linear_head_dim": 16,
        "vision_hidden_size": 8,
        "vision_layers": 1,
        "vision_heads": 1,
        "remat": "none",  # which is quicker to compile
    },
    "data": {"tokens": 96, "images": 8},
    "mesh": {"cp": 2},
    "optimizer": {"warmup": 40},
    "run": {"steps": 40, "batch_size": 2, "eval_every": 20, "eval_batches": 1, "save_every": 5},
}  # fmt: skip

CACHE = pathlib.Path(__file__).parent.parent.parent / ".cache" / "train-tests"
TIMES = {"tokens_per_second", "tokens_per_second_per_device"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A scratch folder, with the tiny recipe in it."""
    path = tmp_path_factory.mktemp("runs")
    (path / "tiny.yaml").write_text(yaml.safe_dump(TINY))
    return path


def start(folder, out, *options):
    """A process as a user starts it: XLA optimizes as much as it does by itself."""
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    environment |= {"JAX_COMPILATION_CACHE_DIR": str(CACHE), "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
    command = [
        sys.executable,
        "-m",
        "cpjax.train",
        "--config",
        str(folder / "tiny.yaml"),
        "--run.out",
        str(out),
        *options,
    ]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def finish(process, code=0):
    said, errors = process.communicate(timeout=900)
    assert process.returncode == code, said + errors
    return said


@pytest.fixture
def run(folder, monkeypatch, capsys):
    """Runs the command line in this process, which saves starting one, and returns what it printed."""

    def run(out, *options, code=0):
        monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(CACHE))
        options = ("--config", folder / "tiny.yaml", "--run.out", out, *options)
        monkeypatch.setattr(sys, "argv", ["train", *map(str, options)])
        assert main() == code
        return capsys.readouterr().out

    return run


def wait_for_step(process, out, step):
    """Returns as soon as that step is recorded."""
    while process.poll() is None and not any(r["step"] >= step for r in read_metrics(out / "metrics.jsonl")):
        time.sleep(0.005)
    assert process.poll() is None, process.communicate()


def curve(out):
    records = [{k: v for k, v in record.items() if k not in TIMES} for record in read_metrics(out / "metrics.jsonl")]
    assert [record["step"] for record in records] == list(range(1, TINY["run"]["steps"] + 1))
    return records


@pytest.fixture(scope="module")
def whole(folder):
    """An uninterrupted run: its folder and what it printed."""
    return folder / "whole", finish(start(folder, folder / "whole"))


def test_a_run_writes_every_artefact(whole):
    out, said = whole
    records = curve(out)
    assert {"loss", "accuracy", "grad_norm", "lr", "valid_tokens", "tokens"} <= records[0].keys()
    assert records[-1]["loss"] < records[0]["loss"]
    assert "held_out_accuracy" in records[19] and "held_out_accuracy" in records[-1]
    assert (out / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert sorted(path.name for path in (out / "checkpoints").iterdir()) == ["35", "40"]
    assert yaml.safe_load((out / "config.yaml").read_text())["model"]["hidden_size"] == 16
    for word in ("virtual CPU devices", "cp 2", "zigzag", "tokens", "vision tower", "step 40/40"):
        assert word in said
    assert re.search(rf"^held-out accuracy {records[-1]['held_out_accuracy']:.2f}$", said, re.MULTILINE)
    moved = dict(re.findall(r"(vision tower|merger|embeddings|layers) ([\d.e-]+)", said.split("moved")[1]))
    assert len(moved) == 4 and all(float(change) > 1e-3 for change in moved.values())
    assert f"--config {out / 'config.yaml'} --run.resume true" in said
    assert f"python -m cpjax.train.evaluate {out / 'export'}" in said
    assert "warmup      40 steps, all of the run: the learning rate only grows, to 0.004" in said


def test_the_export_opens_and_answers(whole, monkeypatch, capsys):
    out, _ = whole
    tensors = to_hf_names(*2 * [from_pretrained(out / "export")])
    assert all(np.isfinite(tensor).all() for tensor in tensors.values())
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(CACHE))
    monkeypatch.setattr(sys, "argv", ["evaluate", str(out / "export"), "--documents", "1", "--show", "2"])
    assert evaluate() == 0
    said = capsys.readouterr().out
    assert re.search(r"^held-out accuracy \d\.\d{4}$", said, re.MULTILINE) and re.search(
        r"^held-out accuracy, \w+ ", said, re.MULTILINE
    )
    for option, value, words in (
        ("--documents", "0", "at least 1"), ("--show", "-1", "at least 0"), ("--cp", "65", "at least 1, at most 64")
    ):  # fmt: skip
        monkeypatch.setattr(sys, "argv", ["evaluate", str(out / "export"), option, value])
        assert evaluate() == 2
        assert capsys.readouterr().err == f"error: {option} is {value}: it must be {words}\n"
    card = (out / "export" / "README.md").read_text()
    assert card.startswith("---\n") and "license" in card and "transformers" in card


def test_any_checkpoint_is_exported(run, whole, tmp_path):
    out, _ = whole
    moved = shutil.copytree(out, tmp_path / "moved")
    assert export(moved, tmp_path / "last", "last") == 0 == export(moved, tmp_path / "35", "35")
    files = [folder / "model.safetensors" for folder in (out / "export", tmp_path / "last", tmp_path / "35")]
    assert files[0].read_bytes() == files[1].read_bytes() != files[2].read_bytes()
    cards = [(file.parent / "README.md").read_text() for file in files]
    assert cards[0] == cards[1] and "Not measured at this step" in cards[2]
    for step, words in (
        ("best", "has no best checkpoint"),
        ("7", "it has 35, 40"),
        ("first", "a number, last or best"),
    ):
        with pytest.raises(ValueError, match=words):
            export(moved, tmp_path / "none", step)
    with pytest.raises(ValueError, match="exists already"):
        export(moved, tmp_path / "last", "last")

    # At its end a run exports the best one: here that of step 35, after a change of its metrics.
    metadata = moved / "checkpoints" / "35" / "run" / "metadata"
    metadata.write_text(json.dumps(json.loads(metadata.read_text()) | {"metrics": {"held_out_accuracy": 2.0}}))
    said = run(moved, "--run.resume", "true", "--run.keep_best", "held_out_accuracy")
    assert f"export      {moved / 'export'}, of step 35, the best by held_out_accuracy" in said
    assert (moved / "export" / "model.safetensors").read_bytes() == files[2].read_bytes()


def test_r62_killed_and_resumed_is_the_same_curve(folder, whole):
    out = folder / "killed"
    process = start(folder, out)
    wait_for_step(process, out, 12)  # the save of step 5 is complete: that of step 10 waits for it
    process.send_signal(signal.SIGKILL)
    process.communicate()
    process = start(folder, out, "--run.resume", "true")
    assert "resuming after step" in finish(process)
    assert curve(out) == curve(whole[0])  # bit for bit
    exports = [folder_ / "export" / "model.safetensors" for folder_ in (out, whole[0])]
    assert exports[0].read_bytes() == exports[1].read_bytes()


def test_sigterm_saves_and_another_cp_continues(folder, whole, run):
    out = folder / "terminated"
    process = start(folder, out)
    wait_for_step(process, out, 3)
    process.send_signal(signal.SIGTERM)
    said = finish(process, code=128 + signal.SIGTERM)
    step = int(re.search(r"stopped by SIGTERM after step (\d+), which is saved", said)[1])
    assert (out / "checkpoints" / str(step)).is_dir()
    assert [record["step"] for record in read_metrics(out / "metrics.jsonl")] == list(range(1, step + 1))

    run(out, "--run.resume", "true", "--mesh.cp", 1)
    for record, wanted in zip(curve(out), curve(whole[0]), strict=True):
        assert record["loss"] == pytest.approx(wanted["loss"], rel=1e-4), record["step"]


@pytest.mark.parametrize(("cp", "layout", "transport"), [(4, "contiguous", "allgather"), (8, "zigzag", "ring")])
def test_the_first_losses_agree_on_every_mesh(folder, whole, run, cp, layout, transport):
    out = folder / f"cp{cp}"
    run(out, "--mesh.cp", cp, "--mesh.layout", layout, "--mesh.transport", transport, "--run.steps", 20)
    losses, wanted = (
        [record["loss"] for record in read_metrics(path / "metrics.jsonl")[:20]] for path in (out, whole[0])
    )
    np.testing.assert_allclose(losses, wanted, rtol=1e-5)


def test_adapters_are_saved_and_merged(folder, whole, run):
    """LoRA on the export of another run, in two microbatches and with a moving average."""
    base, out = whole[0] / "export", folder / "lora"
    options = (
        "--model.path", str(base), "--lora.rank", "2", "--lora.merge", "true", "--run.accumulate", "2",
        "--optimizer.ema", "0.5", "--optimizer.warmup", "0", "--run.steps", "4", "--model.remat", "dots",
        "--lora.dropout", "0.1", "--run.eval_every", "1", "--run.keep_best", "held_out_accuracy",
    )  # fmt: skip
    said = run(out, *options)
    config = json.loads((out / "adapter" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(base) and config["r"] == 2
    assert "which says its sizes itself: --model.hidden_size, --model.layers, --model.heads" in said
    assert f"adapter     {out / 'adapter'}" in said and "in 2 parts" in said and "of them frozen" in said
    best = max(read_metrics(out / "metrics.jsonl"), key=lambda record: (record["held_out_accuracy"], record["step"]))
    assert f"export      {out / 'export'}, of step {best['step']}, the best by held_out_accuracy" in said
    assert f"are those of step {best['step']}" in (out / "export" / "README.md").read_text()
    assert export(out, out / "best", "best") == 0
    for file in ("model.safetensors", "README.md"):
        assert (out / "best" / file).read_bytes() == (out / "export" / file).read_bytes()
    assert re.search("moved       vision tower 0, merger 0, embeddings 0, layers 0.0.*, head 0 ", said)
    model = from_pretrained(base)
    load_adapter(model, out / "adapter")
    merge_adapters(model)
    start_of, merged, exported = (
        to_hf_names(m, m) for m in (from_pretrained(base), model, from_pretrained(out / "export"))
    )
    for name, tensor in exported.items():
        np.testing.assert_allclose(tensor, merged[name], rtol=1e-6, atol=1e-7, err_msg=name)
        moved = not np.array_equal(tensor, start_of[name])
        assert moved == ("language_model" in name and "_proj" in name), name


def test_a_student_learns_from_a_teacher(folder, whole, run):
    """From scratch, and nearer to the teacher with every step."""
    teacher, out = whole[0] / "export", folder / "student"
    options = ("--distill.teacher", str(teacher), "--distill.ratio", "0.75", "--distill.temperature", "3")
    said = run(out, *options, "--mesh.cp", 1, "--optimizer.warmup", 0, "--run.steps", 5)
    assert re.search(rf"teacher     {teacher}: [\d,]+ parameters, ratio 0.75, temperature 3.0", said)
    records = read_metrics(out / "metrics.jsonl")
    for record in records:
        assert record["loss"] == pytest.approx(0.25 * record["ce"] + 0.75 * 9 * record["kl"], rel=1e-5)
    assert 0 < records[-1]["kl"] < records[0]["kl"]


def test_a_run_that_does_not_stay_finite_stops(folder, run, capsys):
    out = folder / "infinite"
    said = run(out, "--optimizer.lr", "1e30", "--optimizer.warmup", 0, "--run.max_nonfinite", 3, code=1)
    step = int(
        re.search(r"stopped after step (\d+): the loss or a gradient of the last 3 steps was not finite", said)[1]
    )
    records = read_metrics(out / "metrics.jsonl")
    assert [record["nonfinite"] for record in records][-3:] == [1, 2, 3] and len(records) == step
    with np.load(out / f"nonfinite-{step}.npz") as batch:
        assert batch["input_ids"].shape[0] == 2 and {"labels", "position_ids", "pixel_values"} <= set(batch)
    assert (out / "checkpoints" / str(step)).is_dir() and not (out / "export").exists()
    assert replay(out / f"nonfinite-{step}.npz") == 0
    assert re.search(r"^(result: the (final hidden states|loss)|gradient: model.*) ", capsys.readouterr().out)


@pytest.fixture
def command(monkeypatch, capsys, folder):
    """Runs the command line in this process, expects exit code 2, and returns the one sentence."""

    def run(*options):
        monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(CACHE))
        monkeypatch.setattr(sys, "argv", ["train", "--config", str(folder / "tiny.yaml"), *map(str, options)])
        assert run_command(main) == 2
        printed = capsys.readouterr()
        assert printed.out == "" and printed.err.startswith("error: ") and printed.err.count("\n") == 1, printed
        return printed.err

    return run


def test_bad_options_write_nothing(command, whole, tmp_path):
    out, teacher_of_more_words = tmp_path / "out", tmp_path / "teacher"
    config = json.loads((whole[0] / "export" / "config.json").read_text())
    config["text_config"]["vocab_size"] += 1
    teacher_of_more_words.mkdir()
    (teacher_of_more_words / "config.json").write_text(json.dumps(config))
    assert "unknown option --mesh.cq" in command("--run.out", out, "--mesh.cq", 2)
    assert "needs 16 devices" in command("--run.out", out, "--mesh.cp", 16)
    assert "must be a multiple of" in command("--run.out", out, "--model.heads", 3, "--model.kv_heads", 2)
    assert "'towr' matches no parameter" in command("--run.out", out, "--optimizer.freeze", "[towr]")
    assert "--data.tokens is 90" in command("--run.out", out, "--data.tokens", 90, "--data.images", 10)
    assert "no run to resume" in command("--run.out", out, "--run.resume", "true")
    assert "give the folder of a PEFT adapter" in command(
        "--run.out", out, "--model.path", whole[0] / "export", "--lora.rank", 2, "--lora.path", tmp_path
    )
    assert "'towr' matches no parameter" in command("--run.out", out, "--optimizer.groups", "[{pattern: towr}]")
    assert "bfloat16" in command("--run.out", out, "--model.dtype", "bfloat16", "--mesh.transport", "allgather")
    assert "has text.vocab_size" in command("--run.out", out, "--distill.teacher", teacher_of_more_words)
    (tmp_path / "file").touch()
    assert "Not a directory" in command("--run.out", tmp_path / "file" / "out")
    assert "Not a directory" in command("--run.out", out, "--model.path", tmp_path / "file")
    assert not out.exists()


def test_bad_checkpoints_write_nothing(command, whole, tmp_path):
    out, model = tmp_path / "out", tmp_path / "model"
    options = ("--run.out", out, "--model.path", model)
    assert "config.json" in command(*options)
    shutil.copytree(whole[0] / "export", model)
    weights = (model / "model.safetensors").read_bytes()
    for damaged in (b"", weights[:1000]):
        (model / "model.safetensors").write_bytes(damaged)
        assert "model.safetensors" in command(*options)
    (model / "model.safetensors").unlink()
    index = {"weight_map": {"lm_head.weight": "model-00001-of-00002.safetensors"}}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "model-00001-of-00002.safetensors" in command(*options)
    (model / "config.json").write_text('{"model_type": "llama"}')
    assert "llama" in command(*options)
    assert not out.exists()


def test_another_run_is_left_alone(command, whole, tmp_path):
    out = whole[0]
    before = {path: path.stat().st_mtime_ns for path in out.rglob("*")}
    assert "not empty" in command("--run.out", out)
    said = command("--run.out", out, "--run.resume", "true", "--optimizer.lr", 0.5, "--run.seed", 4)
    assert f"optimizer.lr was {Config().optimizer.lr} and is now 0.5; run.seed was 0 and is now 4" in said
    assert {path: path.stat().st_mtime_ns for path in out.rglob("*")} == before
