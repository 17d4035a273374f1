"""Where parameters live, and how the parts come together where they are used.

Every large array is split over the mesh axes fsdp and cp, projections over tp as well. The axes fsdp and tp are the
compiler's business; the axis cp is manual in a model's forward pass, so `assemble` gathers there: layer by layer in a
stack of layers, whose gradients are then added and split over the ranks layer by layer as well, and at once outside of
stacks.

Over tp, what leads into heads and hidden features is split by its outputs, and what leads out of them by its inputs, so
that each rank computes some heads and features, and the ranks' sums are added (arXiv 1909.08053). Token embeddings,
head, norms and biases are not split over it.

Over cp, kernels of experts are split by experts. With expert parallelism (see `cpjax.models.common.experts`) a rank
gathers a part of them only, those of its neighbours: a checkpoint is the same whatever ep is.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

import jax
import numpy as np
from flax import nnx
from jax import lax
from jax.experimental import multihost_utils
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from cpjax.mesh import ROW_AXES, splitting_axes

Hidden = TypeVar("Hidden")
"""Hidden states [B, L, E], or a tree of them and of sums."""

SMALLEST = 1 << 12
"""Numbers of a layer below which an array is whole on every rank: it costs more to gather than to hold."""

_TABLES = re.compile(r"(embed_tokens|pos_embed)$")
"""Tables to look things up in are split by columns: XLA's partitioner crashes on some other look-ups."""


_COLUMNS = re.compile(r"(\.[qkv]_proj|\.qkv|\.gate_proj|\.up_proj|\.in_proj_\w+|\.linear_fc1)\.(kernel|adapter\.b)$")
"""Matrices of a layer whose outputs are heads or hidden features."""

_ROWS = re.compile(r"(\.o_proj|\.out_proj|\.proj|\.down_proj|\.linear_fc2)\.(kernel|adapter\.a)$")
"""Matrices of a layer whose inputs are heads or hidden features."""

_EXPERTS = re.compile(r"\.experts\.(gate|up|down)_proj$")
"""Kernels of experts, [layers, E, in, out]."""

_COUNTS = re.compile(r"(^|\.)(num|n_routed)_experts$")
"""Their number in a family's configuration."""

_HEADS = re.compile(r"(heads|intermediate_size)$")
"""Sizes in a family's configuration that tp splits."""


def check_tp(config: Any, tp: int, model: str) -> None:
    """Whether the projections of a model can be split over tp.

    Args:
        config: a family's configuration, a dataclass.
        model: which one, in words.

    Raises:
        ValueError: a number of heads or hidden features that tp does not divide.
    """
    for name, value in _fields(config).items():
        if _HEADS.search(name) and (value or 0) % tp:  # some may be None
            raise ValueError(
                f"tp is {tp}, but {model} has {name} {value}: tp must divide every number of heads and hidden "
                "features, so lower it and raise fsdp or cp instead"
            )


def check_ep(config: Any, ep: int, cp: int, model: str) -> None:
    """Whether the experts of a model can be split into ep parts, over cp ranks.

    Args:
        config: a family's configuration, a dataclass.
        ep: a divisor of cp.
        model: which one, in words.

    Raises:
        ValueError: ep is more than 1, and there are no experts, or cp does not divide their number.
    """
    if ep == 1:
        return
    counts = {name: value for name, value in _fields(config).items() if _COUNTS.search(name) and value}
    if not counts:
        raise ValueError(f"ep is {ep}, but {model} has no experts to split: leave ep at 1")
    for name, value in counts.items():
        if value % cp:
            raise ValueError(
                f"ep is {ep}, but {model} has {name} {value}, which cp, {cp}, does not divide: every rank of cp stores "
                "as many experts, so change cp, or leave ep at 1"
            )


def _fields(config: Any) -> dict[str, Any]:
    """All fields of a configuration by dotted name, but for what was read from disk."""
    found: dict[str, Any] = {}

    def collect(values: Mapping[str, Any], prefix: str) -> None:
        for name, value in values.items():
            if isinstance(value, Mapping):
                collect(value, f"{prefix}{name}.")
            else:
                found[prefix + name] = value

    collect({name: value for name, value in dataclasses.asdict(config).items() if name != "source"}, "")
    return found


def parameter_sharding(mesh: Mesh | AbstractMesh, shape: Sequence[int], name: str = "") -> NamedSharding:
    """Where a parameter, or what an optimizer keeps of it, lives.

    Over tp the axis of heads or hidden features is split; over cp that of experts, otherwise the largest axis that it
    divides, but not the first, which may be that of the layers; over fsdp the largest of the others.

    Args:
        name: dotted path.
    """
    spec: list[tuple[str, ...]] = [()] * len(shape)
    left = list(shape)

    def split(axis_name: str, axes: Sequence[int]) -> None:
        size = mesh.shape.get(axis_name, 1)
        axes = [axis for axis in axes if left[axis] >= size and left[axis] % size == 0]
        if size > 1 and axes:
            axis = max(axes, key=lambda axis: (not spec[axis], left[axis]))
            spec[axis] = (axis_name, *spec[axis]) if axis_name == "cp" else (*spec[axis], axis_name)
            left[axis] //= size

    table = _TABLES.search(name)
    if _COLUMNS.search(name):
        split("tp", range(len(shape) - 1, len(shape)))
    elif _ROWS.search(name):
        split("tp", range(len(shape) - 2, len(shape) - 1))
    if len(shape) == 4 and _EXPERTS.search(name) and shape[1] % mesh.shape.get("cp", 1) == 0:
        split("cp", [1])  # however small: ranks may share them
    elif len(shape) > 1 and math.prod(shape[1:] if len(shape) > 2 else shape) >= SMALLEST:
        split("cp", range(1, len(shape)))  # the outermost of those that share an axis: cp is manual
    split("fsdp", range(1 if table else 0, len(shape)))
    return NamedSharding(mesh, PartitionSpec(*(names or None for names in spec)))


def cp_axes(mesh: Mesh, arrays: Mapping[str, Any]) -> dict[str, int]:
    """By dotted path, the axis that `parameter_sharding` splits over cp, where it does."""
    specs = {name: parameter_sharding(mesh, array.shape, name).spec for name, array in arrays.items()}
    return {name: axis for name, spec in specs.items() for axis, split in enumerate(spec) if split and "cp" in split}


def tree_shardings(mesh: Mesh, tree: Any) -> Any:
    """`parameter_sharding` of the leaves of a tree whose innermost string keys are dotted paths."""

    def sharding(path: Any, leaf: Any) -> NamedSharding:
        names = [key.key for key in path if isinstance(key, jax.tree_util.DictKey) and isinstance(key.key, str)]
        return parameter_sharding(mesh, leaf.shape, names[-1] if names else "")

    return jax.tree_util.tree_map_with_path(sharding, tree)


def put(array: Any, sharding: NamedSharding) -> jax.Array:
    """Places an array that every process holds whole, each on its own devices; one on all of them may move."""
    if sharding.is_fully_addressable or (isinstance(array, jax.Array) and not array.is_fully_addressable):
        return jax.device_put(array, sharding)
    whole = np.asarray(array)
    return jax.make_array_from_callback(whole.shape, sharding, whole.__getitem__)


def to_host(array: Any) -> np.ndarray:
    """All of an array, which every process must ask for if it is split over them."""
    if isinstance(array, jax.Array) and not (array.is_fully_addressable or array.is_fully_replicated):
        return multihost_utils.process_allgather(array, tiled=True)
    return np.asarray(array)


def cp_specs(names: Iterable[str], axes: Mapping[str, int]) -> dict[str, PartitionSpec]:
    """How arrays enter `shard_map`: those with an axis in parts."""
    return {name: PartitionSpec(*[None] * axes[name], "cp") if name in axes else PartitionSpec() for name in names}


def assemble(model: nnx.Module, axes: Mapping[str, int]) -> None:
    """Makes a model that holds this rank's parts of its parameters work inside `shard_map`.

    Parameters outside of stacks are gathered here; `scan_layers` gathers those of a stack, one layer at a time.

    Args:
        axes: the axis over which each parameter is split, by dotted path; the others are whole.
    """
    stacks = {".".join(map(str, path)): module for path, module in nnx.iter_modules(model) if hasattr(module, "parts")}
    parts: dict[str, list[tuple[str, int]]] = {prefix: [] for prefix in stacks}
    for name, axis in axes.items():
        prefix = next((prefix for prefix in stacks if name.startswith(prefix + ".")), None)
        if prefix is not None:
            parts[prefix].append((name[len(prefix) + 1 :], axis - 1))
        else:
            _gather(model, name, axis)
    _gather_automatic(model, list(stacks))
    for prefix, module in stacks.items():
        module.parts = tuple(parts[prefix])


def gather_layer(layer: Any, hidden: Hidden, slot: int | None = None) -> Hidden:
    """Gathers the parameters of one layer, and splits the hidden states [B, L, E] that enter it by rows.

    Args:
        slot: which layer, of a pattern of them.
    """
    prefix = "" if slot is None else f"slots.{slot}."
    for name, axis in layer.parts:
        if name.startswith(prefix):
            _gather(layer, name, axis)
    _gather_automatic(layer if slot is None else layer.slots[slot])
    if not _automatic_axes():
        return hidden

    def split(x: jax.Array) -> jax.Array:  # other arrays that go through the layers are sums over tokens
        return lax.with_sharding_constraint(x, PartitionSpec(splitting_axes(ROW_AXES, len(x)))) if x.ndim == 3 else x

    return jax.tree.map(split, hidden)


def _gather_automatic(model: nnx.Module, stacks: Sequence[str] = ()) -> None:
    """Gathers the parameters outside of stacks over the automatic axes but tp.

    Else the compiler may gather hidden states instead, and split what is computed of them by features; and it crashes
    on some look-ups in tables that are split.
    """
    if not (automatic := _automatic_axes()):
        return
    tp, state = AbstractMesh((automatic.get("tp", 1),), ("tp",)), nnx.state(model)
    for path, variable in nnx.to_flat_state(state):
        name, array = ".".join(map(str, ("", *path))), variable.get_value()
        if not any(name.startswith(f".{prefix}.") for prefix in stacks):
            variable.set_value(lax.with_sharding_constraint(array, parameter_sharding(tp, array.shape, name).spec))
    nnx.update(model, state)


def _automatic_axes() -> dict[str, int]:
    """Those of the mesh in context that split something."""
    mesh = jax.sharding.get_abstract_mesh()
    return {name: mesh.shape[name] for name in mesh.auto_axes if mesh.shape[name] > 1}


def _gather(model: Any, name: str, axis: int) -> None:
    *parents, last = name.split(".")
    for part in parents:
        model = model[int(part)] if part.isdigit() else getattr(model, part)
    variable, size = getattr(model, last), lax.axis_size("cp")
    ranks = size // getattr(model, "ep", 1)  # neighbours, which share their experts
    if ranks > 1:
        groups = [list(range(first, first + ranks)) for first in range(0, size, ranks)] if ranks < size else None
        whole = lax.all_gather(variable.get_value(), "cp", axis=axis, tiled=True, axis_index_groups=groups)
        variable.set_value(whole)


def constrain(tree: Any, spec: PartitionSpec) -> Any:
    """The arrays laid out like this on the mesh, if there is one in context."""
    if jax.sharding.get_abstract_mesh().empty:
        return tree
    return jax.tree.map(lambda x: lax.with_sharding_constraint(x, spec), tree)
