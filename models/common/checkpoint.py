"""Hugging Face folders: config.json and safetensors, streamed into and out of a model through one table of names."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import os
import pathlib
import re
import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from cpjax.models.common.layers import Buffer
from cpjax.models.common.sharding import parameter_sharding, to_host

CONFIG, SINGLE, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
COMPANIONS = (
    "tokenizer.json", "tokenizer_config.json", "tokenizer.model", "special_tokens_map.json", "added_tokens.json",
    "vocab.json", "merges.txt", "chat_template.jinja", "chat_template.json", "preprocessor_config.json",
    "video_preprocessor_config.json", "processor_config.json", "generation_config.json",
)  # fmt: skip
"""What lies beside the weights in a folder: tokenizer, chat template, processors."""

DTYPES = {"F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": jnp.bfloat16}
"""Numbers that can be read, by their name in a safetensors file."""


@dataclasses.dataclass(frozen=True)
class Weight:
    """A parameter and the tensors on disk that hold it: one line of a family's table.

    Attributes:
        path: dotted path of the parameter in the model's state.
        names: tensor on disk, or one for each entry of a stacked parameter.
        stacked: over how many first axes `names` run, the last of them fastest: layers, or layers and experts.
        transpose: the tensor on disk is [.., out, in], ours [.., in, out].
        disk_shape: shape on disk where it is not just that, e.g. a convolution that we keep as a matrix.
        part: (i, n), the i-th of n equal parts of the tensor on disk, cut along its last axis but one (a vector's only
            one). The parts follow each other in the table.
        order: our i-th output is number order[i] of the tensor on disk, whose first axis runs over outputs; () is as
            they are.
        wide: what reads the parameter computes in float32 or wider: it is never made narrower than it is on disk.
    """

    path: str
    names: tuple[str, ...]
    stacked: int = 0
    transpose: bool = False
    disk_shape: tuple[int, ...] | None = None
    part: tuple[int, int] = (0, 1)
    order: tuple[int, ...] = ()
    wide: bool = False

    def shape_on_disk(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Shape of each tensor on disk, for a parameter of the given shape."""
        own = list(shape[self.stacked :])
        if self.disk_shape is not None:
            return self.disk_shape
        if self.transpose:
            own[-2:] = own[-1], own[-2]
        if self.part != (0, 1):
            own[_outputs(own)] *= self.part[1]
        return tuple(own)

    def to_disk(self, value: Any) -> Iterator[tuple[str, Any]]:
        """Name and tensor of each entry of the parameter."""
        for i, name in enumerate(self.names):
            own = value[np.unravel_index(i, value.shape[: self.stacked])] if self.stacked else value
            own = own.swapaxes(-1, -2) if self.transpose else own
            own = own[np.argsort(self.order)] if self.order else own
            yield name, own if self.disk_shape is None else own.reshape(self.disk_shape)

    def from_disk(self, tensors: Sequence[np.ndarray], shape: Sequence[int]) -> np.ndarray:
        """The parameter of this shape, from all of its tensors."""
        own = tuple(shape[self.stacked :])
        disk = (*own[:-2], own[-1], own[-2]) if self.transpose else own
        if self.part != (0, 1):
            tensors = [np.split(tensor, self.part[1], _outputs(tensor.shape))[self.part[0]] for tensor in tensors]
        parts = [(tensor[np.asarray(self.order)] if self.order else tensor).reshape(disk) for tensor in tensors]
        parts = [part.swapaxes(-1, -2) if self.transpose else part for part in parts]
        return np.stack(parts).reshape(shape)


def _outputs(shape: Sequence[Any]) -> int:
    """The axis of a tensor on disk that runs over outputs."""
    return -2 if len(shape) > 1 else -1


def leaves_by_path(tree: Any) -> dict[str, Any]:
    """The leaves of a parameter-shaped tree (a module, its state, or dicts of arrays) by dotted path."""
    if isinstance(tree, nnx.Module):
        tree = nnx.state(tree, nnx.Any(nnx.Param, Buffer))
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    # A state's variables add an attribute key, which is no part of the path.
    return {".".join(str(key.key) for key in path if hasattr(key, "key")): leaf for path, leaf in leaves}


def named_tensors(weights: Sequence[Weight], tree: Any) -> Iterator[tuple[str, Any]]:
    """The tensors on disk that correspond to the leaves of a parameter-shaped tree, one after another.

    Raises:
        ValueError: the tree has a leaf that the table does not.
    """
    leaves, parts = leaves_by_path(tree), list[Iterator[tuple[str, Any]]]()
    for weight in weights:
        if weight.path in leaves:
            parts.append(weight.to_disk(leaves.pop(weight.path)))
            if len(parts) == weight.part[1]:
                for entry in zip(*parts, strict=True):
                    tensors = [tensor for _, tensor in entry]
                    yield (
                        entry[0][0],
                        tensors[0] if len(tensors) == 1 else jnp.concatenate(tensors, axis=_outputs(tensors[0].shape)),
                    )
                parts = []
    if leaves:
        raise ValueError(f"the tree has {next(iter(leaves))!r}, which is no parameter of this model: pass its own tree")


class Folder:
    """The tensors of a folder, read lazily: nothing but headers until a slice is asked for."""

    def __init__(self, path: pathlib.Path, stack: contextlib.ExitStack):
        """Opens all files; they close with `stack`.

        Raises:
            ValueError: no weights, a shard that the index names is missing, or a file that is empty or truncated.
        """
        self.path = path
        if (path / INDEX).exists():
            index = read_json(path / INDEX).get("weight_map")
            if not isinstance(index, dict) or not all(isinstance(file, str) for file in index.values()):
                raise ValueError(f"{path / INDEX} has no weight_map of file names: copy or download it again")
            files = sorted(set(index.values()))
        elif (path / SINGLE).exists():
            files = [SINGLE]
        else:
            raise ValueError(f"{path} has neither {SINGLE} nor {INDEX}: give the folder of a Hugging Face checkpoint")
        self._files: dict[str, Any] = {}
        for file in files:
            if not (path / file).exists():
                raise ValueError(f"{INDEX} names {file}, which is not in {path}: copy the missing shard there")
            try:
                opened = stack.enter_context(safe_open(path / file, framework="np"))
            except SafetensorError as error:
                raise ValueError(
                    f"{path / file} is not a complete safetensors file ({error}): copy or download it again"
                ) from None
            self._files.update(dict.fromkeys(opened.keys(), opened))

    @property
    def names(self) -> set[str]:
        """Names of all tensors."""
        return set(self._files)

    def tensor(self, name: str) -> Any:
        """A lazily read tensor: `get_shape()`, `get_dtype()` and slicing."""
        return self._files[name].get_slice(name)


def tensor_names(path: pathlib.Path) -> set[str]:
    """Names of all tensors in a folder.

    Raises:
        ValueError: see `Folder`.
    """
    with contextlib.ExitStack() as stack:
        return Folder(path, stack).names


def read_json(path: pathlib.Path) -> dict[str, Any]:
    """The object in a JSON file.

    Raises:
        ValueError: no such file, or it does not hold a JSON object.
    """
    try:
        value = json.loads(path.read_text())
    except FileNotFoundError:
        raise ValueError(f"{path.parent} has no {path.name}: give the folder of a Hugging Face checkpoint") from None
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"{path} is not valid JSON ({error}): copy or download it again") from None
    if not isinstance(value, dict):
        raise ValueError(f"{path} holds {type(value).__name__}, not a JSON object: copy or download it again")
    return value


def load(
    abstract: nnx.Module,
    tables: Sequence[Sequence[Weight]],
    path: pathlib.Path,
    *,
    mesh: Mesh | None,
    dtype: Any,
    dropped: str,
) -> Any:
    """Fills an abstract model (`nnx.eval_shape`) from a folder.

    Each device's part of each parameter is read and placed by itself: the host never holds more than one parameter,
    and with several hosts each reads only what its devices need.

    Args:
        tables: the family's; for each parameter counts the first whose tensors are all there, or else the first.
        path: the folder.
        mesh: places parameters by `parameter_sharding`; None: the default device.
        dtype: of the parameters, but for those that are `wide`; None: each as on disk.
        dropped: regular expression of tensors that are ignored on purpose; other unknown ones give a warning.

    Raises:
        ValueError: see `Folder`; a tensor is missing, of another shape, or of a dtype that is no float.
    """
    graph, state = nnx.split(abstract)
    shapes = {name: leaf.shape for name, leaf in leaves_by_path(state).items()}
    with contextlib.ExitStack() as stack:
        folder = Folder(path, stack)
        names = folder.names
        layouts = [{weight.path: weight for weight in table} for table in tables]
        weights = [
            next((layout[path] for layout in layouts if names.issuperset(layout[path].names)), weight)
            for path, weight in layouts[0].items()
        ]
        _check(folder, weights, shapes)
        values = {}
        for weight in weights:
            shape = shapes[weight.path]
            target = jnp.result_type(*(DTYPES[folder.tensor(name).get_dtype()] for name in weight.names))
            if dtype is not None:
                target = jnp.promote_types(target, dtype) if weight.wide else dtype
            read = functools.partial(_read, folder, weight, shape, target)
            if mesh is None:
                values[weight.path] = jnp.asarray(read((slice(None),) * len(shape)))
            else:
                values[weight.path] = jax.make_array_from_callback(
                    shape, parameter_sharding(mesh, shape, weight.path), read
                )
    extra = sorted(n for n in folder.names.difference(*(w.names for w in weights)) if not re.match(dropped, n))
    if extra:
        more = f" and {len(extra) - 1} more" if len(extra) > 1 else ""
        warnings.warn(f"{path} holds tensors that this model does not have: {extra[0]}{more}", stacklevel=3)
    return nnx.merge(graph, jax.tree.unflatten(jax.tree.structure(state), [values[name] for name in shapes]))


def _check(folder: Folder, weights: Sequence[Weight], shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Everything that can be wrong with the tensors, before any is read."""
    needed = {name: weight.shape_on_disk(shapes[weight.path]) for weight in weights for name in weight.names}
    missing = [(name, shape) for name, shape in needed.items() if name not in folder.names]
    if missing:
        more = f" ({len(missing) - 1} more are missing)" if len(missing) > 1 else ""
        raise ValueError(f"{folder.path} lacks the tensor {missing[0][0]}, needed with shape {missing[0][1]}{more}")
    for name, shape in needed.items():
        found = tuple(folder.tensor(name).get_shape())
        if found != shape:
            raise ValueError(f"{name} in {folder.path} has shape {found}, but config.json needs {shape}")
        if (kind := folder.tensor(name).get_dtype()) not in DTYPES:
            raise ValueError(f"{name} in {folder.path} is of type {kind}: only {', '.join(DTYPES)} can be read")


def _read(folder: Folder, weight: Weight, shape: Sequence[int], dtype: Any, index: tuple[slice, ...]) -> np.ndarray:
    """The part of a parameter that `index` selects."""
    own_shape, own_index = shape[weight.stacked :], index[weight.stacked :]

    def entry(name: str) -> np.ndarray:
        tensor = folder.tensor(name)
        if weight.disk_shape is not None or weight.order:
            value = tensor[:].reshape(own_shape[::-1] if weight.transpose else own_shape)
            value = value[np.asarray(weight.order)] if weight.order else value
            return (value.T if weight.transpose else value)[own_index]
        cut = [slice(*own.indices(size)[:2]) for own, size in zip(own_index, own_shape, strict=True)]
        if weight.transpose:
            cut[-2:] = cut[-1], cut[-2]
        if weight.part[0]:
            axis = _outputs(cut)
            first = weight.part[0] * own_shape[-1 if weight.transpose else axis]
            cut[axis] = slice(first + cut[axis].start, first + cut[axis].stop)
        value = tensor[tuple(cut)]
        return value.swapaxes(-1, -2) if weight.transpose else value

    if not weight.stacked:
        return entry(weight.names[0]).astype(dtype)
    names = np.reshape(weight.names, shape[: weight.stacked])[index[: weight.stacked]]
    entries = [entry(str(name)) for name in names.flat]
    return np.stack(entries).reshape(*names.shape, *entries[0].shape).astype(dtype)


def save(
    weights: Sequence[Weight],
    model: nnx.Module,
    config: Mapping[str, Any],
    path: pathlib.Path,
    max_shard_bytes: int,
    companions: pathlib.Path | None = None,
) -> None:
    """Writes config.json and the weights, in one file or in shards with an index, and copies companions if given.

    The folder appears whole or not at all: it is written beside its place under another name, then renamed.

    Of several processes, all of which must call this, the first one writes.

    Raises:
        ValueError: `path` is a file, or a folder that holds anything but an earlier export.
    """
    if jax.process_index() > 0:
        for _, tensor in named_tensors(weights, model):
            to_host(tensor)
        return
    with new_folder(path, _is_export) as new:
        (new / CONFIG).write_text(json.dumps(config, indent=2) + "\n")
        _write(named_tensors(weights, model), new, max_shard_bytes)
        for file in [companions / name for name in COMPANIONS] if companions else []:
            if file.is_file():
                shutil.copyfile(file, new / file.name)


@contextlib.contextmanager
def new_folder(path: pathlib.Path, is_own: Callable[[str], bool]) -> Iterator[pathlib.Path]:
    """A folder to fill, which then takes its place at `path` whole, or not at all if filling it raises.

    Args:
        is_own: whether a file of this name is part of such a folder; one that holds nothing else is replaced.

    Raises:
        ValueError: `path` is a file, or a folder that holds anything else.
        OSError: with a file name; it cannot be written.
    """
    path = path.absolute()
    if path.exists() and not path.is_dir():
        raise ValueError(f"{path} is a file: give a folder that does not exist yet")
    if foreign := sorted(f.name for f in path.glob("*") if not is_own(f.name)):
        raise ValueError(f"{path} holds {foreign[0]}, which is no part of a model export: give another folder")
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = pathlib.Path(tempfile.mkdtemp(prefix=f".{path.name}-", dir=path.parent))
    try:
        new = scratch / "new"
        new.mkdir()
        yield new
        if path.exists():
            os.replace(path, scratch / "old")
        os.replace(new, path)
    except OSError as error:
        if error.errno and error.filename is None:  # a full disk does not say where
            error.filename = str(path)
        raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def write_tensors(tensors: Mapping[str, np.ndarray], path: pathlib.Path) -> None:
    """Writes a safetensors file as transformers does; those who may read its folder may read it.

    Raises:
        OSError: it cannot be written.
    """
    arrays = {name: np.asarray(value, order="C") for name, value in tensors.items()}
    try:
        save_file(arrays, path, metadata={"format": "pt"})
    except SafetensorError as error:
        if number := re.search(r"os error (\d+)", str(error)):
            raise OSError(int(number[1]), os.strerror(int(number[1]))) from None
        raise
    path.chmod(path.parent.stat().st_mode & 0o666)  # safetensors lets nobody else read it


def _is_export(name: str) -> bool:
    return (
        name in (CONFIG, SINGLE, INDEX, "README.md", *COMPANIONS)
        or re.fullmatch(r"model-\d+-of-\d+\.safetensors", name) is not None
    )


def _write(tensors: Iterator[tuple[str, Any]], folder: pathlib.Path, max_shard_bytes: int) -> None:
    """Fills shards one after another; the number of shards is known, and the files get their names, at the end."""
    shard: dict[str, np.ndarray] = {}
    names: list[list[str]] = []
    total = size = 0

    def flush() -> None:
        write_tensors(shard, folder / str(len(names)))
        names.append(list(shard))
        shard.clear()

    for name, value in tensors:
        tensor = np.asarray(to_host(value), order="C")
        if shard and size + tensor.nbytes > max_shard_bytes:
            flush()
            size = 0
        shard[name] = tensor
        size += tensor.nbytes
        total += tensor.nbytes
    flush()
    if len(names) == 1:
        os.replace(folder / "0", folder / SINGLE)
        return
    index = {}
    for i, held in enumerate(names):
        file = f"model-{i + 1:05}-of-{len(names):05}.safetensors"
        os.replace(folder / str(i), folder / file)
        index.update(dict.fromkeys(held, file))
    (folder / INDEX).write_text(
        json.dumps({"metadata": {"total_size": total}, "weight_map": dict(sorted(index.items()))}, indent=2) + "\n"
    )
