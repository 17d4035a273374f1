"""What a run tells while it trains: how fast it is, what its devices hold, and how long it will take."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
from jax.sharding import Mesh
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from cpjax.models import family

PEAKS = {
    "GB200": 2.5e15, "B200": 2.25e15, "H200": 989e12, "H100 PCIe": 756e12, "H100 NVL": 835e12, "H100": 989e12,
    "A100": 312e12, "A10": 125e12, "A40": 149e12, "A6000": 155e12, "L40S": 362e12, "L4": 121e12, "V100": 125e12,
    "T4": 65e12,
}  # fmt: skip
"""Products in 16-bit formats per second, dense, from NVIDIA's data sheets: the first whose name is in a device's."""


def peak_flops(kind: str) -> float | None:
    """What a device of this kind can do per second in 16-bit formats; None where that is not known."""
    words = kind.replace("-", " ").split()
    return next((peak for name, peak in PEAKS.items() if set(name.split()) <= set(words)), None)


def step_flops(model_config: Any, batch: Mapping[str, np.ndarray], trained: float, teacher_config: Any = None) -> float:
    """Operations that a training step on this host batch needs, recomputation not counted.

    Twice the forward pass, and once more as far as its parameters are trained; and a teacher's forward pass.

    Args:
        trained: share of the parameters that get a gradient.
    """
    needed = (2 + trained) * family(model_config.model_type).forward_flops(model_config, batch)
    if teacher_config:
        needed += family(teacher_config.model_type).forward_flops(teacher_config, batch)
    return needed


class Speed:
    """What the record of a step says about time and memory; the arguments but for the mesh are those of `step_flops`.

    MFU is the share of the devices' 16-bit peak that goes into what the model needs.
    """

    def __init__(self, mesh: Mesh, model_config: Any, trained: float, teacher_config: Any = None):
        self._count, self._local = mesh.size, mesh.local_devices
        self._flops = functools.partial(step_flops, model_config, trained=trained, teacher_config=teacher_config)
        self._peak = peak_flops(self._local[0].device_kind)

    def record(self, batch: Mapping[str, np.ndarray], tokens: float, seconds: float) -> dict[str, float]:
        """tokens_per_second, that per device, mfu and memory_bytes (most that a device has held), where known."""
        memory = [device.memory_stats() or {} for device in self._local]
        found = {
            "tokens_per_second": round(tokens / seconds, 1),
            "tokens_per_second_per_device": round(tokens / seconds / self._count, 1),
        }
        if self._peak:
            found["mfu"] = round(self._flops(batch) / seconds / (self._count * self._peak), 4)
        if peaks := [stats["peak_bytes_in_use"] for stats in memory if "peak_bytes_in_use" in stats]:
            found["memory_bytes"] = max(peaks)
        return found


def held_out(record: Mapping[str, Any]) -> list[str]:
    """What an evaluation found, in all: "held-out accuracy 0.98"."""
    return [
        f"held-out {name.removeprefix('held_out_')} {value:.2f}"
        for name, value in record.items()
        if name.startswith("held_out_") and "/" not in name
    ]


def describe(record: Mapping[str, Any]) -> str:
    """A record in one line."""
    parts = [f"loss {record['loss']:.4f}"]
    parts += [f"{name} {record[name]:.4f}" for name in ("ce", "kl") if name in record]
    parts += [f"accuracy {record['accuracy']:.3f}", f"norm {record['grad_norm']:.3g}", f"lr {record['lr']:.2g}"]
    parts += [f"{record['tokens_per_second']:,.0f} tokens/s ({record['tokens_per_second_per_device']:,.0f} a device)"]
    if "mfu" in record:
        parts.append(f"MFU {record['mfu']:.1%}")
    if "memory_bytes" in record:
        parts.append(f"{record['memory_bytes'] / 2**30:.1f} GiB")
    return "  ".join([*parts, *held_out(record)])


@contextlib.contextmanager
def show_progress(console: Console, first: int, steps: int) -> Iterator[Callable[[dict[str, Any]], None]]:
    """Yields the function that shows a record: on a bar in a terminal, otherwise on some twenty lines in all."""
    started = time.monotonic()

    def print_line(record: dict[str, Any]) -> None:
        nonlocal started
        step = record["step"]
        if step == first + 1:
            started = time.monotonic()  # the first step compiles
        if step % max(steps // 20, 1) and step not in (first + 1, steps) and not held_out(record):
            return
        seconds = (time.monotonic() - started) / max(step - first - 1, 1) * (steps - step)
        left = f"  {seconds:.0f} s left" if first + 1 < step < steps else ""
        console.print(f"step {step}/{steps}  {describe(record)}{left}")

    if first < steps:
        console.print("compiling the training step; JAX's cache makes the next start faster")
    if not console.is_terminal:
        yield print_line
        return
    columns = (
        BarColumn(16), MofNCompleteColumn(), TextColumn("{task.description}"), TimeRemainingColumn(compact=True),
    )  # fmt: skip
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("", total=steps, completed=first)

        def move_bar(record: dict[str, Any]) -> None:
            shown = {name: value for name, value in record.items() if not name.startswith("held_out_")}
            progress.update(task, completed=record["step"], description=describe(shown))
            if held_out(record):
                console.print(f"step {record['step']}  {describe(record)}")

        yield move_bar
