"""One of two processes with two CPU devices each, that agree on things, or are to be killed in a computation."""

import pathlib
import signal
import sys

import jax
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from cpjax.mesh import make_mesh
from cpjax.models.common.sharding import put, to_host
from cpjax.models.generate import generate
from cpjax.train.devices import set_up_devices
from cpjax.train.errors import run_command
from cpjax.train.processes import everywhere, first_text, is_first, join, together

from .small import make_model, make_rows


def main(what):
    with join() as processes:
        print(set_up_devices(4, processes), flush=True)
        process = jax.process_index()
        if what == "agree":
            mesh = make_mesh(fsdp=2, cp=2)
            whole = np.arange(16.0).reshape(4, 4)
            for spec in (P("fsdp", "cp"), P(("fsdp", "cp")), P("cp"), P()):
                array = put(whole, NamedSharding(mesh, spec))
                assert not array.is_fully_addressable
                np.testing.assert_array_equal(to_host(array), whole)
                np.testing.assert_array_equal(to_host(put(array, NamedSharding(mesh, P("cp")))), whole)
            assert first_text("") == "" and first_text("é" * process) == "é"
            assert everywhere([]) == []
            assert everywhere([signal.SIGTERM] * process) == [signal.SIGTERM]
            prompts = make_rows()
            own = generate(make_model(), prompts, 3)
            graph, params = nnx.split(make_model())
            placed = nnx.merge(graph, jax.tree.map(lambda x: put(x, NamedSharding(mesh, P())), params))
            assert generate(placed, prompts, 3, batch_size=4, mesh=mesh) == own and any(own)
            with together():
                pass
            assert is_first() == (process == 0)
            with together():
                if process == 1:
                    pathlib.Path("missing").read_text()
        if what == "loop":
            loop = jax.jit(lambda x: x + x.sum())
            x = put(np.zeros(4), NamedSharding(make_mesh(cp=4), P("cp")))
            for step in range(1_000_000):
                x = loop(x).block_until_ready()
                if step == 10:
                    print("computing", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(run_command(lambda: main(sys.argv[1])))
