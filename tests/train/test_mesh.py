"""Meshes and devices."""

import subprocess
import sys

import jax
import pytest

from cpjax.mesh import make_mesh


def test_axes():
    mesh = make_mesh(dp=2, fsdp=2, cp=2)
    assert dict(mesh.shape) == {"dp": 2, "fsdp": 2, "cp": 2}
    assert set(mesh.axis_types) == {jax.sharding.AxisType.Auto}
    assert make_mesh(cp=4).size == 4  # of eight


def test_too_few_devices():
    with pytest.raises(ValueError, match=r"needs 12 devices, but there are 8 \(cpu\)"):
        make_mesh(dp=3, cp=4)
    with pytest.raises(ValueError, match="axis cp is 0"):
        make_mesh(cp=0)


@pytest.mark.parametrize(("flag", "devices"), [("", 4), ("--xla_force_host_platform_device_count=6", 6)])
def test_virtual_devices_without_a_flag(flag, devices):
    code = "from cpjax.train.devices import set_up_devices as s; print(s(4)); import jax; print(len(jax.devices()))"
    result = subprocess.run(
        [sys.executable, "-c", code], env={"XLA_FLAGS": flag, "JAX_PLATFORMS": "cpu"}, capture_output=True, text=True
    )
    said, count = result.stdout.splitlines()
    assert said.startswith("4 virtual CPU devices") and int(count) == devices
