"""Chooses GPUs or virtual CPU devices, before JAX starts a backend."""

from __future__ import annotations

import os
import pathlib

import jax
import jax.extend
from jax.experimental import multihost_utils

MAX_VIRTUAL = 64
"""Virtual CPU devices are made up to this number; more would only thrash."""


def set_up_devices(count: int, processes: int = 1) -> str:
    """Makes `count` devices available: GPUs where there are enough, otherwise virtual CPU devices.

    Call it before anything else of JAX runs. Also turns on JAX's compilation cache.

    Args:
        processes: that have joined; `count` is of all of them together, and must be all that they have.

    Returns:
        One line that says what was chosen, and why.

    Raises:
        ValueError: more devices are needed than can be had, or several processes have others than are needed.
    """
    cache = pathlib.Path(os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache") / "cpjax" / "jax"
    if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
        jax.config.update("jax_compilation_cache_dir", str(cache))
    _prepare_virtual(-(-count // processes))
    _spare_cuda(pathlib.Path("/dev"))
    found = jax.devices()
    kind = found[0].platform
    if processes > 1:
        if len(found) != count:
            raise ValueError(
                f"the mesh needs {count} devices, but the {processes} processes have {len(found)} {kind} devices in "
                "all, and each must be used: change --mesh.dp, --mesh.fsdp or --mesh.cp, or the number of processes"
            )
        multihost_utils.sync_global_devices("devices")  # they connect before any process is busy, see meet
        return f"{count} {found[0].device_kind} devices of {processes} processes"
    if kind != "cpu" and len(found) >= count:
        return f"{count} of {len(found)} {found[0].device_kind} devices"
    if kind != "cpu":
        jax.extend.backend.clear_backends()
        jax.config.update("jax_platforms", "cpu")
    available = len(jax.devices())
    seen = "JAX sees no GPU" if kind == "cpu" else f"JAX sees {len(found)} GPU{'s' * (len(found) > 1)}"
    if available < count:
        raise ValueError(
            f"the mesh needs {count} devices, but {seen} and there can be {available} virtual CPU devices here: "
            "lower --mesh.dp, --mesh.fsdp, --mesh.cp or --mesh.tp"
        )
    return f"{count} virtual CPU devices on {os.cpu_count()} cores, because {seen} and the mesh needs {count}"


def _prepare_virtual(count: int) -> None:
    """Asks for `count` CPU devices, and for patience: ranks that share a core reach a collective one by one."""
    flags = os.environ.get("XLA_FLAGS", "")
    for flag, value in (
        ("--xla_cpu_collective_call_warn_stuck_timeout_seconds", 600),
        ("--xla_cpu_collective_call_terminate_timeout_seconds", 3600),
    ):
        if flag not in flags:
            flags += f" {flag}={value}"
    os.environ["XLA_FLAGS"] = flags.strip()
    if "xla_force_host_platform_device_count" not in flags:  # the user's own number stands
        jax.config.update("jax_num_cpu_devices", min(count, MAX_VIRTUAL))


def _spare_cuda(devices: pathlib.Path) -> None:
    """Has JAX's CUDA plugin not look for CUDA's libraries on a machine without an NVIDIA GPU.

    The extra `plan` brings the plugin without them, and JAX would print the plugin's traceback in every run. JAX does
    not start CUDA there anyway. Where there is a GPU, what the plugin misses is said.

    Args:
        devices: folder of the system's devices.
    """
    if not any((devices / name).exists() for name in ("nvidia0", "nvidiactl", "dxg")):
        os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")
