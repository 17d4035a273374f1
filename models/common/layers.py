"""Small layers of many families. Each computes in the dtype of its input and keeps statistics in float32 or wider."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import PartitionSpec as P

from cpjax.models.common.sharding import constrain, gather_layer
from cpjax.shard import Sharder
from cpjax.varying import vary_over, varying_axes

Module = TypeVar("Module", bound=nnx.Module)
Hidden = TypeVar("Hidden")

Remat = Literal["none", "layer", "dots"]
"""What the backward pass of scanned layers computes anew: nothing, everything but the hidden state between them, or
everything but that and the products with weights."""


class Buffer(nnx.Variable):
    """An array that is saved with the model and never trained."""


class Linear(nnx.Module):
    """y = x @ kernel (+ bias), kernel [in, out], in the dtype of x.

    Initialised with standard deviation scale x in^-0.5, so that small models, too, start at unit scale; bias zero.

    Attributes:
        adapter: a module that is called with x, kernel and x @ kernel, and returns what stands for the product.
        whole: x and y are whole on each device of the mesh in context, however the kernel is split over it.
    """

    adapter: nnx.Module | None = None
    whole: bool = False

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        bias: bool = False,
        scale: float = 1.0,
        dtype: Any,
        rngs: nnx.Rngs,
    ):
        kernel = jax.random.normal(rngs.params(), (in_features, out_features), dtype) * (scale * in_features**-0.5)
        self.kernel = nnx.Param(kernel.astype(dtype))
        self.bias = nnx.Param(jnp.zeros(out_features, dtype)) if bias else None

    def __call__(self, x: jax.Array) -> jax.Array:
        """x [..., in] -> [..., out]."""
        kernel, x = self.kernel[...], constrain(x, P()) if self.whole else x
        y = x @ kernel.astype(x.dtype)
        if self.adapter is not None:
            y = self.adapter(x, kernel, y)
        y = y if self.bias is None else y + self.bias[...].astype(x.dtype)
        return constrain(y, P()) if self.whole else y


def rms_norm(x: jax.Array, eps: float) -> jax.Array:
    """x [..., features] over its root mean square, in float32 or wider."""
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    return wide * jax.lax.rsqrt(jnp.square(wide).mean(-1, keepdims=True) + eps)


class RMSNorm(nnx.Module):
    """Root mean square norm; the scale is the weight (one at the start), or 1 + weight (`zero_centered`, zero)."""

    def __init__(self, features: int, eps: float, *, zero_centered: bool = False, dtype: Any):
        self.weight = nnx.Param(jnp.full(features, 0 if zero_centered else 1, dtype))
        self.eps = eps
        self.zero_centered = zero_centered

    def __call__(self, x: jax.Array, gate: jax.Array | None = None) -> jax.Array:
        """x [..., features] -> the same shape, times silu(gate) if given."""
        wide = rms_norm(x, self.eps)
        weight = self.weight[...].astype(wide.dtype)
        wide = wide * (1 + weight if self.zero_centered else weight)
        if gate is not None:
            wide = wide * jax.nn.silu(gate.astype(wide.dtype))
        return wide.astype(x.dtype)


@jax.custom_jvp
def gelu(x: jax.Array) -> jax.Array:
    """x Phi(x) (arXiv 1606.08415). Its derivative is spelled out: that of JAX 0.12's erfc fails inside `shard_map`."""
    return jax.nn.gelu(x, approximate=False)


@gelu.defjvp
def _gelu_jvp(primals: tuple[jax.Array], tangents: tuple[jax.Array]) -> tuple[jax.Array, jax.Array]:
    (x,), (dx,) = primals, tangents
    density = jnp.exp(-0.5 * x * x) * (2 * np.pi) ** -0.5
    return gelu(x), dx * (0.5 * jax.lax.erfc(-x * 0.5**0.5) + x * density)


class LayerNorm(nnx.Module):
    """Layer norm with weight and bias."""

    def __init__(self, features: int, eps: float, *, dtype: Any):
        self.weight = nnx.Param(jnp.ones(features, dtype))
        self.bias = nnx.Param(jnp.zeros(features, dtype))
        self.eps = eps

    def __call__(self, x: jax.Array) -> jax.Array:
        """x [..., features] -> the same shape."""
        wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
        wide = wide - wide.mean(-1, keepdims=True)
        wide = wide * jax.lax.rsqrt(jnp.square(wide).mean(-1, keepdims=True) + self.eps)
        return (wide * self.weight[...].astype(wide.dtype) + self.bias[...].astype(wide.dtype)).astype(x.dtype)


def swiglu(gate: jax.Array, up: jax.Array) -> jax.Array:
    """silu(gate) * up (arXiv 2002.05202)."""
    return jax.nn.silu(gate) * up


class GatedMLP(nnx.Module):
    """down(activation(gate(x), up(x))); `scale` is that of the initial down projection."""

    def __init__(
        self,
        features: int,
        hidden: int,
        *,
        activation: Callable[[jax.Array, jax.Array], jax.Array] = swiglu,
        scale: float = 1.0,
        dtype: Any,
        rngs: nnx.Rngs,
    ):
        self.activation = activation
        self.gate_proj = Linear(features, hidden, dtype=dtype, rngs=rngs)
        self.up_proj = Linear(features, hidden, dtype=dtype, rngs=rngs)
        self.down_proj = Linear(hidden, features, scale=scale, dtype=dtype, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """x [..., features] -> the same shape."""
        return self.down_proj(self.activation(self.gate_proj(x), self.up_proj(x)))


def apply_rope(x: jax.Array, angles: jax.Array, scale: float = 1.0) -> jax.Array:
    """Rotates the pairs (i, i + R) of the first 2R features of every head; the others pass through.

    Args:
        x: [B, L, H, D].
        angles: [B, L, R], 2R <= D.
        scale: what the rotated features are multiplied by.
    """
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    cos, sin = jnp.cos(angles)[:, :, None].astype(wide.dtype), jnp.sin(angles)[:, :, None].astype(wide.dtype)
    if scale != 1:
        cos, sin = scale * cos, scale * sin
    half = angles.shape[-1]
    first, second, rest = wide[..., :half], wide[..., half : 2 * half], wide[..., 2 * half :]
    rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin, rest], axis=-1)
    return rotated.astype(x.dtype)


def stack_layers(create: Callable[[nnx.Rngs], Module], count: int, rngs: nnx.Rngs) -> Module:
    """One module whose parameters hold `count` independently initialised copies along a new first axis."""
    split = nnx.split_rngs(splits=count)
    layers: Any = split(nnx.vmap(create, axis_size=count))(rngs)
    layers.parts = ()  # (path, axis) of parameters of which this rank holds a part, see `sharding.assemble`
    return layers


def scan_layers(layers: Any, hidden: Hidden, *args: Any, each: Any = (), remat: Remat = "layer") -> Hidden:
    """Applies the copies of `stack_layers` one after another, `hidden = layer(hidden, *args, *own)`.

    Copies of a pattern of layers, its `slots`, are applied layer by layer: the pattern is told which, `slot=0` first.
    Compile time and the program's size do not grow with the number of copies; with `remat` "layer" the backward pass
    keeps only the hidden state between layers, which may be of several arrays.

    Args:
        args: the same for all.
        each: arrays whose first axis holds what each copy gets of its `own`.
    """
    graph, stacked = nnx.split(layers)
    axes = frozenset[Any]().union(*(varying_axes(leaf) for leaf in jax.tree.leaves((stacked, each))))
    hidden = jax.tree.map(lambda x: vary_over(x, axes), hidden)  # as what comes out, where a layer is split over ranks
    slots = range(len(layers.slots)) if hasattr(layers, "slots") else (None,)

    def apply(slot: int | None, hidden: Hidden, one: Any) -> Hidden:
        params, own = one
        layer = nnx.merge(graph, params)
        which = {} if slot is None else {"slot": slot}
        return layer(gather_layer(layer, hidden, slot), *args, *own, **which)

    if remat != "none":
        policy = jax.checkpoint_policies.dots_with_no_batch_dims_saveable if remat == "dots" else None
        apply = jax.checkpoint(apply, policy=policy, static_argnums=0)

    def body(hidden: Hidden, one: Any) -> tuple[Hidden, None]:
        for slot in slots:
            hidden = apply(slot, hidden, one)
        return hidden, None

    return jax.lax.scan(body, hidden, (stacked, each))[0]


def splice(hidden: jax.Array, features: jax.Array, index: jax.Array, sharder: Sharder) -> jax.Array:
    """Features [rows, N, E] in place of the tokens of hidden [B, T, E] whose `index` [B, T] is not -1."""
    if sharder.rows > 1:
        row = sharder.sources() // (sharder.length // sharder.rows)
        index = jnp.where(index < 0, -1, index + row * features.shape[1])
        features = features.reshape(len(index), -1, features.shape[2])
    index = index[..., None]
    spliced = jnp.take_along_axis(features, jnp.maximum(index, 0), axis=1, mode="clip")
    return jnp.where(index >= 0, spliced, hidden)
