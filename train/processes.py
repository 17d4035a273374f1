"""One run of several processes: how they find each other, agree, and end.

All of them run the same program on the same options. What they read is the same for all, what they write the first one
writes, except for checkpoints, to which each adds the parts that its devices hold.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from cpjax.models.common.sharding import put
from cpjax.train.errors import InputError, run_command, sentence

VARIABLES = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")
"""Environment variables that make a process one of several: where the first one listens, as host:port, how many there
are, and which one this is, counted from 0."""

LAUNCHERS = ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE")
"""Variables in which launchers, whose settings JAX reads itself, say how many processes they started."""

DEAD = 30
"""Seconds without a sign of life after which a process counts as dead, and the others end."""

_GRACE = 5
_END = 24 * 3600
_LENGTH = 4000


@contextlib.contextmanager
def join() -> Iterator[int]:
    """Joins the other processes of this run, if the environment says that there are any, before JAX starts a backend.

    When one of several processes dies, JAX ends the others, with an exception or from a thread; one sentence then says
    what to do. No exception leaves the block in one of several processes: it is told as `run_command` does and ends the
    process at once, which would otherwise wait for the others at its exit, and they for it in a computation.

    Yields:
        How many processes there are.

    Raises:
        ValueError: only some of `VARIABLES` are set, one is no number, or the other processes cannot be reached.
    """
    count = _connect()
    if count == 1:
        yield count
        return
    farewell = _last_words(
        "error: this process, one of several, was killed or could not compute on, most likely because another one "
        "ended: see above, and what the others say, for the first that failed; then start all again, with --run.resume "
        "true to go on from the newest checkpoint"
    )
    try:
        yield count
        jax.distributed.shutdown()  # waits for the others
    except BaseException as error:
        code = _tell(error)
        if not isinstance(error, jax.errors.JaxRuntimeError):  # these may be of a lost connection
            farewell()
        sys.stdout.flush()
        sys.stderr.flush()
        if is_first():
            time.sleep(_GRACE)  # its end ends the others, who may be about to say the same
        os._exit(code)
    farewell()


def _connect() -> int:
    given = [name for name in VARIABLES if name in os.environ]
    launched = max(_number(name, "1") for name in LAUNCHERS)
    if not given and launched == 1:
        return 1
    missing = [name for name in VARIABLES if name not in given]
    if missing and launched == 1:
        raise ValueError(
            f"{' and '.join(given)} {'are' if len(given) > 1 else 'is'} set, but not {' and '.join(missing)}: one of "
            "several processes needs all three, a single one none of them"
        )
    address = os.environ.get(VARIABLES[0])
    count, process = (_number(name) if name in given else None for name in VARIABLES[1:])
    # SIGTERM is ours to handle, see catch_signals; this service would take it away.
    jax.config.update("jax_enable_preemption_service", False)
    try:
        jax.distributed.initialize(
            address, count, process, heartbeat_timeout_seconds=DEAD, shutdown_timeout_seconds=_END
        )
    except (ValueError, RuntimeError) as error:
        raise ValueError(
            f"this process cannot join the others ({' '.join(str(error).split())[:200]}): give all of them the same "
            f"{VARIABLES[0]}, process 0 and a free port there that they can reach, and the same {VARIABLES[1]}"
        ) from None
    return count or launched


def _tell(error: BaseException) -> int:
    """Says what is wrong as `run_command` does; its exit code."""

    def fail() -> int:
        raise error

    try:
        return run_command(fail)
    except BaseException:
        traceback.print_exc()
        return 1


def _last_words(text: str) -> Callable[[], object]:
    """Has `text` said if this process ends before it calls what is returned."""
    command = ["sh", "-c", 'trap "" INT TERM HUP; read -r word || echo "$0" >&2', text]
    listener = subprocess.Popen(command, stdin=subprocess.PIPE)
    return functools.partial(listener.communicate, b"farewell\n")


def _number(name: str, default: str = "") -> int:
    value = os.environ.get(name, default)
    if not value.isdecimal():
        raise ValueError(f"{name} is {value!r}: it must be a whole number")
    return int(value)


def meet(mesh: Mesh) -> None:
    """Has all groups of devices along axes of the mesh connect now; all processes call this at once.

    On CPUs, devices that compute together for the first time wait half a minute for each other, and a compilation can
    keep some of them longer.
    """
    if jax.process_count() == 1 or mesh.devices.flat[0].platform != "cpu":
        return
    axes = [name for name, size in mesh.shape.items() if size > 1]
    groups = [group for size in range(len(axes)) for group in itertools.combinations(axes, size + 1)]
    everyone = P(tuple(axes))
    sums = jax.shard_map(
        lambda one: [jax.lax.pcast(jax.lax.psum(one, group), group, to="varying") for group in groups],
        mesh=mesh,
        in_specs=everyone,
        out_specs=everyone,
    )
    jax.block_until_ready(jax.jit(sums)(put(np.ones(mesh.size), NamedSharding(mesh, everyone))))


def is_first() -> bool:
    """Whether this is the process that speaks and writes; true where there is only one."""
    return jax.process_index() == 0


@contextlib.contextmanager
def together() -> Iterator[None]:
    """All processes leave this block at once, and if input is found bad in one of them, all with the same error.

    Raises:
        InputError: another process, the first one that did, raised a ValueError or OSError with this sentence.
    """
    own: ValueError | OSError | None = None
    try:
        yield
    except (ValueError, OSError) as error:
        own = error
    text = sentence(own) if own else ""
    if first := first_text(text):
        raise own if own and first == text else InputError(first)


def first_text(text: str) -> str:
    """Of the texts that all processes call this with at once, the first that is not empty."""
    if jax.process_count() == 1:
        return text
    coded = text.encode()[:_LENGTH]
    sent = np.zeros(_LENGTH, np.uint8)
    sent[: len(coded)] = np.frombuffer(coded, np.uint8)
    texts = [row.tobytes().rstrip(b"\0").decode(errors="ignore") for row in multihost_utils.process_allgather(sent)]
    return next((text for text in texts if text), "")


def everywhere(caught: list[signal.Signals]) -> list[signal.Signals]:
    """The signals that any of the processes has caught; all call this at once."""
    if jax.process_count() == 1:
        return caught
    numbers = multihost_utils.process_allgather(np.int32(caught[0] if caught else 0))
    return [signal.Signals(number) for number in numbers.tolist() if number]
