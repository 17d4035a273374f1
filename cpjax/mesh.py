"""The device mesh: replicas, sharded replicas, context ranks and tensor-parallel ranks."""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax
import numpy as np
from jax.sharding import AxisType

AXES = ("dp", "fsdp", "cp", "tp")

ROW_AXES = ("cp", "dp", "fsdp")
"""Axes that split the rows of a batch, in the order of the mesh; cp does where it is automatic, as in generation."""

HEAD_AXES = ("tp",)
"""Axes that split the heads of attention."""


def compiler_options(mesh: jax.sharding.Mesh) -> dict[str, int]:
    """Options of `jax.jit` for programs that run a ring on this mesh; {} where there are none to set.

    On GPUs XLA keeps one collective in flight, but the backward of a ring needs two to be hidden behind its kernel:
    keys and values on their way, and the gradients of those of the hop before.
    """
    if mesh.devices.flat[0].platform != "gpu":
        return {}
    return {"xla_gpu_experimental_parallel_collective_overlap_limit": 2}


def device_platform() -> str:
    """Kind of the devices that the code being traced is for, "cpu" or "gpu": those of the mesh in context, if any."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    return device.platform if device is not None else jax.default_backend()


def splitting_axes(names: Sequence[str], size: int) -> tuple[str, ...]:
    """Those of these automatic axes of the mesh in context, of several devices, that together divide `size`."""
    mesh, found = jax.sharding.get_abstract_mesh(), tuple[str, ...]()
    for name in names:
        parts = mesh.shape[name] if name in mesh.auto_axes else 1
        if parts > 1 and size % (parts * math.prod(mesh.shape[n] for n in found)) == 0:
            found = (*found, name)
    return found


def make_mesh(
    dp: int = 1, fsdp: int = 1, cp: int = 1, tp: int = 1, *, devices: Sequence[jax.Device] | None = None
) -> jax.sharding.Mesh:
    """A mesh with axes ("dp", "fsdp", "cp", "tp"), all automatic; `jax.shard_map` makes cp manual where it is needed.

    Neighbouring devices share layers (tp), and those next to them form a cp ring. Where there are more devices than
    needed, the first ones are taken.

    Args:
        dp: copies of the parameters, each with its own rows of the batch.
        fsdp: parts that parameters and optimizer state are split into, each with its own rows of the batch.
        cp: parts that every sequence is split into.
        tp: parts that the heads and the hidden features of every layer are split into, see
            `cpjax.models.common.sharding`.
        devices: defaults to all of the default backend.

    Raises:
        ValueError: an axis below 1, or fewer devices than dp x fsdp x cp x tp.
    """
    sizes = {"dp": dp, "fsdp": fsdp, "cp": cp, "tp": tp}
    for name, size in sizes.items():
        if size < 1:
            raise ValueError(f"mesh axis {name} is {size}: give a size of at least 1")
    needed = dp * fsdp * cp * tp
    devices = jax.devices() if devices is None else devices
    if needed > len(devices):
        raise ValueError(
            f"a mesh of dp {dp} x fsdp {fsdp} x cp {cp} x tp {tp} needs {needed} devices, but there are {len(devices)} "
            f"({devices[0].platform}): lower one of the four, or start with more devices"
        )
    mesh = jax.make_mesh(tuple(sizes.values()), AXES, axis_types=(AxisType.Auto,) * 4, devices=devices[:needed])
    return automatic_mesh(mesh.devices, AXES)


def automatic_mesh(devices: np.ndarray, axes: Sequence[str]) -> jax.sharding.Mesh:
    """A mesh of devices [size of each axis], all axes automatic, and cp the first of them by name.

    Where rows are made manual inside of cp's shard_map, XLA of jax 0.12 aborts unless cp is the first axis.
    """
    names = sorted(axes, key=lambda name: name != "cp")
    order = [list(axes).index(name) for name in names]
    return jax.sharding.Mesh(devices.transpose(order), names, axis_types=(AxisType.Auto,) * len(names))
