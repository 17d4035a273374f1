"""Kills while a checkpoint is written, full disks, folders that cannot be written, files replaced by rubbish (R65)."""

import contextlib
import errno
import os
import pathlib
import random
import signal
import subprocess
import sys
import time

import jax
import numpy as np
import pytest

from cpjax.mesh import make_mesh
from cpjax.train.checkpoint import Checkpoints, check_folder, claim_folder
from cpjax.train.config import Config, RunConfig, parse_config
from cpjax.train.errors import InputError, computing, run_command, writing
from tests.fast import FLAGS

from .save_states import SIZE, make_state, restore

KILLS = 3
ROOT = pathlib.Path(__file__).parents[2]


def start(out, *options):
    cache = {
        "JAX_COMPILATION_CACHE_DIR": str(jax.config.jax_compilation_cache_dir),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
    command = [sys.executable, "-m", "tests.train.save_states", str(out), *map(str, options)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(command, cwd=ROOT, env={**os.environ, **cache, "XLA_FLAGS": FLAGS}, text=True, **pipes)


def open_run(out):
    return Checkpoints(Config(run=RunConfig(out=str(out))))


def kill_while_saving(out, kills, rng):
    """Kills a saving process again and again, at a random moment of its second to fourth save.

    Each must go on from the newest checkpoint that was complete.

    Returns:
        What was said about cut saves.
    """
    complete, said = 0, []
    for _ in range(kills):
        process = start(out)
        awaited, started, duration = rng.randrange(2, 5), 0.0, 0.0
        for line in process.stdout:
            word, _, rest = line.partition(" ")
            if word == "said":
                said.append(rest)
            elif word == "resumed":
                assert complete <= int(rest) <= complete + 1  # a save may be complete before it is said to be
            elif word == "complete":
                complete, duration = int(rest), time.monotonic() - started
            else:
                started, awaited = time.monotonic(), awaited - 1
                if not awaited:
                    break
        time.sleep(rng.uniform(0, duration))
        process.send_signal(signal.SIGKILL)
        rest, errors = process.communicate()
        assert process.returncode == -signal.SIGKILL, errors
        complete += rest.count("complete")
    return said


def test_r65_killed_while_saving_the_newest_complete_checkpoint_opens(tmp_path):
    kill_while_saving(tmp_path, KILLS, random.Random(0))
    with contextlib.closing(open_run(tmp_path)) as checkpoints:
        newest = restore(checkpoints, make_mesh(), SIZE, print)
    steps = [int(path.name) for path in checkpoints.folder.iterdir()]  # nothing else is left
    assert max(steps) == newest and len(steps) in (2, 3)


def test_r65_a_full_disk_is_one_sentence_and_older_checkpoints_stay(tmp_path):
    process = start(tmp_path, "--until", 5, "--full", 3, "--size", 1000)
    said, errors = process.communicate(timeout=300)
    assert process.returncode == 2 and said.splitlines()[-2:] == ["complete 2", "saving 3"]
    assert errors == (
        f"error: a checkpoint cannot be written into {tmp_path / 'checkpoints'} (File too large): free space there or "
        "make it writable, then continue with --run.resume true; the newest complete one is that of step 2\n"
    )
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir() if path.name.isdigit()) == ["1", "2"]
    said = []
    with contextlib.closing(open_run(tmp_path)) as checkpoints:
        assert restore(checkpoints, make_mesh(), 1000, said.append) == 2
        checkpoints.save(make_state(make_mesh(), 3, 1000), 3, {})
    assert said == ["a save of step 3 was cut short; what was written of it is deleted"]
    assert sorted(path.name for path in checkpoints.folder.iterdir()) == ["2", "3"]


def test_r63_a_process_with_one_device_reads_what_eight_wrote(tmp_path):
    with contextlib.closing(open_run(tmp_path)) as checkpoints:
        checkpoints.save(make_state(make_mesh(fsdp=2, cp=4), 7, 16), 7, {})
    process = start(tmp_path, "--until", 0, "--size", 16)
    said, errors = process.communicate(timeout=300)
    assert process.returncode == 0 and said == "resumed 7\n", errors


def test_a_folder_that_cannot_be_written_is_said_before_anything_is_computed(tmp_path, monkeypatch, capsys):
    config = Config(run=RunConfig(out=str(tmp_path / "deep" / "out")))
    monkeypatch.setattr(os, "access", lambda path, mode: mode & os.W_OK == 0)  # the tests may run as root
    assert run_command(lambda: check_folder(config)) == 2
    assert capsys.readouterr().err == (
        f"error: cannot use {tmp_path} (it cannot be written): give another path, or mend it\n"
    )
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "text", ["\x00rubbish", "[1, 2]", "model: 3\n", "run: {out: [", b"\xff\xfe\x00", ""], ids=range(6)
)
def test_options_of_a_run_replaced_by_rubbish(tmp_path, text):
    claim_folder(Config(run=RunConfig(out=str(tmp_path))))
    (tmp_path / "config.yaml").write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ValueError, match=r"config.yaml does not hold the options of a run any more") as error:
        check_folder(Config(run=RunConfig(out=str(tmp_path), resume=True)))
    assert "\n" not in str(error.value)


def test_a_run_is_resumed_from_any_working_directory(tmp_path, monkeypatch):
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    claim_folder(Config(run=RunConfig(out="runs/mine")))
    monkeypatch.chdir("elsewhere")
    check_folder(parse_config(["--config", "../runs/mine/config.yaml", "--run.resume", "true"]))
    check_folder(Config(run=RunConfig(out="../runs/mine", resume=True)))


def test_errors_are_told_apart(capsys):
    """Before `computing`, a ValueError is about the input; inside, only an InputError is."""

    def raises(error, *contexts):
        def command():
            with contexts[0] if contexts else writing("unused"):
                raise error

        return command

    assert run_command(raises(ValueError("give b"))) == 2
    assert run_command(raises(InputError("give c"), computing())) == 2
    assert run_command(raises(PermissionError(errno.EACCES, "Permission denied", "file"))) == 2
    assert run_command(raises(OSError(errno.ENOSPC, "No space left on device"), writing("out"))) == 2
    assert capsys.readouterr().err.splitlines() == [
        "error: give b",
        "error: give c",
        "error: cannot use file (Permission denied): give another path, or mend it",
        "error: cannot write out (No space left on device): free space there, and run the command again",
    ]
    assert run_command(raises(KeyboardInterrupt())) == 130
    assert capsys.readouterr().err == "stopped by Ctrl-C\n"
    with pytest.raises(BrokenPipeError):
        run_command(raises(BrokenPipeError(errno.EPIPE, "Broken pipe"), writing("out")))
    with pytest.raises(KeyError):
        run_command(raises(KeyError("key")))


def test_ctrl_c_is_not_lost_where_jax_cleans_up():
    """Python ignores what is raised in such a callback."""

    def _xla_gc_callback():
        signal.raise_signal(signal.SIGINT)

    def command():
        _xla_gc_callback()
        time.sleep(60)
        return 0

    usual = signal.signal(signal.SIGINT, signal.default_int_handler)  # it may be ignored where tests run in background
    try:
        assert run_command(command) == 130
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, usual)


def test_a_real_error_keeps_its_traceback():
    @computing()
    def broken():
        return np.zeros(3).reshape(2)

    with pytest.raises(RuntimeError, match="the computation failed") as error:
        run_command(broken)
    assert "reshape" in str(error.value.__cause__)
