"""Loss scaling for float16, whose smallest number is 6e-8: gradients below it would be lost."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp

START = 2.0**15
PERIOD = 2000


@functools.partial(jax.tree_util.register_dataclass, data_fields=["scale", "good_steps"], meta_fields=[])
@dataclasses.dataclass(frozen=True)
class LossScale:
    """The factor of the loss (arXiv 1710.03740): halved when gradients overflow, doubled after 2,000 good steps.

    It is a power of two, so that scaling and unscaling round nothing.

    Attributes:
        scale: float32 scalar, at least 1.
        good_steps: int32 scalar, finite steps since the scale last changed.
    """

    scale: jax.Array
    good_steps: jax.Array

    @classmethod
    def start(cls) -> LossScale:
        """The scale of the first step, which may be too large: the first steps are skipped then."""
        return cls(jnp.float32(START), jnp.int32(0))

    def after(self, finite: jax.Array) -> LossScale:
        """The scale for the next step, by whether the gradients of this one were finite."""
        grow = self.good_steps + 1 >= PERIOD
        scale = jnp.where(grow, 2 * self.scale, self.scale)
        scale = jnp.where(finite & jnp.isfinite(scale), scale, jnp.maximum(self.scale / 2, 1))
        return LossScale(scale, jnp.where(finite & ~grow, self.good_steps + 1, 0))
