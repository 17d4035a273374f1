"""Collectives over the ranks that leave other, automatic mesh axes alone.

XLA's partitioner cannot see through an all-gather or all-to-all over a manual axis: it gathers the rows of the batch
over data-parallel axes before it (seen with jax 0.10 and 0.12). It does understand a permute. So where another
automatic axis has more than one device, both are made of permutes, which send the same bytes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from cpjax.channels import give_own_channels
from cpjax.varying import vary_over, varying_axes

give_own_channels()


def check_axis(axis_name: str, size: int) -> None:
    """Whether the code being traced runs on `size` ranks.

    Raises:
        ValueError: outside of a `shard_map` that is manual over `axis_name`, or on one of another number of ranks.
    """
    try:
        found = lax.axis_size(axis_name)
    except NameError:
        raise ValueError(
            f"a sharder of {size} ranks was used outside of a shard_map that is manual over the mesh axis "
            f"{axis_name!r}: call it inside of one"
        ) from None
    if found != size:
        raise ValueError(
            f"a sharder of {size} ranks was used on a mesh whose axis {axis_name!r} has {found}: make the layout for "
            "that many"
        )


def permute(x: jax.Array, axis_name: str, size: int, shift: int) -> jax.Array:
    """What rank - shift holds; `size` ranks in a circle."""
    check_axis(axis_name, size)
    return lax.ppermute(x, axis_name, [(r, (r + shift) % size) for r in range(size)])


def all_gather(x: jax.Array, axis_name: str, size: int) -> jax.Array:
    """[...] -> [size, ...], in the order of ranks. Transposes to a reduce-scatter."""
    check_axis(axis_name, size)
    if _alone():
        return lax.all_gather(x, axis_name)
    rank, out = lax.axis_index(axis_name), _like(x, size)
    for step in range(size):
        out = lax.dynamic_update_index_in_dim(out, x, (rank - step) % size, 0)
        x = permute(x, axis_name, size, 1) if step < size - 1 else x
    return out


def all_to_all(x: jax.Array, axis_name: str, size: int) -> jax.Array:
    """Among groups of neighbouring ranks, as many as x has blocks: block i goes to member i, and comes from it.

    Args:
        x: [members, ...].
        size: number of ranks, a multiple of the members.
    """
    check_axis(axis_name, size)
    members = x.shape[0]
    groups = [list(range(first, first + members)) for first in range(0, size, members)]
    if _alone():
        return lax.all_to_all(x, axis_name, 0, 0, axis_index_groups=groups)
    member, out = lax.axis_index(axis_name) % members, _like(x[0], members)
    for step in range(members):
        block = lax.dynamic_index_in_dim(x, (member + step) % members, 0, keepdims=False)
        if step:
            pairs = [(group[i], group[(i + step) % members]) for group in groups for i in range(members)]
            block = lax.ppermute(block, axis_name, pairs)
        out = lax.dynamic_update_index_in_dim(out, block, (member - step) % members, 0)
    return out


def go_round(work: Callable[[Any], tuple[Any, Any]], chunk: Any, axis_name: str, size: int, members: int) -> Any:
    """Passes every rank's chunk round a group of ranks, each of which adds something to a sum that travels with it.

    A group is the ranks at a distance of `size` / `members` and its multiples: several groups, interleaved.

    Args:
        work: chunk -> (what this rank adds to the chunk's sum, what it adds to a sum of its own).
        chunk: tree of arrays.
        size: number of ranks, a multiple of the members, which are at least two.

    Returns:
        The sum of this rank's chunk, and the rank's own.
    """

    def on(tree: Any) -> Any:
        return jax.tree.map(lambda x: permute(x, axis_name, size, size // members), tree)

    def hop(_: jax.Array, carry: Any) -> Any:
        chunk, total, own = carry
        # Both start before this hop's work, which hides them: that is why the sum sent is that of the hop before, and
        # why one chunk too many is sent (to leave it out costs a third copy of the work).
        arrived, following = on(total), chunk if members == 2 else on(chunk)
        made, mine = work(chunk)
        return following, jax.tree.map(jnp.add, arrived, made), jax.tree.map(jnp.add, own, mine)

    following = on(chunk)
    _, total, own = lax.fori_loop(1, members, hop, (following, *work(chunk)))
    return on(total), own


def _like(x: jax.Array, blocks: int) -> jax.Array:
    return vary_over(jnp.zeros((blocks, *x.shape), x.dtype), varying_axes(x))


def _alone() -> bool:
    mesh = jax.sharding.get_abstract_mesh()
    return math.prod(mesh.shape[axis] for axis in mesh.auto_axes) == 1
