"""The sharder: a layout with the lengths it was captured for, and the verbs that move tensors through it."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from cpjax.shard.layout import Layout


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=[],
    meta_fields=["layout", "length", "padded_length", "axis_name"],
)
@dataclasses.dataclass(frozen=True)
class Sharder:
    """Moves tensors between the caller's sequence and this rank's part of it.

    The verbs are called inside the body of a `jax.shard_map` that is manual over `axis_name`; with cp = 1 they
    need no mesh. All fields are static, so a new length is a new trace, never a silent mis-shard.

    Attributes:
        layout: who owns which token.
        length: S, the caller's length.
        padded_length: T >= S, a multiple of `layout.divisor`.
        axis_name: mesh axis of the cp ranks.
    """

    layout: Layout
    length: int
    padded_length: int
    axis_name: str = "cp"

    def __post_init__(self) -> None:
        self.layout.indices(self.padded_length, 0)  # raises when T is not divisible
        if not 1 <= self.length <= self.padded_length:
            raise ValueError(
                f"length {self.length} does not fit the padded length {self.padded_length}: it must be 1 .. that"
            )

    @property
    def cp(self) -> int:
        return self.layout.cp

    @property
    def local_length(self) -> int:
        """L = T / cp."""
        return self.padded_length // self.cp

    def rank(self) -> Any:
        """This rank's number: traced inside `shard_map`, 0 when cp = 1."""
        return jax.lax.axis_index(self.axis_name) if self.cp > 1 else 0

    def indices(self, rank: Any) -> Any:
        """int32 [..., L]: global position of each token of `rank` (an int, numpy ranks, or traced)."""
        return self.layout.indices(self.padded_length, rank)

    def positions(self) -> jax.Array:
        """int32 [L]: global position of each of this rank's tokens."""
        return jnp.asarray(self.layout.indices(self.padded_length, self.rank()))

    def take_local(self, x: jax.Array, axis: int = 1) -> jax.Array:
        """This rank's tokens of a full-length tensor; differentiable.

        The transpose scatters each rank's cotangent to its own positions; `shard_map` sums these over ranks for an
        input that is the same on all of them, so embeddings and towers receive the dense gradient.

        Args:
            x: [..., T, ...], the padded length along `axis`.

        Returns:
            [..., L, ...].

        Raises:
            ValueError: the axis is not T long.
        """
        self._check(x, axis, (self.padded_length,), "take_local", "pad it with make_batch, or use shard(x, fill=...)")
        if self.cp == 1:
            return x
        return jnp.take(x, self.positions(), axis=axis, mode="clip", unique_indices=True, indices_are_sorted=True)

    def shard(self, x: jax.Array, *, fill: Any = None, axis: int = 1) -> jax.Array:
        """This rank's tokens of a tensor in the caller's coordinates.

        Args:
            x: [..., S, ...] or [..., T, ...] along `axis`.
            fill: value of the T - S pad tokens; required when x is S long and S < T.

        Returns:
            [..., L, ...].

        Raises:
            ValueError: any other length, or padding is needed and `fill` was not given.
        """
        self._check(x, axis, (self.length, self.padded_length), "shard", "give the tensor in one of these lengths")
        missing = self.padded_length - x.shape[axis]
        if missing:
            if fill is None:
                raise ValueError(
                    f"shard was given {x.shape[axis]} tokens and must pad them to {self.padded_length}: say with which "
                    "value, fill=..."
                )
            widths = [(0, 0)] * x.ndim
            widths[axis] = (0, missing)
            x = jnp.pad(x, widths, constant_values=fill)
        return self.take_local(x, axis)

    def gather(self, x: jax.Array, *, axis: int = 1, trim: bool = True) -> jax.Array:
        """All ranks' tokens in global order; differentiable.

        Every rank gets the full tensor. The gradient is the SUM over the ranks that consume it: a loss computed
        alike on all ranks from the gathered tensor, and not averaged over them, yields cp times the gradient of one.

        Args:
            x: [..., L, ...] along `axis`.
            trim: drop the pads, so that the result is S long instead of T.

        Raises:
            ValueError: the axis is not L long.
        """
        self._check(x, axis, (self.local_length,), "gather", "give this rank's own tokens")
        if self.cp > 1:
            x = jax.lax.all_gather(x, self.axis_name, axis=axis % x.ndim, tiled=True)
            x = jnp.take(x, self.layout.inverse(self.padded_length), axis=axis, mode="clip", unique_indices=True)
        return jax.lax.slice_in_dim(x, 0, self.length, axis=axis) if trim else x

    def _check(self, x: Any, axis: int, lengths: tuple[int, ...], verb: str, hint: str) -> None:
        shape = np.shape(x)
        if not -len(shape) <= axis < len(shape):
            raise ValueError(f"{verb} was given shape {shape}, which has no axis {axis}: name the token axis, axis=...")
        if shape[axis] not in lengths:
            wanted = " or ".join(str(n) for n in dict.fromkeys(lengths))
            raise ValueError(
                f"{verb} was given {shape[axis]} tokens on axis {axis} of shape {shape}, but {self.layout} over "
                f"S={self.length}, T={self.padded_length} needs {wanted}: {hint}"
            )


def make_sharder(length: int, layout: Layout, axis_name: str = "cp") -> Sharder:
    """A sharder for sequences of `length` tokens, padded to the smallest length the layout can split."""
    return Sharder(layout, length, layout.pad_length(length), axis_name)
