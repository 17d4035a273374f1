"""Over which manual mesh axes an array varies: what `shard_map` with check_vma=True keeps track of."""

from __future__ import annotations

from typing import Any

import jax


def varying_axes(x: Any) -> frozenset[Any]:
    """The manual mesh axes over which `x` varies."""
    return jax.typeof(x).manual_axis_type.varying


def vary_over(x: Any, axes: frozenset[Any]) -> Any:
    """`x`, marked as varying over `axes` too; loop carries created inside `shard_map` need it."""
    missing = axes - varying_axes(x)
    return jax.lax.pcast(x, tuple(missing), to="varying") if missing else x
