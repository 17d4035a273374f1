"""From one layout's order to another's by exchanging tokens between ranks, never by gathering the sequence."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from cpjax.shard.layout import Contiguous, Zigzag, invert
from cpjax.shard.sharder import Sharder, take


def convert(x: jax.Array, source: Sharder, target: Sharder, *, axis: int = 1) -> jax.Array:
    """This rank's tokens under `target`, from those under `source`; differentiable.

    For layers that want global order: `convert(x, sharder, sharder.contiguous())`, and back. Called like the verbs of
    the sharder, inside `shard_map`.

    Zigzag and contiguous: two `ppermute` of L / 2 tokens each, which is each token once. Every other pair, where the
    routes may depend on the batch: tokens go evenly to all ranks first, and from there to where they belong (Valiant's
    routing, doi:10.1137/0211027), which takes cp - 1 `ppermute` of ceil(L / cp) and cp - 1 of floor(L / cp) + cp - 1
    tokens, and of their int32 destinations, whatever the tables are. So a rank sends less than 2 L + cp^2 tokens; with
    a single exchange it would need room for L tokens to every other rank.

    Args:
        x: [..., L, ...] along `axis`.

    Returns:
        [..., L, ...].

    Raises:
        ValueError: sharders of other lengths, ranks or axis names, or an axis that is not L long.
    """
    for name in ("cp", "padded_length", "axis_name"):
        if getattr(source, name) != getattr(target, name):
            raise ValueError(
                f"convert was given sharders of {name} {getattr(source, name)} and {getattr(target, name)}: both must "
                "hold the same sequence on the same ranks"
            )
    source.check_local(x, axis, "convert")
    if source.cp == 1 or source is target or (source.table is None and source.layout == target.layout):
        return x
    if {type(source.layout), type(target.layout)} <= {Contiguous, Zigzag}:
        return x if type(source.layout) is type(target.layout) else _exchange_halves(x, source, target, axis % x.ndim)
    return _exchange_tokens(x, source, target, axis % x.ndim)


def _exchange_halves(x: jax.Array, source: Sharder, target: Sharder, axis: int) -> jax.Array:
    """Of 2 cp chunks every rank holds an even and an odd one under both layouts: a permutation of ranks for each."""
    cp, half = source.cp, source.local_length // 2
    chunks = [s.indices(np.arange(cp))[:, ::half] // half for s in (source, target)]  # [cp, 2] each
    parity_first = [jnp.asarray(np.argsort(numbers % 2, axis=1))[source.rank()] for numbers in chunks]
    owners = [invert(numbers, 2 * cp) // 2 for numbers in chunks]

    halves = x.reshape(*x.shape[:axis], 2, half, *x.shape[axis + 1 :])
    halves = jnp.take(halves, parity_first[0], axis=axis, mode="clip")  # the even chunk, the odd one
    received = [
        lax.ppermute(
            lax.index_in_dim(halves, parity, axis, keepdims=False),
            source.axis_name,
            [(int(owners[0][chunk]), int(owners[1][chunk])) for chunk in range(parity, 2 * cp, 2)],
        )
        for parity in (0, 1)
    ]
    # With two chunks the order of parities is its own inverse.
    return jnp.take(jnp.stack(received, axis), parity_first[1], axis=axis, mode="clip").reshape(x.shape)


def _exchange_tokens(x: jax.Array, source: Sharder, target: Sharder, axis: int) -> jax.Array:
    # Where tokens lie in the concatenation of the target's ranks: rank L + slot. It travels with them.
    inverse = jnp.asarray(target.inverse())
    if not (source.by_row or target.by_row):
        return _exchange_row(x, inverse[source.positions()], source, axis)
    inverse = jnp.broadcast_to(inverse, (x.shape[axis - 1], source.padded_length))
    destinations = take(inverse, source.positions(), 1)
    one_row = functools.partial(_exchange_row, source=source, axis=axis - 1)
    return jax.vmap(one_row, in_axes=(axis - 1, 0), out_axes=axis - 1)(x, destinations)


def _exchange_row(x: jax.Array, destination: jax.Array, source: Sharder, axis: int) -> jax.Array:
    cp, length, nowhere = source.cp, source.local_length, source.padded_length
    rank = source.rank()

    # In the order of destinations, token t goes to rank t + (this rank) first: of those meant for one rank, every
    # rank gets as many, or one more.
    first = -(-length // cp)
    order = jnp.argsort(destination).astype(jnp.int32)
    order = jnp.pad(order, (0, first * cp - length), constant_values=-1)
    order = order.reshape(first, cp).T.reshape(-1)
    destination = _send_blocks(jnp.where(order < 0, nowhere, destination[order]), source, 0)
    x = _send_blocks(jnp.take(x, jnp.maximum(order, 0), axis=axis), source, axis)

    # From each rank a came up to ceil(c_a / cp) of its c_a tokens for any one rank, and the c_a sum up to L.
    second = length // cp + cp - 1
    order = jnp.argsort(destination).astype(jnp.int32)
    destination = destination[order]
    begin = ((rank + jnp.arange(cp, dtype=jnp.int32)) % cp)[:, None] * length  # of the rank that each block goes to
    start = (destination < begin).sum(1, dtype=jnp.int32)[:, None]
    end = (destination < begin + length).sum(1, dtype=jnp.int32)[:, None]
    here = start + jnp.arange(second, dtype=jnp.int32)
    meant = here < end
    here = jnp.minimum(here, destination.size - 1)
    destination = _send_blocks(jnp.where(meant, destination[here], nowhere).reshape(-1), source, 0)
    x = _send_blocks(jnp.take(x, order[here].reshape(-1), axis=axis), source, axis)

    slots = jnp.where(destination < nowhere, destination - rank * length, -1)
    return jnp.take(x, invert(slots, length), axis=axis, mode="clip", unique_indices=True)


def _send_blocks(x: jax.Array, sharder: Sharder, axis: int) -> jax.Array:
    """Of cp blocks, block s goes to rank (this one + s), and arrives in its place.

    Made of `ppermute`, not `all_to_all`: the partitioner keeps rows that are sharded over other, automatic, mesh axes
    where they are for the former only.
    """
    cp = sharder.cp
    home, *away = jnp.split(x, cp, axis)
    sent = [
        lax.ppermute(block, sharder.axis_name, [(rank, (rank + step) % cp) for rank in range(cp)])
        for step, block in enumerate(away, 1)
    ]
    return jnp.concatenate([home, *sent], axis)
