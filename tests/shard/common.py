"""Running the body of a shard_map on every rank."""

import jax
import pytest
from jax.sharding import PartitionSpec as P


def mesh_of(cp: int) -> jax.sharding.Mesh:
    return jax.make_mesh((cp,), ("cp",), devices=jax.devices()[:cp], axis_types=(jax.sharding.AxisType.Auto,))


def on_ranks(cp: int, body, *args, out_specs=None):
    """Runs `body` on every rank with replicated arguments; the results are stacked rank by rank."""
    out_specs = out_specs or P("cp")
    return jax.jit(jax.shard_map(body, mesh=mesh_of(cp), in_specs=P(), out_specs=out_specs, axis_names={"cp"}))(*args)


def assert_every_other_length_raises(sharder, x):
    """Each verb takes x [B, n], or names the length it needs."""
    length = x.shape[1]
    if length not in (sharder.length, sharder.padded_length):
        with pytest.raises(ValueError, match=f"needs {sharder.length}"):
            sharder.shard(x, fill=0)
    if length != sharder.padded_length:
        with pytest.raises(ValueError, match=f"needs {sharder.padded_length}"):
            sharder.take_local(x)
    if length != sharder.local_length:
        with pytest.raises(ValueError, match=f"needs {sharder.local_length}"):
            sharder.gather(x)
