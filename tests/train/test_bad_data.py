"""Data that turn out to be bad while a run trains: what was trained is saved, and the run goes on from there."""

import dataclasses
import sys

import jax.numpy as jnp
import pytest
import yaml

from cpjax.train import loop
from cpjax.train.__main__ import main
from cpjax.train.data import RecordError
from cpjax.train.digits_task import DigitsTask
from cpjax.train.errors import run_command
from cpjax.train.metrics import read_metrics
from tests.train.test_run import TINY

STEPS = 6
METRICS = ("loss", "accuracy", "grad_norm", "lr", "nonfinite", "tokens", "valid_tokens")


def make_counting_step(*args, **options):
    """Stands for the training step, which takes long to compile."""

    def step(state, batch, sharder, teacher):
        return dataclasses.replace(state, step=state.step + 1), dict.fromkeys(METRICS, jnp.float32(0))

    return step


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    """Runs the command in this process; what it gave back, printed, and said of an error."""
    recipe = TINY | {"mesh": {"cp": 1}, "run": {"steps": STEPS, "batch_size": 1, "eval_every": 4, "save_every": 100}}
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(recipe))
    monkeypatch.setattr(loop, "make_train_step", make_counting_step)
    monkeypatch.setattr(DigitsTask, "make_evaluation", lambda *args, **options: lambda *arrays: {})

    def run(*options):
        arguments = ["train", "--config", tmp_path / "tiny.yaml", "--run.out", tmp_path / "out", *options]
        monkeypatch.setattr(sys, "argv", [*map(str, arguments)])
        return run_command(main), *capsys.readouterr()

    return run


CUT = RecordError("unreadable image", "a.jsonl:3 shows a.jpg, which is cut short: mend it")
GONE = FileNotFoundError(2, "No such file or directory", "a.jsonl")


@pytest.mark.parametrize(("error", "place", "step"), [(CUT, "batch", 3), (GONE, "batch", 3), (CUT, "evaluation", 4)])
def test_what_was_trained_is_saved_and_the_run_goes_on(run, tmp_path, monkeypatch, error, place, step):
    def fail(*args):
        raise error

    seen, load = [], DigitsTask.next_batch

    def watched(task):
        seen.append(task.state()["step"])
        return load(task)

    with monkeypatch.context() as patch:
        if place == "evaluation":
            patch.setattr(DigitsTask, "make_evaluation", lambda *args, **options: fail)
        else:
            patch.setattr(DigitsTask, "next_batch", lambda task: fail() if task.state()["step"] == step else load(task))
        code, _, said = run()
    how = "mend the data, or add --records.broken skip, and" if error is CUT else "mend the data and"
    first = (
        "error: cannot use a.jsonl (No such" if error is GONE else "error: a.jsonl:3 shows a.jpg, which is cut short:"
    )
    assert code == 2 and said.startswith(first) and said.count("\n") == 1
    assert f"; stopped after step {step}, which is saved: {how} continue with " in said
    assert f"--config {tmp_path / 'out' / 'config.yaml'} --run.resume true" in said
    assert [path.name for path in (tmp_path / "out" / "checkpoints").iterdir()] == [str(step)]

    monkeypatch.setattr(DigitsTask, "next_batch", watched)
    code, printed, _ = run("--run.resume", "true", "--records.broken", "skip")
    assert code == 0 and f"resuming after step {step}" in printed
    assert seen == [0, *range(step, STEPS)]  # one to see its shape, and each that is left once; none beyond the last
    assert [record["step"] for record in read_metrics(tmp_path / "out" / "metrics.jsonl")] == [*range(1, STEPS + 1)]


def test_a_batch_behind_the_last_step_is_not_read(run, tmp_path, monkeypatch):
    load = DigitsTask.next_batch

    def limited(task):
        assert task.state()["step"] < STEPS
        return load(task)

    monkeypatch.setattr(DigitsTask, "next_batch", limited)
    assert run()[0] == 0 and (tmp_path / "out" / "export").is_dir()


def test_bad_data_before_the_first_step_write_nothing(run, tmp_path, monkeypatch):
    def fail(task):
        raise CUT

    monkeypatch.setattr(DigitsTask, "next_batch", fail)
    code, _, said = run()
    assert code == 2 and said == f"error: {CUT}\n" and not (tmp_path / "out").exists()
