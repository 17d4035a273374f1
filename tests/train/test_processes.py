"""Runs of two processes with two devices each: the numbers of one process, and what if one of them ends."""

import os
import pathlib
import re
import signal
import socket
import subprocess
import sys
import time

import jax.numpy as jnp
import numpy as np
import pytest
import yaml
from flax import nnx
from safetensors.numpy import load_file

from cpjax.models import family, from_pretrained, save_pretrained, to_hf_names
from cpjax.models.common.checkpoint import read_json
from cpjax.train.config import Config
from cpjax.train.devices import set_up_devices
from cpjax.train.metrics import read_metrics
from cpjax.train.processes import DEAD, VARIABLES, join
from tests.data.common import WORDS, chat, make_folder, write_jsonl
from tests.fast import FLAGS

ROOT = pathlib.Path(__file__).parents[2]
STEPS = 40


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A scratch folder with a model of one attention layer, records of text, and the options of a run on them."""
    path = tmp_path_factory.mktemp("processes")
    layers = {"num_hidden_layers": 1, "layer_types": ["full_attention"]}
    source = read_json(make_folder(path / "files", **layers) / "config.json")
    module = family(source["model_type"])
    model = module.Model(module.Config.from_dict(source), rngs=nnx.Rngs(0), dtype=jnp.float32)
    save_pretrained(model, path / "base", companions=path / "files")
    words = WORDS.split()
    chats = [chat(" ".join(words[n : n + 3]), " ".join(words[n + 3 : n + 3 + n % 5])) for n in range(1, 21)]
    write_jsonl(path / "train.jsonl", chats[:16])
    write_jsonl(path / "held_out.jsonl", chats[16:])
    options = {
        "model": {"path": str(path / "base"), "remat": "none"},  # which is quicker to compile
        "records": {
            "files": [str(path / "train.jsonl")], "held_out": [str(path / "held_out.jsonl")], "answers": 0,
            "tokens": 128, "patches": 0, "shapes": 1,
        },
        "optimizer": {"lr": 1e-3, "warmup": 2},
        "run": {"steps": STEPS, "batch_size": 2, "eval_every": STEPS, "save_every": 10},
    }  # fmt: skip
    (path / "run.yaml").write_text(yaml.safe_dump(options))
    return path


def environment(**more):
    names = ("XLA_FLAGS", *VARIABLES)
    inherited = {name: value for name, value in os.environ.items() if name not in names}
    return inherited | {
        "XLA_FLAGS": FLAGS,  # the second process reads no compilation cache
        "JAX_COMPILATION_CACHE_DIR": str(ROOT / ".cache" / "train-tests"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "TF_CPP_MIN_LOG_LEVEL": "2",  # warnings of XLA
        **more,
    }


def start(*command, count=2):
    """Starts processes of one run."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "cwd": ROOT}
    numbers = [(address, str(count), str(process)) for process in range(count)] if count > 1 else [()]
    return [
        subprocess.Popen(
            [sys.executable, "-m", *map(str, command)],
            env=environment(**dict(zip(VARIABLES, own, strict=False))), **pipes,
        )
        for own in numbers
    ]  # fmt: skip


def train(folder, out, *options, count=2):
    return start("cpjax.train", "--config", folder / "run.yaml", "--run.out", folder / out, *options, count=count)


GLOO = re.compile(
    r"^(?:\[Gloo\] Rank | is connected to | peer ranks\. |Expected number of connected peer ranks is : |\d+)*\n", re.M
)
"""Lines of what gloo prints of itself, whose threads write into each other's, and empty ones."""


def finish(processes):
    """Exit code, output without what gloo prints of itself, and error output of each."""
    done = [process.communicate(timeout=600) for process in processes]
    return [
        (process.returncode, GLOO.sub("", said), errors)
        for process, (said, errors) in zip(processes, done, strict=True)
    ]


def wait_for_step(processes, out, step):
    while not any(record["step"] >= step for record in read_metrics(out / "metrics.jsonl")):
        assert all(process.poll() is None for process in processes), finish(processes)
        time.sleep(0.005)


@pytest.fixture(scope="module", autouse=True)
def missing_one():
    """A process in the midst of a computation with one that was killed; it takes a while to notice."""
    processes = start("tests.train.join_processes", "loop")
    while "computing" not in processes[1].stdout.readline():
        pass
    processes[1].send_signal(signal.SIGKILL)
    processes[1].communicate()
    return processes[0]


@pytest.fixture(scope="module")
def whole(folder):
    """A run of one process."""
    (result,) = finish(train(folder, "one", "--mesh.cp", 4, count=1))
    assert result[0] == 0, result
    return folder / "one"


def curve(out, steps=STEPS):
    records = read_metrics(out / "metrics.jsonl")
    assert [record["step"] for record in records] == list(range(1, steps + 1))
    return [
        {name: value for name, value in record.items() if not name.startswith("tokens_per_second")}
        for record in records
    ]


def tensors(out):
    return {k: np.asarray(v) for k, v in to_hf_names(*2 * [from_pretrained(out / "export")]).items()}


def test_two_processes_give_the_numbers_of_one(folder, whole):
    """Every sequence is split over both; held-out loss, checkpoints and export too."""
    first, second = finish(train(folder, "two", "--mesh.cp", 4))
    assert first[0] == second[0] == 0, (first, second)
    assert "devices     4 cpu devices of 2 processes" in first[1] and "held-out loss" in first[1]
    assert second[1:] == ("", "") and first[2] == ""  # the first one speaks
    out = folder / "two"
    for record, wanted in zip(curve(out), curve(whole), strict=True):
        assert record == pytest.approx(wanted, rel=1e-6), record["step"]
    wanted = tensors(whole)
    for name, tensor in tensors(out).items():
        np.testing.assert_allclose(tensor, wanted[name], rtol=1e-6, atol=1e-7, err_msg=name)
    for path in whole.rglob("*"):  # nothing is missing
        name = path.relative_to(whole)
        assert "checkpoints" in name.parts or (out / name).exists(), name
    assert sorted(path.name for path in (out / "checkpoints").iterdir()) == ["30", "40"]


def test_adapters_teacher_answers_and_the_best_checkpoint(folder):
    """Rows with maps of their own (packed) are split over both processes, and so are adapters and the teacher."""
    steps, outs = 6, [folder / "adapted", folder / "alone"]
    options = {
        "mesh.fsdp": 2, "mesh.cp": 2, "mesh.layout": "packed", "lora.rank": 2, "lora.merge": "true",
        "distill.teacher": folder / "base", "records.answers": 2, "records.max_new_tokens": 3, "optimizer.lr": 0.03,
        "run.steps": steps, "run.eval_every": 2, "run.keep_best": "held_out_loss",
    }  # fmt: skip
    command = [word for name, value in options.items() for word in (f"--{name}", value)]
    (first, second), (alone,) = (
        finish(train(folder, out.name, *command, count=count)) for out, count in zip(outs, (2, 1), strict=True)
    )
    assert first[0] == second[0] == alone[0] == 0, (first, second, alone)
    assert second[1:] == ("", "") and "the best by held_out_loss" in first[1]
    assert re.findall("of step .*, the best", first[1]) == re.findall("of step .*, the best", alone[1])
    for record, wanted in zip(*(curve(out, steps) for out in outs), strict=True):
        assert record == pytest.approx(wanted, rel=1e-6), record["step"]
    assert {"held_out_exact", "held_out_loss", "kl"} <= record.keys()
    for file in "adapter/adapter_model.safetensors", "export/model.safetensors":
        found, wanted = (load_file(out / file) for out in outs)
        assert found.keys() == wanted.keys()
        for name, tensor in found.items():
            np.testing.assert_allclose(tensor, wanted[name], rtol=1e-6, atol=1e-7, err_msg=name)


def test_check(folder):
    """Each process computes what one device gives by itself, and both together what the mesh gives."""
    first, second = finish(train(folder, "checked", "--check", "--mesh.fsdp", 2, "--mesh.cp", 2))
    assert first[0] == second[0] == 0, (first, second)
    assert "\nright  " in first[1] and "gradients   of " in first[1]
    assert second[1:] == ("", "") and first[2] == "" and not (folder / "checked").exists()


def test_killed_stopped_and_resumed_by_another_number_of_processes(folder, whole):
    """Rows are split over two processes, and so are the parameters."""
    mesh, out = ("--mesh.fsdp", 2, "--mesh.cp", 2), folder / "stopped"
    processes = train(folder, "stopped", *mesh)
    wait_for_step(processes, out, 12)
    while not (out / "checkpoints" / "10").is_dir():  # complete
        assert all(process.poll() is None for process in processes), finish(processes)
        time.sleep(0.005)
    processes[0].send_signal(signal.SIGKILL)
    killed, other = finish(processes)
    assert killed[0] == -signal.SIGKILL and other[0] not in (0, None)
    assert other[2].rstrip().splitlines()[-1].startswith("error: this process, one of several, was killed or could")

    processes = train(folder, "stopped", *mesh, "--run.resume", "true")
    wait_for_step(processes, out, 15)
    processes[1].send_signal(signal.SIGTERM)
    first, second = finish(processes)
    assert first[0] == second[0] == 128 + signal.SIGTERM, (first, second)
    assert "resuming after step 10" in first[1] and second[1:] == ("", "")
    step = int(re.search(r"stopped by SIGTERM after step (\d+), which is saved", first[1])[1])
    assert (out / "checkpoints" / str(step)).is_dir()
    assert read_metrics(out / "metrics.jsonl")[-1]["step"] == step

    (last,) = finish(train(folder, "stopped", "--mesh.cp", 4, "--run.resume", "true", count=1))
    assert last[0] == 0 and f"resuming after step {step}" in last[1], last
    for record, wanted in zip(curve(out), curve(whole), strict=True):
        assert record["loss"] == pytest.approx(wanted["loss"], rel=1e-5), record["step"]


def test_every_device_of_several_processes_is_used():
    with pytest.raises(ValueError, match="mesh needs 4 devices, but the 2 processes have 8 cpu devices in all"):
        set_up_devices(4, 2)


def test_processes_agree():
    """On arrays, signals, errors and what a model generates."""
    results = finish(start("tests.train.join_processes", "agree"))
    assert [(code, errors) for code, _, errors in results] == [
        (2, "error: cannot use missing (No such file or directory): give another path, or mend it\n")
    ] * 2


def test_a_killed_process_ends_the_others(missing_one):
    (first,) = finish([missing_one])
    assert first[0] not in (0, None)
    assert first[2].rstrip().splitlines()[-1].startswith("error: this process, one of several, was killed or could")
    assert DEAD < 60


@pytest.mark.parametrize(
    ("variables", "sentence"),
    [
        ({"JAX_NUM_PROCESSES": "2"}, "JAX_NUM_PROCESSES is set, but not JAX_COORDINATOR_ADDRESS and JAX_PROCESS_ID: "),
        (dict(zip(VARIABLES, ("host:1", "2", "one"), strict=True)), "JAX_PROCESS_ID is 'one': it must be a whole"),
        (dict(zip(VARIABLES, ("host:1", "2", "2"), strict=True)), "this process cannot join the others"),
    ],
)
def test_environment_that_makes_no_sense(variables, sentence, monkeypatch):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=sentence), join():
        pass


@pytest.mark.parametrize("file", ["slurm.sbatch", "ssh.sh"])
def test_examples_are_good_bash_with_options_that_exist(file):
    path = ROOT / "docs" / file
    assert subprocess.run(["bash", "-n", path], capture_output=True).stderr == b""
    text = path.read_text()
    options = re.findall(r"--([a-z_]+\.[a-z_]+)", text)
    known = {name for section, values in Config().to_dict().items() for name in [f"{section}.{v}" for v in values]}
    assert {"mesh.cp", "run.out"} <= set(options) <= known
    assert set(re.findall(r"JAX_\w+", text)) in (set(), set(VARIABLES))
