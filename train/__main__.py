"""`python -m cpjax.train`: options first, devices second, and only then the rest of JAX."""

from __future__ import annotations

import os
import sys

from cpjax.train.errors import BAD_INPUT, run_command, writing


def main() -> int:
    """Does what the command line says and returns the exit code."""
    from cpjax.train.config import parse_command  # takes seconds, in which Ctrl-C may come

    command, config = parse_command(sys.argv[1:])
    if command == "plan":
        from cpjax.train.plan import plan

        return plan(config)
    from cpjax.train.devices import set_up_devices
    from cpjax.train.processes import join

    with join() as processes:
        devices = set_up_devices(config.mesh.dp * config.mesh.fsdp * config.mesh.cp * config.mesh.tp, processes)
        if command == "check":
            from cpjax.train.check import check

            return check(config)
        from cpjax.train.loop import train

        with writing(config.run.out):
            return train(config, devices)


if __name__ == "__main__":
    code = run_command(main)
    if code == BAD_INPUT:  # threads of a save that failed would wait for others of it, for five minutes
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)
