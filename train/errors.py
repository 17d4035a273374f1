"""What the user of a command can mend ends it with one sentence and exit code 2; a real error keeps its traceback."""

from __future__ import annotations

import contextlib
import errno
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType

BAD_INPUT = 2
"""Exit code, as that of a wrong option elsewhere."""
INTERRUPTED = 128 + signal.SIGINT
"""Exit code after Ctrl-C, as that of a shell."""

FULL = {errno.ENOSPC: "No space left on device", errno.EDQUOT: "Disk quota exceeded", errno.EFBIG: "File too large"}
"""Errors of a disk that takes no more."""


class InputError(ValueError):
    """Something that the user can mend, found while a run computes: a broken record, a full disk."""


def run_command(command: Callable[[], int]) -> int:
    """Runs a command and returns its exit code; an error meant for its user is printed as one sentence.

    These are ValueErrors, with which cpjax answers to wrong options, files and folders, unless they come out of
    `computing`; and files and folders that the system does not let us use. `python -X dev` shows their traceback.
    Ctrl-C is no error: it ends the command, where that does not handle it, with one line.
    """
    ours = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if ours:
        signal.signal(signal.SIGINT, _interrupt)
    try:
        return command()
    except KeyboardInterrupt:
        print("stopped by Ctrl-C", file=sys.stderr)
        return INTERRUPTED
    except (ValueError, OSError) as error:
        if sys.flags.dev_mode or (isinstance(error, OSError) and error.filename is None):
            raise
        print(f"error: {sentence(error)}", file=sys.stderr)
        return BAD_INPUT
    finally:
        if ours:
            signal.signal(signal.SIGINT, signal.default_int_handler)


def _interrupt(number: int, frame: FrameType | None) -> None:
    """Ctrl-C; it comes again a moment later if it came in JAX's callback of Python's cleaning up, where it is lost."""
    if frame and frame.f_code.co_name == "_xla_gc_callback":
        threading.Timer(0.01, signal.pthread_kill, [threading.main_thread().ident, number]).start()
        return
    raise KeyboardInterrupt


def sentence(error: ValueError | OSError) -> str:
    """What is wrong, and what to do."""
    if not isinstance(error, OSError) or error.filename is None:
        return str(error)
    if error.errno in FULL:
        return f"cannot write {error.filename} ({error.strerror}): free space there, and run the command again"
    return f"cannot use {error.filename} ({error.strerror}): give another path, or mend it"


@contextlib.contextmanager
def computing() -> Iterator[None]:
    """Where input has been checked, so that a ValueError other than an InputError is a defect of the program.

    Raises:
        RuntimeError: in the place of that ValueError.
    """
    try:
        yield
    except InputError:
        raise
    except ValueError as error:
        raise RuntimeError("the computation failed, although its input was found good") from error


@contextlib.contextmanager
def writing(path: object) -> Iterator[None]:
    """Gives the errors of a full disk, which do not say where they come from, the path that is being written.

    Raises:
        OSError: with `path` as its filename.
    """
    try:
        yield
    except OSError as error:
        if error.errno in FULL and error.filename is None:
            error.filename = str(path)
        raise
