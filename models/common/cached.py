"""Stacked layers that keep something of the tokens they have read, for decoding one token after another."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec as P

from cpjax.models.common.layers import Linear
from cpjax.models.common.sharding import constrain


def prefill_layers(
    layers: nnx.Module, hidden: jax.Array, apply: Callable[..., tuple[jax.Array, Any]], each: Any = ()
) -> tuple[jax.Array, Any]:
    """Applies the copies of `stack_layers` one after another, and stacks what each keeps.

    Under a mesh (`jax.set_mesh`) rows are split over all of its axes and the weights of a layer are gathered.

    Args:
        hidden: [B, ...].
        apply: (layer, hidden, *own) -> (hidden, kept), kept [B, ...].
        each: arrays whose first axis holds what each layer gets of its `own`.
    """
    graph, stacked = nnx.split(layers)

    def body(hidden: jax.Array, one: Any) -> tuple[jax.Array, Any]:
        params, own = one
        return split_rows(apply(nnx.merge(graph, constrain(params, P())), hidden, *own))

    return jax.lax.scan(body, split_rows(hidden), (stacked, each))


def decode_layers(
    layers: nnx.Module,
    hidden: jax.Array,
    kept: Any,
    apply: Callable[..., tuple[jax.Array, Any]],
    each: Any = (),
) -> tuple[jax.Array, Any]:
    """Applies the copies of `stack_layers` one after another, each of which changes its part of what is kept.

    All that is kept goes from layer to layer, so that XLA changes it in place: a cache as long as the context is not
    copied for every token. Under a mesh it stays split by rows, and matrices as they are, as the hidden states of one
    token are less to send: where these meet a matrix they are whole on every device. XLA would find no way of its own
    from rows to the parts of some matrices.

    Args:
        kept: as of `prefill_layers`, layers along the first axes.
        apply: (layer, hidden, kept, number of the layer, *own) -> (hidden, kept).
        each: as for `prefill_layers`.
    """
    graph, stacked = nnx.split(layers)
    count = len(jax.tree.leaves(stacked)[0])

    def body(carry: tuple[jax.Array, Any], layer: tuple[Any, jax.Array, Any]) -> tuple[tuple[jax.Array, Any], None]:
        params, number, own = layer
        one = nnx.merge(graph, params)
        for _, module in nnx.iter_modules(one):
            if isinstance(module, Linear):
                module.whole = True
        hidden, kept = apply(one, *carry, number, *own)
        return (hidden, split_rows(kept, 1)), None

    return jax.lax.scan(body, (hidden, kept), (stacked, jnp.arange(count), each))[0]


def split_rows(tree: Any, axis: int = 0) -> Any:
    """The arrays with their rows, along `axis`, split over all axes of the mesh, if there is one in context."""
    return constrain(tree, P(*[None] * axis, jax.sharding.get_abstract_mesh().axis_names))
