"""What a run tells while it trains: speed and its share of the peak, lines, TensorBoard, wandb and traces."""

import dataclasses
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from cpjax.models.qwen3_5 import Model, Row, forward_flops, patchify, prepare
from cpjax.train.ahead import without_heads
from cpjax.train.config import Config, RunConfig, parse_config
from cpjax.train.logs import Logs, Trace, check_packages
from cpjax.train.metrics import read_metrics
from cpjax.train.progress import Speed, describe, peak_flops, step_flops
from tests.train.test_step import MODEL

RECORD = {"step": 1, "loss": 0.5, "accuracy": 0.25, "grad_norm": 2.0, "lr": 1e-3, "tokens_per_second": 800.0,
          "tokens_per_second_per_device": 100.0}  # fmt: skip


def make_batch():
    """Rows of 9 and 5 tokens; the first has two documents, of 6 and 3, and an image of 4 patches."""
    ids = np.arange(9) + 10
    ids[2] = MODEL.image_token_id
    image = patchify(MODEL.vision, np.zeros((4, 4, 1)))
    return prepare(
        MODEL, [Row(ids, None, [1] * 6 + [2] * 3, [image]), Row(np.arange(5) + 10)], length=16, num_patches=8
    )


@pytest.mark.parametrize("heads", [0, 1])
def test_flops_are_those_of_every_matrix_and_pair(heads):
    """Twice the numbers in the matrices, from the model itself, and by hand what is no matrix."""
    config = dataclasses.replace(MODEL, text=dataclasses.replace(MODEL.text, mtp_num_hidden_layers=heads))
    params = nnx.to_flat_state(nnx.state(nnx.eval_shape(lambda: Model(config, rngs=nnx.Rngs(0))), nnx.Param))
    sizes = {".".join(map(str, path)): np.prod(leaf.get_value().shape) for path, leaf in params}
    matrices = {name: size for name, size in sizes.items() if name.endswith(("kernel", "conv1d"))}
    merger = sum(size for name, size in matrices.items() if name.startswith("visual.linear_fc"))
    tower = sum(size for name, size in matrices.items() if name.startswith("visual")) - merger
    text = sum(matrices.values()) - merger - tower
    wanted = 2 * (14 * (text + heads * matrices["lm_head.kernel"]) + 4 * tower + 1 * merger)
    wanted += 14 * 2 * 3 * 2 * 8 * 8  # the state of two heads: read, written, and read by the query
    pairs = 21 + 6 + 15  # causal, of documents of 6, 3 and 5
    wanted += (1 + heads) * pairs * 2 * 2 * 2 * 16  # scores and values of two heads
    wanted += 4 * 4 * 2 * 2 * 8  # a frame's pairs, in a tower of width 8
    assert forward_flops(config, make_batch()) == wanted
    assert forward_flops(without_heads(config), make_batch()) == forward_flops(MODEL, make_batch())


def device(kind, **stats):
    return types.SimpleNamespace(device_kind=kind, memory_stats=lambda: stats or None)


def mesh(*devices):
    return types.SimpleNamespace(size=len(devices), local_devices=list(devices))


def test_speed_is_relative_to_the_peak_of_all_devices():
    batch = make_batch()
    gpus = mesh(device("NVIDIA H200", peak_bytes_in_use=7), device("NVIDIA H200", peak_bytes_in_use=9))
    speed = Speed(gpus, MODEL, 1.0)
    seconds = 3 * forward_flops(MODEL, batch) / (0.25 * 2 * 989e12)
    record = speed.record(batch, 14.0, seconds)
    assert record["mfu"] == 0.25 and record["memory_bytes"] == 9
    assert record["tokens_per_second"] == pytest.approx(2 * record["tokens_per_second_per_device"], rel=1e-3)
    assert step_flops(MODEL, batch, 0.0, MODEL) == step_flops(MODEL, batch, 1.0)  # frozen, and a teacher beside it
    assert set(Speed(mesh(device("cpu")), MODEL, 1.0).record(batch, 14.0, 1.0)) == {
        "tokens_per_second", "tokens_per_second_per_device"
    }  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", 989e12), ("NVIDIA H100 PCIe", 756e12), ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA A10G", None), ("NVIDIA L4", 121e12), ("NVIDIA L40S", 362e12), ("Tesla T4", 65e12), ("cpu", None),
    ],
)  # fmt: skip
def test_peaks_go_by_the_name_of_a_device(kind, peak):
    assert peak_flops(kind) == peak


def test_a_line_says_what_there_is():
    assert describe(RECORD) == "loss 0.5000  accuracy 0.250  norm 2  lr 0.001  800 tokens/s (100 a device)"
    more = {"ce": 0.75, "kl": 0.25, "mfu": 0.4, "memory_bytes": 3 << 29, "held_out_accuracy": 0.98}
    line = describe(RECORD | more)
    for words in ("ce 0.7500  kl 0.2500", "MFU 40.0%  1.5 GiB", "held-out accuracy 0.98"):
        assert words in line


def test_tensorboard_gets_every_number(tmp_path):
    event_pb2 = pytest.importorskip("tensorboardX.proto.event_pb2", reason="tensorboardX is not installed")
    config = Config(run=RunConfig(out=str(tmp_path), tensorboard=True))
    for step in (1, 2):
        logs = Logs(config, step - 1)
        logs.write(RECORD | {"step": step, "held_out_loss/two": 3.0})
        logs.close()
    assert [record["step"] for record in read_metrics(tmp_path / "metrics.jsonl")] == [1, 2]
    found = {}
    for file in (tmp_path / "tensorboard").iterdir():
        data = file.read_bytes()
        while data:  # length, its checksum, an event, its checksum
            size = int.from_bytes(data[:8], "little")
            event = event_pb2.Event.FromString(data[12 : 12 + size])
            found |= {(value.tag, event.step): value.simple_value for value in event.summary.value}
            data = data[16 + size :]
    names = (RECORD.keys() - {"step"}) | {"held_out_loss/two"}
    assert found.keys() == {(name, step) for name in names for step in (1, 2)}
    assert found["loss", 2] == 0.5 and found["held_out_loss/two", 1] == 3.0


def test_wandb_goes_on_in_its_run(tmp_path, monkeypatch):
    started, logged, finished = [], [], []

    def init(**options):
        started.append(options)
        return types.SimpleNamespace(
            id="abc", log=lambda numbers, step: logged.append((step, numbers)), finish=lambda: finished.append(1)
        )

    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(init=init))
    config = Config(run=RunConfig(out=str(tmp_path), wandb="digits"))
    for step in (1, 2):
        logs = Logs(config, step - 1)
        logs.write(RECORD | {"step": step})
        logs.close()
    assert [options["id"] for options in started] == [None, "abc"] and len(finished) == 2
    assert started[0]["project"] == "digits" and started[0]["config"]["mesh"]["cp"] == config.mesh.cp
    assert [step for step, _ in logged] == [1, 2] and logged[0][1]["loss"] == 0.5


def test_what_is_not_installed_is_told_before_anything_starts(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    for run, words in (
        (RunConfig(wandb="p"), "wandb p needs the package wandb"),
        (RunConfig(tensorboard=True), "TensorboardX"),
    ):
        with pytest.raises(ValueError, match="(?i)" + words):
            check_packages(run)
    check_packages(RunConfig())


def test_a_trace_of_some_steps(tmp_path):
    trace = Trace(range(2, 4), tmp_path / "profile")
    for step in range(1, 5):
        trace.begin(step)
        jax.block_until_ready(jnp.ones(3) + step)
        trace.end(step)
        assert bool(list(tmp_path.rglob("*.xplane.pb"))) == (step >= 3)
    trace.close()
    unfinished = Trace(range(1, 9), tmp_path / "stopped")
    unfinished.begin(1)
    unfinished.close()
    assert list((tmp_path / "stopped").rglob("*.xplane.pb"))


def test_steps_to_trace():
    assert list(RunConfig(profile="2").profiled(taken=5)) == [7, 8]
    assert list(RunConfig(profile="3:4").profiled(taken=5)) == [3, 4]
    assert not RunConfig().profiled(0)
    for profile in ("x", "0", "4:3", "0:1", "5:800", ":"):
        with pytest.raises(ValueError, match=f"--run.profile is {profile}: it must be"):
            parse_config(["--run.profile", profile])
