"""A loop that permutes, and a permute that needs nothing of it; run as a program, as it may abort.

The sizes are such that XLA, of jax 0.10 and 0.12, schedules the permute behind the loop, in memory of its own.
"""

import os

os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=4"
os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

import cpjax.shard  # noqa: F401
from tests.rendezvous import unordered


def on(x):
    return jax.lax.ppermute(x, "cp", [(rank, (rank + 1) % 4) for rank in range(4)])


def work(x, y, w, v):
    def hop(_, carry):
        held, total = carry
        return on(held), sum(jnp.tanh(total @ one) for one in w) + held

    q = y @ v[0] @ v[1]
    return jax.lax.fori_loop(0, 20, hop, (x, jnp.zeros_like(x)))[1], jnp.cos(on(jnp.sin(q + y @ v[2]))).sum()[None]


def main():
    rng = np.random.default_rng(0)
    shapes = (128, 32), (320, 80), (12, 32, 32), (3, 80, 80)
    operands = [jnp.asarray(0.2 * rng.normal(size=shape), jnp.float32) for shape in shapes]
    specs = P("cp"), P("cp"), P(), P()
    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("cp",))
    step = jax.jit(jax.shard_map(work, mesh=mesh, in_specs=specs, out_specs=P("cp"), check_vma=False))
    compiled = step.lower(*operands).compile()
    assert unordered(compiled.as_text(), by_channel=False), "XLA orders them: other sizes are needed"
    assert not unordered(compiled.as_text())
    first = jax.tree.map(np.asarray, compiled(*operands))
    for _ in range(100):
        jax.tree.map(np.testing.assert_array_equal, compiled(*operands), first)
    print("equal", flush=True)


if __name__ == "__main__":
    main()
