"""`python -m cpjax.train`: options first, devices second, and only then the rest of JAX."""

from __future__ import annotations

import pathlib
import sys
import traceback

import cpjax
from cpjax.train.config import parse_config

BAD_INPUT = 2


def main() -> int:
    """Runs the command line and returns its exit code."""
    try:
        config = parse_config(sys.argv[1:])
        from cpjax.train.devices import set_up_devices

        devices = set_up_devices(config.mesh.dp * config.mesh.fsdp * config.mesh.cp)
        from cpjax.train.loop import train

        return train(config, devices)
    except ValueError as error:
        if not is_bad_input(error):
            raise
        print(f"error: {error}", file=sys.stderr)
        return BAD_INPUT


def is_bad_input(error: ValueError) -> bool:
    """Whether a `raise` of our own made it: cpjax raises ValueError for what its caller can change, and only for that."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    package = pathlib.Path(cpjax.__file__).resolve().parent
    floors = (package, (package / "models").resolve(), (package / "train").resolve())  # links in a checkout
    ours = any(pathlib.Path(last.filename).resolve().is_relative_to(floor) for floor in floors)
    return ours and (last.line or "").startswith("raise ")


if __name__ == "__main__":
    sys.exit(main())
