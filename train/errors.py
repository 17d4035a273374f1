"""Bad input ends a command with one sentence and exit code 2; a real error keeps its traceback."""

from __future__ import annotations

import pathlib
import sys
import traceback
from collections.abc import Callable

import cpjax

BAD_INPUT = 2
"""Exit code, as that of a wrong option elsewhere."""


def run_command(command: Callable[[], int]) -> int:
    """Runs a command and returns its exit code; an error meant for its user is printed as one sentence.

    These are our own ValueErrors, and files and folders that the system does not let us use.
    """
    try:
        return command()
    except ValueError as error:
        if not is_bad_input(error):
            raise
        print(f"error: {error}", file=sys.stderr)
        return BAD_INPUT
    except OSError as error:
        if error.filename is None:
            raise
        print(f"error: cannot use {error.filename} ({error.strerror}): give another path, or mend it", file=sys.stderr)
        return BAD_INPUT


def is_bad_input(error: ValueError) -> bool:
    """Whether a `raise` of our own made it: cpjax raises ValueError for what its caller can change."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    package = pathlib.Path(cpjax.__file__).resolve().parent
    floors = (package, (package / "models").resolve(), (package / "train").resolve())  # links in a checkout
    ours = any(pathlib.Path(last.filename).resolve().is_relative_to(floor) for floor in floors)
    return ours and (last.line or "").startswith("raise ")
