"""`python -m cpjax.train.data inspect FILE --model FOLDER`: what a record becomes, before a run is begun."""

from __future__ import annotations

import argparse
import pathlib
import sys

from cpjax.train.errors import run_command


def main() -> int:
    """The command line; returns its exit code."""
    parser = argparse.ArgumentParser(prog="python -m cpjax.train.data", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    command = commands.add_parser("inspect", help="show the tokens, labels, images and positions of a record")
    command.add_argument("file", type=pathlib.Path, help="records: .jsonl, .json, .parquet, or a save_to_disk folder")
    command.add_argument(
        "--model", type=pathlib.Path, required=True, help="Hugging Face folder; weights are not needed"
    )
    command.add_argument("--record", type=int, default=1, help="number of the record, from 1 (default: 1)")
    options = parser.parse_args()

    def show() -> int:
        from rich.console import Console

        from cpjax.train.data.inspect import inspect

        return inspect(options.file, options.model, options.record, Console(soft_wrap=True))

    return run_command(show)


if __name__ == "__main__":
    sys.exit(main())
