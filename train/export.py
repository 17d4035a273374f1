"""`python -m cpjax.train.export RUN OUT` exports a checkpoint of a run, adapters merged, as a Hugging Face folder."""

from __future__ import annotations

import argparse
import contextlib
import pathlib
import sys

from cpjax.mesh import make_mesh
from cpjax.models import save_pretrained
from cpjax.shard import layout_from_name
from cpjax.train.checkpoint import Checkpoints, read_run, shapes_of
from cpjax.train.devices import set_up_devices
from cpjax.train.errors import run_command
from cpjax.train.loop import class_name, prepare
from cpjax.train.lora import merge_adapters
from cpjax.train.step import merge_model
from cpjax.train.task import open_task


def main() -> int:
    """The command line; returns its exit code."""
    parser = argparse.ArgumentParser(prog="python -m cpjax.train.export", description=__doc__)
    parser.add_argument("run", type=pathlib.Path, help="folder of the run, for instance runs/mine")
    parser.add_argument("out", type=pathlib.Path, help="folder for the model; must not exist")
    parser.add_argument(
        "--step", default="last", help="number of a step, last, or best by the run's --run.keep_best (default: last)"
    )
    options = parser.parse_args()
    return run_command(lambda: export(options.run, options.out, options.step))


def export(run: pathlib.Path, out: pathlib.Path, step: str) -> int:
    """Writes the model in a checkpoint.

    Raises:
        ValueError: there is no such run or checkpoint, or `out` exists.
    """
    if out.exists():
        raise ValueError(f"{out} exists already: name another folder for the model")
    config = read_run(run)
    set_up_devices(config.mesh.dp * config.mesh.fsdp * config.mesh.cp * config.mesh.tp)
    mesh = make_mesh(config.mesh.dp, config.mesh.fsdp, config.mesh.cp, config.mesh.tp)
    task = open_task(config, layout_from_name(config.mesh.layout, config.mesh.cp))
    graphdef, state, _, _ = prepare(config, task.model_config, mesh)
    with contextlib.closing(Checkpoints(config)) as checkpoints:
        number = find_step(checkpoints, step)
        state = shapes_of(state)
        state = checkpoints.read(number, state, mesh)
    model = merge_model(graphdef, state.best, state.frozen)
    merge_adapters(model)
    save_pretrained(model, out, companions=config.model.path or None)
    task.write_card(out, {"step": number, **checkpoints.metrics}, class_name(task.model_config))
    print(f"exported step {number} of {run}: {out}")
    return 0


def find_step(checkpoints: Checkpoints, step: str) -> int:
    """The number of a step that is given as such, or as "last" or "best".

    Raises:
        ValueError: it is none of these, or there is no such checkpoint.
    """
    if step.isdigit():
        return int(step)
    found: dict[str, int | None] = {"last": checkpoints.last_step, "best": checkpoints.best_step}
    if step not in found:
        raise ValueError(f"--step is {step}: it must be a number, last or best")
    if (number := found[step]) is None:
        why = "the run was not told to keep one by --run.keep_best" if step == "best" else "none was saved"
        raise ValueError(f"{checkpoints.folder} has no {step} checkpoint, as {why}: give another --step")
    return number


if __name__ == "__main__":
    sys.exit(main())
