"""Checkpoints: written whole or not at all, restored on any mesh, refused when the options contradict the run."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import fcntl
import functools
import hashlib
import logging
import math
import os
import pathlib
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TextIO

import jax
import numpy as np
import orbax.checkpoint as ocp
import yaml
from jax.sharding import Mesh

from cpjax.models.common.checkpoint import CONFIG
from cpjax.models.common.sharding import tree_shardings
from cpjax.train.config import Config, parse_config
from cpjax.train.errors import InputError
from cpjax.train.processes import first_text, is_first, together
from cpjax.train.step import TrainState

FREE = {
    "mesh", "plan", "model.remat", "lora.merge", "run.out", "run.resume", "run.accumulate", "run.max_nonfinite",
    "run.eval_every", "run.eval_batches", "run.save_every", "run.keep", "run.keep_best", "run.tensorboard", "run.wandb",
    "run.profile", "records.workers", "records.held_out", "records.answers", "records.max_new_tokens",
    "records.broken", "records.shapes",
}  # fmt: skip
"""Sections and options that may change on resume: they decide neither the numbers, but for rounding, nor which records
come when. A record that turns out to be damaged while training leaves a gap: the others stay where they were packed."""

DECIDE = {
    "records": "which records come when", "data": "the documents", "run.batch_size": "which rows make a step",
    "run.seed": "weights and order", "run.steps": "the learning rate of each step",
}  # fmt: skip
"""What other options decide, by section or name; all not listed: how parameters change."""

PATHS = ("model.path", "lora.path", "distill.teacher", "records.files", "records.held_out", "run.out")
"""Options that name files; a run keeps them absolute, so that it can be resumed from any working directory."""

_OPTIONS = "config.yaml"
_CLAIM = ".claim"
_UNFINISHED = ".orbax-checkpoint-tmp"
_PIECE = 1 << 16


def check_folder(config: Config) -> None:
    """Checks, and changes nothing, that the output folder is free or holds the run that these options describe.

    Raises:
        ValueError: the folder holds something and resume was not asked for, holds nothing to resume, or holds a
            run with other options.
        OSError: it lies in no folder, or in one that cannot be written.
    """
    out = pathlib.Path(config.run.out)
    saved = out / _OPTIONS
    if out.exists() and not out.is_dir():
        raise ValueError(f"--run.out {out} is a file: name a folder")
    place = next(folder for folder in (out, *out.absolute().parents) if folder.exists())
    if not place.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(place))
    if not os.access(place, os.W_OK | os.X_OK):
        raise PermissionError(errno.EACCES, "it cannot be written", str(place))
    if not config.run.resume:
        if out.is_dir() and any(out.iterdir()):
            raise ValueError(
                f"the folder {out} is not empty: continue the run in it with --run.resume true, or name another "
                "folder with --run.out"
            )
        return
    if not saved.is_file():
        raise ValueError(
            f"there is no run to resume in {out} ({_OPTIONS} is missing): drop --run.resume to start one, or name the "
            "folder with --run.out if it was moved"
        )
    differences = _differences(_read_options(saved), _anchored(config.to_dict()))
    if differences:
        raise ValueError(
            f"the run in {out} was started with other options: {'; '.join(differences.values())}; they decide "
            f"{', '.join(dict.fromkeys(map(_decided, differences)))}, so give the old values, or name another folder "
            "with --run.out"
        )


def claim_folder(config: Config) -> TextIO:
    """Makes the output folder and writes the options into it; a run that is there keeps its own.

    Returns:
        A file that keeps other runs out of the folder until it is closed, or this process ends.

    Raises:
        ValueError: another run is in the folder, or was started in it since `check_folder`.
    """
    out = pathlib.Path(config.run.out)
    saved = out / _OPTIONS
    out.mkdir(parents=True, exist_ok=True)
    claim = (out / _CLAIM).open("a")
    try:
        fcntl.flock(claim, fcntl.LOCK_EX | fcntl.LOCK_NB)
        taken = saved.exists() and not config.run.resume
    except BlockingIOError:
        taken = True
    except OSError:  # a file system without locks
        taken = False
    if taken:
        claim.close()
        raise ValueError(f"another run is in the folder {out}: wait until it has ended, or name another with --run.out")
    if not saved.exists():
        part = saved.with_name(saved.name + ".part")
        part.write_text(yaml.safe_dump(_anchored(config.to_dict()), sort_keys=False))
        os.replace(part, saved)
    return claim


def read_run(folder: pathlib.Path) -> Config:
    """The options of the run in a folder, wherever it has been moved to.

    Raises:
        ValueError: there is no run.
    """
    if not (folder / _OPTIONS).is_file():
        raise ValueError(f"there is no run in {folder} ({_OPTIONS} is missing): give the folder that --run.out named")
    config = parse_config(["--config", str(folder / _OPTIONS)])
    return dataclasses.replace(config, run=dataclasses.replace(config.run, out=str(folder)))


def _read_options(saved: pathlib.Path) -> dict[str, dict[str, Any]]:
    try:
        options = yaml.safe_load(saved.read_text())
    except (yaml.YAMLError, UnicodeDecodeError):
        options = None
    if not isinstance(options, dict) or not all(isinstance(section, dict) for section in options.values()):
        raise ValueError(f"{saved} does not hold the options of a run any more: put the file back as it was written")
    return _anchored(options)


def _anchored(options: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    options = {section: dict(values) for section, values in options.items()}
    for name in PATHS:
        section, option = name.split(".")
        if given := options.get(section, {}).get(option):
            files = given if isinstance(given, list) else [given]
            # Held-out sets may have names, NAME=FILE.
            split = [file.rpartition("=") if option == "held_out" else ("", "", file) for file in files]
            anchored = [f"{name}{equals}{os.path.abspath(file)}" for name, equals, file in split]
            options[section][option] = anchored if isinstance(given, list) else anchored[0]
    return options


def _differences(old: dict[str, dict[str, Any]], new: dict[str, dict[str, Any]]) -> dict[str, str]:
    """What is said of each option that differs and may not."""
    names = {f"{section}.{name}" for options in (old, new) for section in options for name in options[section]}
    files = [bool(options.get("records", {}).get("files")) for options in (old, new)]
    unused = "data" if all(files) else "records" if not any(files) else None
    texts = {}
    for name in sorted(names):
        section, option = name.split(".")
        values = [options.get(section, {}).get(option) for options in (old, new)]
        if section != unused and section not in FREE and name not in FREE and values[0] != values[1]:
            texts[name] = f"{name} was {values[0]} and is now {values[1]}"
    return texts


def _decided(name: str) -> str:
    return DECIDE.get(name) or DECIDE.get(name.split(".")[0], "how parameters change")


class Checkpoints:
    """The checkpoints of one run, by step, in `out/checkpoints`: the newest ones and, by `run.keep_best`, the best.

    Each holds the train state and, as JSON, the options, the data position and the held-out metrics, if it was
    evaluated. Parameters that are frozen stay in the folder `model.path`, if there is one: a state that is restored
    gets those of the state it is to be like, and the folder must be the same as when the checkpoint was saved.

    Attributes:
        folder: where they are.
        data, metrics: data position and held-out metrics of what was restored.

    What writes raises InputError when the disk is full or cannot be written; a save runs in the background, so that
    the next call may be the one to raise. Complete checkpoints are not touched then.
    """

    data: Mapping[str, Any]
    metrics: Mapping[str, float]

    def __init__(self, config: Config):
        self.folder = pathlib.Path(config.run.out).resolve() / "checkpoints"
        self._config = config
        self._base = fingerprint(pathlib.Path(config.model.path)) if config.model.path else ""
        names = [path.name for path in self.folder.iterdir()] if self.folder.is_dir() else []
        self._unfinished = [name.split(".")[0] for name in names if _UNFINISHED in name]
        _silence_orbax()
        self._open()

    def _open(self) -> None:
        options = ocp.CheckpointManagerOptions(create=True, preservation_policy=self, cleanup_tmp_directories=True)
        handlers = {"state": ocp.StandardCheckpointHandler(), "run": ocp.JsonCheckpointHandler()}
        self._manager = ocp.CheckpointManager(self.folder, options=options, item_handlers=handlers)
        self._scores: dict[int, float] = {}
        for step in self._manager.all_steps() if self._config.run.keep_best else ():
            with contextlib.suppress(Exception):  # a damaged one is dealt with when it is restored
                run = self._manager.restore(step, args=ocp.args.Composite(run=ocp.args.JsonRestore())).run
                self._scores[step] = self._score(run["metrics"])

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> list[bool]:
        """Orbax asks which checkpoints, from old to new, not to delete."""
        first = len(checkpoints) - self._config.run.keep
        return [i >= first or checkpoint.step == self.best_step for i, checkpoint in enumerate(checkpoints)]

    def _score(self, metrics: Mapping[str, float]) -> float:
        """The larger, the better; a metric that is missing or no number is worst."""
        name = self._config.run.keep_best
        value = metrics.get(name, math.nan) * (-1 if "loss" in name else 1)
        return -math.inf if math.isnan(value) else value

    @property
    def best_step(self) -> int | None:
        """Step of the best checkpoint, the newest of equals; None without `run.keep_best` or an evaluated one."""
        best = max(((score, step) for step, score in self._scores.items()), default=(-math.inf, None))
        return best[1] if best[0] > -math.inf else None

    @property
    def last_step(self) -> int | None:
        """Step of the newest checkpoint, if there is any."""
        return max(self._manager.all_steps(), default=None)

    def is_best(self, record: Mapping[str, float]) -> bool:
        """Whether a record of metrics holds the one that decides, better than in any checkpoint."""
        best = max(self._scores.values(), default=-math.inf)
        return bool(self._config.run.keep_best) and self._score(record) > best

    def save(
        self, state: TrainState, step: int, record: Mapping[str, float], data: Mapping[str, Any] | None = None
    ) -> None:
        """Starts to write the state after `step` steps; older checkpoints go once this one is complete.

        Args:
            record: metrics of that step.
            data: where the data are, for JSON.
        """
        if step in self._manager.all_steps():
            return
        self._scores[step] = self._score(record)
        run = {
            "config": self._config.to_dict(),
            "next_step": step,
            "data": dict(data or {}),
            "metrics": _held_out(record),
            "base": self._base if state.frozen else "",
        }
        items = ocp.args.Composite(state=ocp.args.StandardSave(self._own(state)), run=ocp.args.JsonSave(run))
        with self._told():
            self._manager.save(step, args=items, force=True)

    def _own(self, state: TrainState) -> TrainState:
        """What a checkpoint holds of a state."""
        return dataclasses.replace(state, frozen={}) if self._base else state

    def wait(self) -> None:
        """Returns once everything saved so far is on disk."""
        with self._told():
            self._manager.wait_until_finished()

    def close(self) -> None:
        with self._told():
            self._manager.close()

    @contextlib.contextmanager
    def _told(self) -> Iterator[None]:
        """Turns what the system says about a write into one sentence."""
        try:
            yield
        except (OSError, ValueError) as error:  # tensorstore raises ValueError
            number = re.search(r"os_error_code='(\d+)'", str(error))
            code = int(number[1]) if number else getattr(error, "errno", None)
            if code is None:
                raise
            steps = [int(path.name) for path in self.folder.iterdir() if path.name.isdigit()]
            newest = (
                f"the newest complete one is that of step {max(steps)}" if steps else "there is no complete one yet"
            )
            raise InputError(
                f"a checkpoint cannot be written into {self.folder} ({os.strerror(code)}): free space there or make it "
                f"writable, then continue with --run.resume true; {newest}"
            ) from None

    def restore(self, like: TrainState, mesh: Mesh, say: Callable[[str], None]) -> TrainState | None:
        """The newest readable state, placed on the mesh; None if there is none.

        A checkpoint that cannot be read (cut short by a crash or a full disk) is moved aside, which is said, and the
        one before it is taken.

        Args:
            like: a state of the same shapes, of which only frozen parameters that no checkpoint holds are used.

        Raises:
            InputError: a checkpoint holds other arrays than this model and optimizer have, or belongs to another
                frozen model than that in `model.path`; or there are some, but none can be read.
        """
        for unfinished in self._unfinished:
            say(f"a save of step {unfinished} was cut short; what was written of it is deleted")
        target = self._target(like, mesh)
        steps = sorted(self._manager.all_steps(), reverse=True)
        for step in steps:
            reason = ""
            try:
                restored = self._read(step, target, like)
            except (InputError, MemoryError, jax.errors.JaxRuntimeError):  # the checkpoint is not to blame
                raise
            except Exception as error:  # tensorstore, orbax, json and the file system each have their own
                reason = " ".join(str(error).split())[:160] or type(error).__name__
            if not (reason := first_text(reason)):  # of any process
                return restored
            self._move_aside(step, reason, say)
        if steps:
            raise InputError(
                f"no checkpoint of the run in {self.folder.parent} can be read: put back good ones, or run the command "
                "again to start from step 0"
            )
        return None

    def read(self, step: int, like: TrainState, mesh: Mesh) -> TrainState:
        """The state after `step` steps, placed on the mesh; see `restore`.

        Raises:
            InputError: there is no such checkpoint, it cannot be read, or see `restore`.
        """
        kept = sorted(self._manager.all_steps())
        if step not in kept:
            raise InputError(
                f"{self.folder} has no checkpoint of step {step}: it has {', '.join(map(str, kept)) or 'none'}"
            )
        try:
            return self._read(step, self._target(like, mesh), like)
        except (InputError, MemoryError, jax.errors.JaxRuntimeError):
            raise
        except Exception as error:  # as in `restore`
            raise InputError(
                f"checkpoint {self.folder / str(step)} is incomplete ({' '.join(str(error).split())[:160]}): choose "
                "another"
            ) from None

    def _target(self, like: TrainState, mesh: Mesh) -> TrainState:
        """Shapes and places of what a checkpoint holds."""
        return jax.tree.map(
            lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
            self._own(like),
            tree_shardings(mesh, self._own(like)),
        )

    def _read(self, step: int, target: TrainState, like: TrainState) -> TrainState:
        self._compare(step, self._manager.item_metadata(step).state.tree, target)
        items = ocp.args.Composite(state=ocp.args.StandardRestore(target), run=ocp.args.JsonRestore())
        restored = self._manager.restore(step, args=items)
        run = restored.run
        if run["next_step"] != step:
            raise OSError(f"it says that its next step is {run['next_step']}")
        if run["base"] and run["base"] != self._base:
            raise InputError(
                f"the model in --model.path {self._config.model.path} is not the one that checkpoint "
                f"{self.folder / str(step)} was trained on: put back its config.json and weights"
            )
        self.data, self.metrics = run["data"], run["metrics"]
        return dataclasses.replace(restored.state, frozen=like.frozen) if self._base else restored.state

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
                raise InputError(
                    f"checkpoint {self.folder / str(step)} holds {have} at {name}, but the model and optimizer need "
                    f"{need}: resume with the cpjax version and files that the run was started with"
                )

    def _move_aside(self, step: int, reason: str, say: Callable[[str], None]) -> None:
        self._manager.close()
        with together():
            if is_first():
                aside = self.folder.parent / f"unreadable-{step}"
                number = 0
                while aside.exists():
                    number += 1
                    aside = self.folder.parent / f"unreadable-{step}-{number}"
                os.replace(self.folder / str(step), aside)
                say(f"checkpoint {step} is incomplete and was moved to {aside}: {reason}")
        self._open()


def shapes_of(state: TrainState) -> TrainState:
    """All that restoring needs of a state: shapes alone, but of frozen parameters, so that no memory holds it twice."""
    return dataclasses.replace(jax.eval_shape(lambda state: state, state), frozen=state.frozen)


def fingerprint(folder: pathlib.Path) -> str:
    """The same for two Hugging Face folders with the same configuration and weights.

    Of each file with weights it takes the size, the header, with names and shapes, and ten pieces, the last one too.
    """
    said = hashlib.sha256((folder / CONFIG).read_bytes())
    for path in sorted(folder.glob("*.safetensors")):
        size = path.stat().st_size
        said.update(f"{path.name} {size} ".encode())
        with path.open("rb") as file:
            first = 8 + int.from_bytes(file.read(8), "little")
            said.update(file.read(first - 8))
            for start in np.linspace(first, max(first, size - _PIECE), 10, dtype=int):
                file.seek(start)
                said.update(file.read(_PIECE))
    return said.hexdigest()


def _held_out(record: Mapping[str, float]) -> dict[str, float]:
    return {name: value for name, value in record.items() if name.startswith("held_out")}


@functools.cache
def _silence_orbax() -> None:
    """What orbax logs with tracebacks, it also raises; here it is said once, in one sentence.

    When one read or write fails, it also drops the others and closes their event loop; Python would print a traceback
    for each.
    """
    theirs = re.compile(r"orbax|OCDBT")  # OCDBT: the database that holds the arrays
    for logger in ("absl", "asyncio"):
        logging.getLogger(logger).addFilter(lambda record: not theirs.search(record.pathname + record.getMessage()))
    hook = sys.unraisablehook

    def drop(unraisable: Any) -> None:
        if "Event loop is closed" not in str(unraisable.exc_value):
            hook(unraisable)

    sys.unraisablehook = drop
