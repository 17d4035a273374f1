"""Time, memory and balance of cpjax beside its peers, in one run on one mesh.

    python -m benchmarks                              # everything: about a quarter of an hour on two cores
    python -m benchmarks attention layouts            # some parts of: attention, recurrence, train, layouts, compile
    python -m benchmarks --quick                      # tiny sizes: whether it runs and all agree
    python -m benchmarks --out docs                   # also docs/benchmarks.json and docs/benchmarks.png

Runs on as many GPUs as `--cp` if there are, else on virtual CPU devices. Contenders take turns, and only ratios mean
something. Output and gradients of each are compared with those of a plain reference, of a training step
its loss with that on one device.
"""

from __future__ import annotations

import argparse
import os
import pathlib

PARTS = ("attention", "recurrence", "train", "layouts", "compile")


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="*", metavar="part", help=f"of {', '.join(PARTS)} (default: all)")
    parser.add_argument("--quick", action="store_true", help="tiny sizes")
    parser.add_argument("--lengths", type=int, nargs="+", help="tokens (default: 4096 16384; quick: 256)")
    parser.add_argument("--cp", type=int, default=4, choices=(2, 4, 8), help="devices (default: 4)")
    parser.add_argument("--seconds", type=float, help="that the rounds of a problem may take; there are one to eight "
                        "(default: 10; quick: 0)")  # fmt: skip
    parser.add_argument("--out", type=pathlib.Path, metavar="FOLDER", help="write (or replace) the results there")
    args = parser.parse_args()
    if unknown := set(args.parts) - set(PARTS):
        parser.error(f"unknown part {', '.join(sorted(unknown))}: choose of {', '.join(PARTS)}")
    if args.out and args.parts and set(args.parts) <= {"layouts", "compile"}:
        parser.error("--out draws times of runs, of which these parts have none: name attention or recurrence too")
    lengths = tuple(args.lengths or ([256] if args.quick else [4096, 16384]))
    if any(n < 1 or n % 256 for n in lengths):
        parser.error(f"--lengths {' '.join(map(str, lengths))}: each must be a multiple of 256")

    os.environ["XLA_FLAGS"] = (
        f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={args.cp}"
        " --xla_cpu_collective_call_warn_stuck_timeout_seconds=300"
        " --xla_cpu_collective_call_terminate_timeout_seconds=1200"
    )
    if args.quick:  # most of its time is compilation
        os.environ["XLA_FLAGS"] += " --xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
    import jax  # after the flags

    from benchmarks import attention, compile, layouts, output, recurrence, train
    from benchmarks.common import Settings, devices

    seconds = args.seconds if args.seconds is not None else 0.0 if args.quick else 10.0
    settings = Settings(args.cp, lengths, seconds, args.quick)
    runs = {part.__name__.split(".")[1]: part.run for part in (attention, recurrence, train, layouts, compile)}
    print(f"forward + backward, cp={args.cp}, {devices(args.cp)[0].platform}, jax {jax.__version__}, best of rounds")
    rows = []
    for part in PARTS:
        if part in (args.parts or PARTS):
            print(output.header(part))
            for problem in runs[part](settings):
                print(output.section(problem), flush=True)
                rows += problem
    if args.out:
        output.write(args.out, rows, settings)


if __name__ == "__main__":
    main()
