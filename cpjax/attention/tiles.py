"""Cutting local tokens into tiles that do not straddle runs of consecutive positions, and back."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

MAX_TILE = 128
"""Longest tile. Matrix products like long ones; causal tiles on the diagonal waste half of their scores."""

MAX_SCORES = 1 << 24
"""Most scores in flight: tiles get shorter (but not below 64) where batch x heads x tile^2 exceeds it."""


@dataclasses.dataclass(frozen=True)
class Tiling:
    """Runs of `run` tokens, each cut into tiles of `length`; the last tile of a run may have empty slots.

    >>> Tiling.choose(1000, rows=8)
    Tiling(run=1000, length=128)
    """

    run: int
    length: int

    @classmethod
    def choose(cls, run: int, rows: int) -> Tiling:
        """The tiling for `rows` = batch x query heads."""
        longest = MAX_TILE
        while longest > 64 and rows * longest**2 > MAX_SCORES:
            longest //= 2
        tiles = -(-run // longest)
        length = -(-run // tiles)
        return cls(run, min(run, -(-length // 8) * 8))  # a multiple of 8 suits vector and tensor units

    @classmethod
    def power_of_two(cls, run: int, shortest: int, longest: int) -> Tiling:
        """The tiling for kernels that take tiles of a power of two only."""
        return cls(run, min(max(1 << (run - 1).bit_length(), shortest), longest))

    def cut(self, x: jax.Array, axis: int, fill: float | None = 0) -> jax.Array:
        """[.., L, ..] -> [n, .., t, ..]; empty slots hold `fill`, or (None) a copy of the run's last token."""
        before, after = x.shape[:axis], x.shape[axis + 1 :]
        x = x.reshape(*before, -1, self.run, *after)
        empty = -self.run % self.length
        if empty:
            widths = [(0, empty if a == axis + 1 else 0) for a in range(x.ndim)]
            x = jnp.pad(x, widths, mode="edge") if fill is None else jnp.pad(x, widths, constant_values=fill)
        return jnp.moveaxis(x.reshape(*before, -1, self.length, *after), axis, 0)

    def join(self, x: jax.Array, axis: int) -> jax.Array:
        """Inverse of `cut`."""
        x = jnp.moveaxis(x, 0, axis)
        before, after = x.shape[:axis], x.shape[axis + 2 :]
        x = x.reshape(*before, -1, self.run + -self.run % self.length, *after)
        x = jax.lax.slice_in_dim(x, 0, self.run, axis=axis + 1)
        return x.reshape(*before, -1, *after)

    def queries(self, x: jax.Array, kv_heads: int) -> jax.Array:
        """[B, L, H, D] -> [n, B, K, G, t, D]."""
        x = self.cut(x, 1)
        return x.reshape(*x.shape[:3], kv_heads, -1, x.shape[-1]).transpose(0, 1, 3, 4, 2, 5)

    def from_queries(self, x: jax.Array) -> jax.Array:
        """Inverse of `queries`."""
        x = x.transpose(0, 1, 4, 2, 3, 5)
        return self.join(x.reshape(*x.shape[:3], -1, x.shape[-1]), 1)

    def keys(self, x: jax.Array) -> jax.Array:
        """[B, L, K, D] -> [n, B, K, t, D]."""
        return self.cut(x, 1).swapaxes(2, 3)
