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
    """Whether our own code raised it: cpjax raises ValueError for what its caller can change, and for nothing else."""
    frames = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
    root = pathlib.Path(cpjax.__file__).resolve().parent
    raiser = pathlib.Path(frames[-1]).resolve()
    return any(raiser.is_relative_to(folder) for folder in (root, *((root / name).resolve() for name in _FLOORS)))


_FLOORS = ("models", "train")  # links in a checkout, folders in a wheel

if __name__ == "__main__":
    sys.exit(main())
