"""Meshes and devices."""

import os
import subprocess
import sys

import jax
import pytest

from cpjax.mesh import make_mesh
from cpjax.models.common.sharding import check_tp, parameter_sharding
from cpjax.train.devices import _spare_cuda

from . import small


@pytest.mark.quick
def test_axes():
    mesh = make_mesh(dp=2, cp=2, tp=2)
    assert dict(mesh.shape) == {"dp": 2, "fsdp": 1, "cp": 2, "tp": 2}
    assert mesh.axis_names[0] == "cp"  # by name only: jax 0.12 wants it first
    assert [device.id for device in mesh.devices[1, 0, 0]] == [2, 3]  # neighbours share a layer
    assert set(mesh.axis_types) == {jax.sharding.AxisType.Auto}
    assert make_mesh(cp=4).size == 4  # of eight


def test_too_few_devices():
    with pytest.raises(ValueError, match=r"needs 12 devices, but there are 8 \(cpu\)"):
        make_mesh(dp=3, cp=4)
    with pytest.raises(ValueError, match=r"dp 1 x fsdp 1 x cp 4 x tp 4 needs 16 devices"):
        make_mesh(cp=4, tp=4)
    with pytest.raises(ValueError, match="axis cp is 0"):
        make_mesh(cp=0)


def test_what_tp_splits():
    mesh = make_mesh(cp=2, tp=2)
    for name, shape, spec in [
        ("layers.slots.0.mixer.q_proj.kernel", (3, 64, 128), (None, "cp", "tp")),
        ("layers.slots.0.mixer.in_proj_qkv.kernel", (3, 64, 128), (None, "cp", "tp")),
        ("layers.slots.0.mlp.down_proj.kernel", (3, 128, 64), (None, "tp", "cp")),
        ("layers.slots.0.mlp.down_proj.adapter.a", (3, 128, 4), (None, "tp", None)),
        ("layers.slots.0.mlp.down_proj.adapter.b", (3, 4, 64), (None, None, None)),
        ("visual.blocks.attn.qkv.adapter.b", (3, 4, 64), (None, None, "tp")),
        ("visual.linear_fc1.bias", (64,), (None,)),
        ("layers.slots.0.mlp.experts.gate_proj", (3, 4, 64, 128), (None, "cp", None, None)),
        ("layers.slots.0.mlp.experts.down_proj", (3, 3, 128, 64), (None, None, "cp", None)),
        ("embed_tokens", (320, 64), (None, "cp")),
        ("lm_head.kernel", (64, 320), (None, "cp")),
    ]:
        assert parameter_sharding(mesh, shape, name).spec == jax.sharding.PartitionSpec(*spec), name


def test_sizes_that_tp_does_not_divide():
    check_tp(small.MODEL, 1, "the model")
    with pytest.raises(ValueError, match=r"tp is 2, but the model has text.num_key_value_heads 1: tp must divide"):
        check_tp(small.MODEL, 2, "the model")


@pytest.mark.parametrize(("flag", "devices"), [("", 4), ("--xla_force_host_platform_device_count=6", 6)])
def test_virtual_devices_without_a_flag(flag, devices):
    code = "from cpjax.train.devices import set_up_devices as s; print(s(4)); import jax; print(len(jax.devices()))"
    result = subprocess.run(
        [sys.executable, "-c", code], env={"XLA_FLAGS": flag, "JAX_PLATFORMS": "cpu"}, capture_output=True, text=True
    )
    said, count = result.stdout.splitlines()
    assert said.startswith("4 virtual CPU devices") and int(count) == devices


@pytest.mark.parametrize("damage", ["cut", "changed", "emptied", "unreadable"])
def test_a_damaged_compilation_cache_takes_no_run_down(tmp_path, damage):
    """What the cache holds is compiled anew where it cannot be read."""
    code = (
        "from cpjax.train.devices import set_up_devices as s; s(2); import jax, jax.numpy as jnp; "
        "jax.config.update('jax_persistent_cache_min_compile_time_secs', 0.0); "
        "print(float(jax.jit(lambda x: jnp.sort(jnp.sin(x @ x)).sum())(jnp.eye(8) / 3)))"
    )
    unset = ("XLA_FLAGS", "JAX_COMPILATION_CACHE_DIR")
    environment = {name: value for name, value in os.environ.items() if name not in unset}
    environment |= {"XDG_CACHE_HOME": str(tmp_path), "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1"}

    def run():
        done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout, done.stderr

    fresh, _ = run()
    entries = list((tmp_path / "cpjax" / "jax").glob("*-cache"))
    assert entries
    for entry in entries:
        held = entry.read_bytes()
        entry.unlink()
        if damage == "unreadable":
            entry.mkdir()
        else:
            half = len(held) // 2
            changed = held[:half] + bytes([held[half] ^ 16]) + held[half + 1 :]
            entry.write_bytes({"cut": held[:half], "changed": changed, "emptied": b""}[damage])
    again, warned = run()
    assert again == fresh and "compilation cache" in warned, warned


def test_cuda_is_looked_for_where_there_is_a_gpu(tmp_path, monkeypatch):
    name = "JAX_SKIP_CUDA_CONSTRAINTS_CHECK"
    for device in ("nvidia0", "nvidiactl", "dxg"):
        (tmp_path / device).mkdir(parents=True)
        (tmp_path / device / device).touch()
        monkeypatch.delenv(name, raising=False)
        _spare_cuda(tmp_path / device)
        assert name not in os.environ
    _spare_cuda(tmp_path / "none")
    assert os.environ[name] == "1"
    monkeypatch.delenv(name)
