"""Stacked layers that keep something of the tokens they have read, for decoding one token after another."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx


def prefill_layers(
    layers: nnx.Module, hidden: jax.Array, apply: Callable[[Any, jax.Array], tuple[jax.Array, Any]]
) -> tuple[jax.Array, Any]:
    """Applies the copies of `stack_layers` one after another, and stacks what each keeps.

    Args:
        apply: (layer, hidden) -> (hidden, kept).
    """
    graph, stacked = nnx.split(layers)
    return jax.lax.scan(lambda hidden, params: apply(nnx.merge(graph, params), hidden), hidden, stacked)


def decode_layers(
    layers: nnx.Module,
    hidden: jax.Array,
    kept: Any,
    apply: Callable[[Any, jax.Array, Any, jax.Array], tuple[jax.Array, Any]],
) -> tuple[jax.Array, Any]:
    """Applies the copies of `stack_layers` one after another, each of which changes its part of what is kept.

    All that is kept goes from layer to layer, so that XLA changes it in place: a cache as long as the context is not
    copied for every token.

    Args:
        kept: as of `prefill_layers`, layers along the first axes.
        apply: (layer, hidden, kept, number of the layer) -> (hidden, kept).
    """
    graph, stacked = nnx.split(layers)
    count = len(jax.tree.leaves(stacked)[0])

    def body(carry: tuple[jax.Array, Any], layer: tuple[Any, jax.Array]) -> tuple[tuple[jax.Array, Any], None]:
        params, number = layer
        return apply(nnx.merge(graph, params), *carry, number), None

    return jax.lax.scan(body, (hidden, kept), (stacked, jnp.arange(count)))[0]
