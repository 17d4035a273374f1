"""A process that only saves states, one after another, as a run does: to be killed, or to find no space."""

import argparse
import contextlib
import dataclasses
import resource
import signal
import sys

import jax
import jax.numpy as jnp
import numpy as np

from cpjax.mesh import make_mesh
from cpjax.train.checkpoint import Checkpoints
from cpjax.train.config import Config, OptimizerConfig, RunConfig
from cpjax.train.errors import computing, run_command
from cpjax.train.optimizer import make_optimizer
from cpjax.train.step import init_state

SIZE = 50_000


def make_state(mesh, step, size):
    """The state of a step: noise, which cannot be compressed, so that it takes time and space to write."""
    values = jax.random.normal(jax.random.key(step), (20, size))
    params = {f"{i}.kernel": value for i, value in enumerate(values)}
    state = init_state(params, {}, make_optimizer(OptimizerConfig(), (), params), mesh, average=True, scaled=False)
    return dataclasses.replace(state, step=jnp.int32(step))


def restore(checkpoints, mesh, size, say):
    """The step that the newest state is of, all of its numbers checked; 0 without one."""
    restored = checkpoints.restore(make_state(mesh, 0, size), mesh, say)
    if restored is None:
        return 0
    step = int(restored.step)
    jax.tree.map(np.testing.assert_array_equal, restored, make_state(mesh, step, size))
    return step


def main(options):
    mesh = make_mesh()
    checkpoints = Checkpoints(Config(run=RunConfig(out=options.out)))
    with computing(), contextlib.closing(checkpoints):
        first = restore(checkpoints, mesh, options.size, lambda text: print("said", text, flush=True))
        print("resumed", first, flush=True)
        for step in range(first + 1, options.until + 1):
            if step == options.full:  # a disk on which no file can grow
                signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
                resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))
            state = make_state(mesh, step, options.size)
            print("saving", step, flush=True)
            checkpoints.save(state, step, {})
            checkpoints.wait()
            print("complete", step, flush=True)
    return 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("out")
    for name, default in (("--until", 1000), ("--full", 0), ("--size", SIZE)):
        parser.add_argument(name, type=int, default=default)
    arguments = parser.parse_args()
    sys.exit(run_command(lambda: main(arguments)))
