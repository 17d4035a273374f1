"""Running the body of a shard_map on every rank."""

import jax
from jax.sharding import PartitionSpec as P


def mesh_of(cp: int) -> jax.sharding.Mesh:
    return jax.make_mesh((cp,), ("cp",), devices=jax.devices()[:cp], axis_types=(jax.sharding.AxisType.Auto,))


def on_ranks(cp: int, body, *args, out_specs=None):
    """Runs `body` on every rank with replicated arguments; the results are stacked rank by rank."""
    out_specs = out_specs or P("cp")
    return jax.jit(jax.shard_map(body, mesh=mesh_of(cp), in_specs=P(), out_specs=out_specs, axis_names={"cp"}))(*args)
