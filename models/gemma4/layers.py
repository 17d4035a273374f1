"""What the text model and the towers of Gemma 4 share."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from cpjax.models.common.layers import Buffer, Linear, RMSNorm


def geglu(gate: jax.Array, up: jax.Array) -> jax.Array:
    """gelu(gate) * up, gelu by its tanh formula (arXiv 2002.05202)."""
    return jax.nn.gelu(gate) * up


def scaled_norm(features: int, eps: float, scale: float, *, dtype: Any) -> RMSNorm:
    """A norm whose weight starts at `scale`."""
    norm = RMSNorm(features, eps, dtype=dtype)
    norm.weight = nnx.Param(norm.weight[...] * jnp.asarray(scale, dtype))
    return norm


class ClippedLinear(Linear):
    """A `Linear` without bias whose inputs and outputs are cut to bounds that come with the weights, if `clipped`."""

    def __init__(self, in_features: int, out_features: int, *, clipped: bool, dtype: Any, rngs: nnx.Rngs):
        super().__init__(in_features, out_features, dtype=dtype, rngs=rngs)
        self.clipped = clipped
        if clipped:
            self.input_min, self.input_max = Buffer(jnp.asarray(-jnp.inf, dtype)), Buffer(jnp.asarray(jnp.inf, dtype))
            self.output_min, self.output_max = Buffer(jnp.asarray(-jnp.inf, dtype)), Buffer(jnp.asarray(jnp.inf, dtype))

    def __call__(self, x: jax.Array) -> jax.Array:
        """x [..., in] -> [..., out]."""
        if not self.clipped:
            return super().__call__(x)
        x = jnp.clip(x, self.input_min[...].astype(x.dtype), self.input_max[...].astype(x.dtype))
        return jnp.clip(super().__call__(x), self.output_min[...].astype(x.dtype), self.output_max[...].astype(x.dtype))
