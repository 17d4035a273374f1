"""Checkpoints: written whole or not at all, restored on any mesh, refused when the options contradict the run."""

from __future__ import annotations

import os
import pathlib
import sys
from collections.abc import Callable, Mapping
from typing import Any

import jax
import orbax.checkpoint as ocp
import yaml
from jax.sharding import Mesh

from cpjax.models.common.sharding import tree_shardings
from cpjax.train.config import Config
from cpjax.train.step import TrainState

FREE = {
    "mesh", "model.remat", "lora.merge", "run.out", "run.resume", "run.accumulate", "run.max_nonfinite",
    "run.eval_every", "run.eval_batches", "run.save_every", "run.keep",
}  # fmt: skip
"""Sections and options that may change on resume: they do not decide the numbers."""

_OPTIONS = "config.yaml"


def check_folder(config: Config) -> None:
    """Checks, and changes nothing, that the output folder is free or holds the run that these options describe.

    Raises:
        ValueError: the folder holds something and resume was not asked for, holds nothing to resume, or holds a
            run with other options.
    """
    out = pathlib.Path(config.run.out)
    saved = out / _OPTIONS
    if out.exists() and not out.is_dir():
        raise ValueError(f"--run.out {out} is a file: name a folder")
    if not config.run.resume:
        if out.is_dir() and any(out.iterdir()):
            raise ValueError(
                f"the folder {out} is not empty: continue the run in it with --run.resume true, or name another "
                "folder with --run.out"
            )
        return
    if not saved.is_file():
        raise ValueError(f"there is no run to resume in {out} ({_OPTIONS} is missing): drop --run.resume to start one")
    differences = _differences(yaml.safe_load(saved.read_text()), config.to_dict())
    if differences:
        raise ValueError(
            f"the run in {out} was started with other options: {'; '.join(differences)}; give the old values, or name "
            "another folder with --run.out"
        )


def claim_folder(config: Config) -> None:
    """Makes the output folder and writes the options into it; a run that is there keeps its own."""
    saved = pathlib.Path(config.run.out) / _OPTIONS
    if not saved.exists():
        saved.parent.mkdir(parents=True, exist_ok=True)
        part = saved.with_name(saved.name + ".part")
        part.write_text(config.to_yaml())
        os.replace(part, saved)


def _differences(old: dict[str, dict[str, Any]], new: dict[str, dict[str, Any]]) -> list[str]:
    names = {f"{section}.{name}" for options in (old, new) for section in options for name in options[section]}
    texts = []
    for name in sorted(names):
        section, option = name.split(".")
        values = [options.get(section, {}).get(option) for options in (old, new)]
        if section not in FREE and name not in FREE and values[0] != values[1]:
            texts.append(f"{name} was {values[0]} and is now {values[1]}")
    return texts


class Checkpoints:
    """The checkpoints of one run, by step, in `out/checkpoints`.

    Each holds the train state and, as JSON, the options and the data position.

    Attributes:
        data: the data position of what was restored.
    """

    data: Mapping[str, Any]

    def __init__(self, config: Config):
        self.folder = pathlib.Path(config.run.out).resolve() / "checkpoints"
        self._config = config
        names = [path.name for path in self.folder.iterdir()] if self.folder.is_dir() else []
        self._unfinished = [name.split(".")[0] for name in names if ".orbax-checkpoint-tmp" in name]
        self._open()

    def _open(self) -> None:
        self._manager = ocp.CheckpointManager(
            self.folder,
            options=ocp.CheckpointManagerOptions(max_to_keep=self._config.run.keep, create=True),
            item_handlers={"state": ocp.StandardCheckpointHandler(), "run": ocp.JsonCheckpointHandler()},
        )

    def save(self, state: TrainState, step: int, *, data: Mapping[str, Any] | None = None) -> None:
        """Starts to write the state after `step` steps; older checkpoints go once this one is complete.

        Args:
            data: where the data are, for JSON.
        """
        if step in self._manager.all_steps():
            return
        run = {"config": self._config.to_dict(), "next_step": step, "data": dict(data or {})}
        self._manager.save(
            step, args=ocp.args.Composite(state=ocp.args.StandardSave(state), run=ocp.args.JsonSave(run)), force=True
        )

    def wait(self) -> None:
        """Returns once everything saved so far is on disk."""
        self._manager.wait_until_finished()

    def close(self) -> None:
        self._manager.close()

    def restore(self, like: TrainState, mesh: Mesh, say: Callable[[str], None]) -> TrainState | None:
        """The newest readable state, placed on the mesh; None if there is none.

        A checkpoint that cannot be read (cut short by a crash or a full disk) is moved aside, which is said, and the
        one before it is taken.

        Args:
            like: a state of the same shapes; its values are not used.

        Raises:
            ValueError: a checkpoint holds other arrays than this model and optimizer have.
        """
        for unfinished in self._unfinished:
            say(f"a save of step {unfinished} was cut short; it is not used")
        target = jax.tree.map(
            lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
            like,
            tree_shardings(mesh, like),
        )
        for step in sorted(self._manager.all_steps(), reverse=True):
            try:
                found = self._manager.item_metadata(step).state.tree
                self._compare(step, found, target)
                items = ocp.args.Composite(state=ocp.args.StandardRestore(target), run=ocp.args.JsonRestore())
                restored = self._manager.restore(step, args=items)
                if restored.run["next_step"] != step:
                    raise OSError(f"it says that its next step is {restored.run['next_step']}")
                self.data = restored.run["data"]
                return restored.state
            except _Mismatch as error:
                raise ValueError(str(error)) from None
            except Exception as error:  # tensorstore, orbax, json and the file system each have their own
                self._move_aside(step, error, say)
        return None

    def _compare(self, step: int, found: Any, target: TrainState) -> None:
        shapes = [
            {jax.tree_util.keystr(path, simple=True, separator="/"): (tuple(leaf.shape), str(leaf.dtype))
             for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}
            for tree in (found, target)
        ]  # fmt: skip
        for name in sorted(set(shapes[0]) | set(shapes[1])):
            if shapes[0].get(name) != shapes[1].get(name):
                have, need = (
                    "{} of shape {}".format(*entry[::-1]) if (entry := side.get(name)) else "nothing" for side in shapes
                )
                raise _Mismatch(
                    f"checkpoint {self.folder / str(step)} holds {have} at {name}, but the model and optimizer need "
                    f"{need}: resume with the cpjax version and files that the run was started with"
                )

    def _move_aside(self, step: int, error: Exception, say: Callable[[str], None]) -> None:
        _drop_abandoned_reads()
        self._manager.close()
        aside = self.folder.parent / f"unreadable-{step}"
        number = 0
        while aside.exists():
            number += 1
            aside = self.folder.parent / f"unreadable-{step}-{number}"
        os.replace(self.folder / str(step), aside)
        say(f"checkpoint {step} is incomplete and was moved to {aside}: {' '.join(str(error).split())[:160]}")
        self._open()


def _drop_abandoned_reads() -> None:
    """When one read fails, orbax closes its event loop under the others; Python would print a traceback for each."""
    hook = sys.unraisablehook

    def drop(unraisable: Any) -> None:
        if "Event loop is closed" not in str(unraisable.exc_value):
            hook(unraisable)

    sys.unraisablehook = drop


class _Mismatch(Exception):
    """A readable checkpoint of other arrays."""
