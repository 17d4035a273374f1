"""Where the records of steps go beside metrics.jsonl, and traces of what the devices do in a step."""

from __future__ import annotations

import importlib.util
import pathlib
from collections.abc import Mapping
from typing import Any

import jax

from cpjax.train.config import Config, RunConfig
from cpjax.train.metrics import MetricsLog


def check_packages(run: RunConfig) -> None:
    """Checks that what the options need is installed.

    Raises:
        ValueError: it is not.
    """
    for option, wanted, package in (
        ("tensorboard true", run.tensorboard, "tensorboardX"),
        (f"wandb {run.wandb}", run.wandb, "wandb"),
    ):
        if wanted and importlib.util.find_spec(package) is None:
            raise ValueError(f"--run.{option} needs the package {package}: pip install {package}, or drop the option")


class Logs:
    """Everything that keeps the records of a run: metrics.jsonl, and by option TensorBoard's files and wandb."""

    def __init__(self, config: Config, step: int):
        """Opens them for a run that has taken `step` steps."""
        out = pathlib.Path(config.run.out)
        self._file = MetricsLog(out / "metrics.jsonl", step)
        self._tensorboard = self._wandb = None
        if config.run.tensorboard:
            from tensorboardX import SummaryWriter

            self._tensorboard = SummaryWriter(str(out / "tensorboard"), purge_step=step + 1, filename_suffix=f".{step}")
        if config.run.wandb:
            self._wandb = _open_wandb(config, out)

    def write(self, record: Mapping[str, Any]) -> None:
        self._file.write(dict(record))
        numbers = {name: value for name, value in record.items() if name != "step"}
        if self._tensorboard:
            for name, value in numbers.items():
                self._tensorboard.add_scalar(name, value, record["step"])
        if self._wandb:
            self._wandb.log(numbers, step=record["step"])

    def close(self) -> None:
        self._file.close()
        if self._tensorboard:
            self._tensorboard.close()
        if self._wandb:
            self._wandb.finish()


def _open_wandb(config: Config, out: pathlib.Path) -> Any:
    """The run in wandb; a run that resumes goes on in its own, whose id is kept in the output folder."""
    import wandb

    file = out / "wandb.id"
    known = file.read_text() if file.exists() else None
    run = wandb.init(
        project=config.run.wandb, name=out.name, dir=str(out), config=config.to_dict(), id=known, resume="allow"
    )
    file.write_text(run.id)
    return run


class Trace:
    """A trace by `jax.profiler` of some steps, for TensorBoard, Perfetto or XProf."""

    def __init__(self, steps: range, folder: pathlib.Path):
        self._steps, self._folder, self._open = steps, folder, False

    def begin(self, step: int) -> None:
        if self._steps and step == self._steps[0]:
            jax.profiler.start_trace(str(self._folder))
            self._open = True

    def end(self, step: int) -> None:
        """Call it when the devices have taken the step."""
        if self._open and step == self._steps[-1]:
            self.close()

    def close(self) -> None:
        if self._open:
            jax.profiler.stop_trace()
            self._open = False
