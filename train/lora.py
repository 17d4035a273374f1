"""Low-rank adapters in PEFT's format; `python -m cpjax.train.lora ADAPTER OUT` merges one into its model."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import pathlib
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from safetensors import SafetensorError, safe_open

from cpjax.models import family, from_pretrained, save_pretrained
from cpjax.models.common.checkpoint import DTYPES, Weight, named_tensors, new_folder, read_json, write_tensors
from cpjax.models.common.layers import Buffer, Linear
from cpjax.models.common.sharding import to_host
from cpjax.train.config import LoraConfig
from cpjax.train.errors import run_command
from cpjax.train.patterns import find, projections

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"

_PREFIX = "base_model.model."
_HEAD = f"{_PREFIX}lm_head.weight"

READ = (
    "peft_type", "base_model_name_or_path", "r", "lora_alpha", "use_rslora", "use_dora", "init_lora_weights",
    "target_modules", "exclude_modules", "layers_to_transform", "layers_pattern", "modules_to_save",
    "ensure_weight_tying",
)  # fmt: skip
"""The fields of PEFT's `LoraConfig` that are honoured."""
REFUSED = (
    "bias", "lora_bias", "rank_pattern", "alpha_pattern", "trainable_token_indices", "target_parameters",
    "layer_replication", "megatron_config", "alora_invocation_tokens", "use_qalora", "use_bdlora", "arrow_config",
    "kasa_config", "monteclora_config",
)  # fmt: skip
"""Those that change what the tensors mean: they must be false, empty or "none". So must be any that is not known."""
WITHOUT_EFFECT = (
    "task_type", "auto_mapping", "peft_version", "revision", "inference_mode", "runtime_config", "lora_dropout",
    "fan_in_fan_out", "megatron_core", "loftq_config", "eva_config", "corda_config", "lora_ga_config", "velora_config",
    "qalora_group_size",
)  # fmt: skip
"""Those that say where an adapter comes from, how it was trained or initialised, or what PEFT itself sets aside for
linear layers; they change nothing of what it computes. Dropout is that of the options."""

_KEPT_BASE = ("true", "false", "none", "gaussian", "eva", "orthogonal", "mica")
"""Values of `init_lora_weights` that leave the model as it was."""


class Adapter(nnx.Module):
    """What LoRA (arXiv 2106.09685) makes of x @ kernel: x @ kernel + scale (x @ a) @ b.

    With a magnitude (DoRA, arXiv 2402.09353) each column of kernel + scale a @ b is scaled to that length; as in PEFT
    the length it had is a constant to the gradient. It is found without forming the sum of the two matrices.

    Attributes:
        a: [in, rank], uniform within in^-0.5 at the start.
        b: [rank, out], zero at the start.
        magnitude: [out], or None.
        scale: a number.
        rate: share of x that is dropped while training.
        seed: uint32, of what is dropped; None without dropout.
        drop: what drops it, (x, seed, rate) -> x; None, as in evaluation: nothing does. See `cpjax.train.dropout`.
    """

    drop: Callable[[jax.Array, jax.Array, float], jax.Array] | None = None

    def __init__(self, kernel: jax.Array, options: LoraConfig, key: jax.Array):
        *stack, fan_in, fan_out = kernel.shape
        dtype, rank, bound = jnp.promote_types(kernel.dtype, jnp.float32), options.rank, fan_in**-0.5
        self.a = nnx.LoRAParam(jax.random.uniform(key, (*stack, fan_in, rank), dtype, -bound, bound))
        self.b = nnx.LoRAParam(jnp.zeros((*stack, rank, fan_out), dtype))
        self.scale = options.alpha / (rank**0.5 if options.rslora else rank)
        self.magnitude = nnx.LoRAParam(self.lengths(kernel)) if options.dora else None
        self.rate = options.dropout
        self.seed = nnx.Variable(jax.random.bits(jax.random.fold_in(key, 1), stack)) if options.dropout else None

    def __call__(self, x: jax.Array, kernel: jax.Array, y: jax.Array) -> jax.Array:
        """x [..., in], y = x @ kernel [..., out] -> [..., out]."""
        base = y
        if self.drop is not None and self.seed is not None:
            x = self.drop(x, self.seed[...], self.rate)
            base = y if self.magnitude is None else x @ kernel.astype(x.dtype)  # as PEFT does
        added = self.scale * ((x @ self.a[...].astype(x.dtype)) @ self.b[...].astype(x.dtype))
        if self.magnitude is None:
            return y + added
        length = (self.magnitude[...] / jax.lax.stop_gradient(self.lengths(kernel))).astype(x.dtype)
        return y + (length - 1) * base + length * added

    def lengths(self, kernel: jax.Array) -> jax.Array:
        """Euclidean lengths of the columns of kernel + scale a @ b, [..., out]."""
        a, b = self.a[...], self.b[...]
        kernel, turned = kernel.astype(a.dtype), jnp.swapaxes(a, -1, -2)
        mixed = 2 * (turned @ kernel) + self.scale * ((turned @ a) @ b)
        return jnp.sqrt(jnp.square(kernel).sum(-2) + self.scale * (mixed * b).sum(-2))

    def merged(self, kernel: jax.Array) -> jax.Array:
        """The kernel that does the same without an adapter."""
        a, b = self.a[...], self.b[...]
        whole = kernel.astype(a.dtype) + self.scale * (a @ b)
        if self.magnitude is not None:
            whole *= (self.magnitude[...] / self.lengths(kernel))[..., None, :]
        return whole.astype(kernel.dtype)


def _linears(model: nnx.Module) -> Iterator[tuple[str, Linear]]:
    """The linear layers by the dotted path of their kernel."""
    for path, module in nnx.iter_modules(model):
        if isinstance(module, Linear):
            yield ".".join(map(str, (*path, "kernel"))), module


def add_adapters(model: Any, options: LoraConfig, seed: int = 0) -> None:
    """Puts fresh adapters, which change nothing yet, on the projections that `options.targets` match.

    The parameters of the modules that `options.modules_to_save` match become `nnx.LoRAParam` as well, in float32 or
    wider, so that they are trained and saved with the adapters.

    Raises:
        ValueError: a bad pattern, see `find`, or a projection that is both to be adapted and to be trained whole.
    """
    table, modules_of = family(model.config.model_type).weights(model.config), _modules(model)
    # As in PEFT, kernels that are stacked by expert and routers are no targets; transformers builds no heads ahead.
    linears = {path for path, _ in _linears(model) if not re.search(r"^mtp\.|\.mlp\.gate\.kernel$", path)}
    candidates = [weight for weight in projections(_modules(model)) if weight.path in linears]
    found = find("lora.targets pattern", options.targets, {weight.path: weight.names for weight in candidates})
    chosen = {path for paths in found for path in paths}
    keys = iter(jax.random.split(jax.random.key(seed), len(chosen)))
    for path, linear in _linears(model):
        if path in chosen:
            linear.adapter = Adapter(linear.kernel[...], options, next(keys))
    found = find(
        "lora.modules_to_save pattern", options.modules_to_save, {weight.path: weight.names for weight in table}
    )
    matched = {path for paths in found for path in paths}
    modules = {_module(name) for weight in modules_of if weight.path in matched for name in weight.names}
    for weight in modules_of:
        inside = [name for name in weight.names if any(name.startswith(f"{module}.") for module in modules)]
        if inside and weight.path in chosen:
            raise ValueError(
                f"{inside[0]} is matched by --lora.targets and lies in a module of --lora.modules_to_save: an adapter "
                "on what is trained whole is of no use, so let only one of them match it"
            )
        if inside and not isinstance(_variable(model, weight.path), Buffer):
            old = _variable(model, weight.path)[...]
            wide = old.astype(jnp.promote_types(old.dtype, jnp.float32))
            _put(model, weight.path, nnx.LoRAParam(wide, dtype_before=old.dtype))


def merge_adapters(model: Any) -> None:
    """Puts every adapter into its kernel: a plain model again."""
    for path in _whole(model):
        variable = _variable(model, path)
        _put(model, path, nnx.Param(variable[...].astype(variable.dtype_before)))
    for _, linear in _linears(model):
        if isinstance(linear.adapter, Adapter):
            linear.kernel = nnx.Param(linear.adapter.merged(linear.kernel[...]))
            del linear.adapter


def _whole(model: Any) -> list[str]:
    """Paths of the model's own parameters that are trained whole."""
    paths = [".".join(map(str, path)) for path, _ in nnx.to_flat_state(nnx.state(model, nnx.LoRAParam))]
    return [path for path in paths if ".adapter." not in path]


def _variable(model: Any, path: str) -> Any:
    for part in path.split("."):
        model = model[int(part)] if part.isdigit() else getattr(model, part)
    return model


def _put(model: Any, path: str, variable: nnx.Variable) -> None:
    parent, _, name = path.rpartition(".")
    setattr(_variable(model, parent) if parent else model, name, variable)


def weight_table(model: Any) -> list[Weight]:
    """Every parameter, those of adapters included, with the tensors that hold it on disk."""
    return family(model.config.model_type).weights(model.config) + _adapter_weights(model)


def _saved_weights(model: Any) -> list[Weight]:
    """What is saved with the adapters: their parameters, and the modules that are trained whole, with their buffers;
    under PEFT's names."""
    table, whole = _modules(model), set(_whole(model))
    modules = {_module(weight.names[0]) for weight in table if weight.path in whole}
    return _adapter_weights(model) + [
        dataclasses.replace(weight, names=tuple(f"{_PREFIX}{name}" for name in weight.names))
        for weight in table
        if weight.path in whole or _module(weight.names[0]) in modules
    ]


def _adapter_weights(model: Any) -> list[Weight]:
    """The parameters of the adapters, under PEFT's names."""
    kernels = {weight.path: weight for weight in _modules(model)}
    table = []
    for path, linear in _linears(model):
        if linear.adapter is None:
            continue
        kernel = kernels[path]
        stems = [f"{_PREFIX}{name.removesuffix('.weight')}" for name in kernel.names]
        for part, name in (("a", "lora_A.weight"), ("b", "lora_B.weight"), ("magnitude", "lora_magnitude_vector")):
            if getattr(linear.adapter, part) is not None:
                names = tuple(f"{stem}.{name}" for stem in stems)
                own = f"{path.removesuffix('kernel')}adapter.{part}"
                order = () if part == "a" else kernel.order
                table.append(Weight(own, names, kernel.stacked, transpose=part != "magnitude", order=order))
    return table


def _modules(model: Any) -> list[Weight]:
    """The model's table under the names of transformers' modules, which PEFT's names are made of."""
    module = family(model.config.model_type)
    table: list[Weight] = getattr(module, "stacked_weights", module.weights)(model.config)
    return table


def save_adapter(model: Any, folder: pathlib.Path, options: LoraConfig, base: str) -> None:
    """Writes adapter_config.json and adapter_model.safetensors, which `peft` loads; they appear whole or not at all.

    Args:
        options: those that the adapters were made with.
        base: absolute path of the model that they adapt, for whoever loads them.

    Of several processes, all of which must call this, the first one writes.

    Raises:
        ValueError: the folder holds something other than an earlier adapter.
    """
    table = _saved_weights(model)
    whole = {_module(name) for weight in table if ".adapter." not in weight.path for name in weight.names}
    embed = next((weight.names[0] for weight in table if weight.path == "embed_tokens"), None)
    tied = embed is not None and _tied(model)
    config = {
        "peft_type": "LORA",
        "bias": "none",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": options.rank,
        "lora_alpha": int(options.alpha) if options.alpha == int(options.alpha) else options.alpha,
        "lora_dropout": options.dropout,
        "use_rslora": options.rslora,
        "use_dora": options.dora,
        "target_modules": _target_modules(model, _adapter_weights(model)),
        "modules_to_save": sorted(whole | {"lm_head"} if tied else whole) or None,
        "ensure_weight_tying": tied,
        "inference_mode": True,
    }
    saved = {weight.path: _variable(model, weight.path)[...] for weight in table}
    tensors = {name: to_host(tensor) for name, tensor in named_tensors(table, saved)}
    if embed and tied:  # else PEFT would leave the head as it was
        tensors[_HEAD] = tensors[embed]
    if jax.process_index() > 0:
        return
    with new_folder(folder, lambda name: name in (CONFIG, TENSORS, "README.md")) as new:
        (new / CONFIG).write_text(json.dumps(config, indent=2) + "\n")
        write_tensors(tensors, new / TENSORS)


def _target_modules(model: Any, adapters: Sequence[Weight]) -> list[str]:
    """The adapted modules as PEFT wants them: by their last names where these say it all, otherwise in full."""
    full = {_module(name) for weight in adapters for name in weight.names}
    every = {module for weight in _modules(model) for name in weight.names for module in _around(name)}
    last = {module.rpartition(".")[2] for module in full}
    exact = {module for module in every if module.rpartition(".")[2] in last} == full
    return sorted(last if exact else full)


def _module(name: str) -> str:
    """The module that a tensor belongs to, by its name here or with PEFT's prefix and suffixes."""
    name = name.removeprefix(_PREFIX)
    return re.sub(r"\.lora_\w+(\.weight)?$", "", name) if ".lora_" in name else name.rpartition(".")[0]


def _around(name: str) -> list[str]:
    """The modules that hold a tensor, from the outermost to its own."""
    parts = name.split(".")
    return [".".join(parts[:i]) for i in range(1, len(parts))]


def load_adapter(model: Any, folder: pathlib.Path, options: LoraConfig | None = None) -> LoraConfig:
    """Puts the adapters of a folder in PEFT's format on a model.

    Where the head of the model is its token embeddings and the adapter makes them differ, as PEFT does unless told
    `ensure_weight_tying`, the model gets a head of its own.

    Args:
        options: what the adapters must be like; None: whatever the folder holds.

    Returns:
        What they are like.

    Raises:
        ValueError: the folder is no adapter, damaged, of a kind that is not supported, or other than `options` say;
            a tensor is missing, unknown or of another shape.
    """
    config = read_adapter_config(folder)
    with contextlib.ExitStack() as stack:
        try:
            file = stack.enter_context(safe_open(folder / TENSORS, framework="np"))
        except (SafetensorError, FileNotFoundError) as error:
            raise ValueError(f"{folder / TENSORS} is missing or damaged ({error}): copy the adapter again") from None
        names = set(file.keys())
        if _tied(model):
            _settle_head(model, config, file, names, folder)
        _check_complete(model, config, names, folder)
        found = LoraConfig(
            rank=config.get("r", 8),
            alpha=float(config.get("lora_alpha", 8)),
            rslora=bool(config.get("use_rslora")),
            dora=bool(config.get("use_dora")),
            targets=_targets(model, names, folder),
            modules_to_save=_modules_to_save(model, names),
        )
        for key in ("rank", "alpha", "rslora", "dora"):
            if options and getattr(found, key) != getattr(options, key):
                raise ValueError(
                    f"the adapter {folder} has {key} {getattr(found, key)}, but --lora.{key} is "
                    f"{getattr(options, key)}: set it to the adapter's, or start from a fresh one"
                )
        add_adapters(model, options or found)
        table = _saved_weights(model)
        shapes = {weight.path: _variable(model, weight.path).shape for weight in table}
        needed = {name: weight.shape_on_disk(shapes[weight.path]) for weight in table for name in weight.names}
        for name, shape in needed.items():
            held = tuple(file.get_slice(name).get_shape()) if name in names else None
            if held != shape:
                raise ValueError(
                    f"the adapter {folder} holds {f'shape {held}' if held else 'nothing'} at {name}, but the model "
                    f"with rank {found.rank} needs {shape}: give an adapter of this model, or the rank it has"
                )
            if (kind := file.get_slice(name).get_dtype()) not in DTYPES:
                raise ValueError(f"{name} in {folder} is of type {kind}: only {', '.join(DTYPES)} can be read")
        if unknown := sorted(names - needed.keys()):
            raise ValueError(
                f"the adapter {folder} holds {unknown[0]}, for which the model has no adapter: only projections inside "
                "layers are adapted, and --lora.targets, if given, must be those that it was trained with"
            )
        for weight in table:
            variable = _variable(model, weight.path)
            value = weight.from_disk([file.get_tensor(name) for name in weight.names], variable[...].shape)
            variable[...] = jnp.asarray(value, variable[...].dtype)
    return found


def read_adapter_config(folder: pathlib.Path) -> dict[str, Any]:
    """adapter_config.json of an adapter that can be read.

    Raises:
        ValueError: there is none, it is damaged, or says something that is not supported.
    """
    if not (folder / CONFIG).is_file():
        raise ValueError(f"{folder} has no {CONFIG}: give the folder of a PEFT adapter")
    config = read_json(folder / CONFIG)
    if (kind := config.get("peft_type", "LORA")) != "LORA":
        raise ValueError(f"the adapter {folder} has peft_type {kind!r}: only 'LORA' is supported")
    for key, value in config.items():
        if value and value != "none" and key not in READ + WITHOUT_EFFECT:
            reason = "not supported" if key in REFUSED else "not known"
            raise ValueError(f"the adapter {folder} has {key} {value!r:.200}, which is {reason}: train without it")
    start = config.get("init_lora_weights")
    if str(start).lower() not in _KEPT_BASE:
        raise ValueError(
            f"the adapter {folder} has init_lora_weights {start!r}, which changes the model that it adapts: save it "
            "with PEFT's path_initial_model_for_weight_conversion, which makes it one of the model as it was"
        )
    rank, alpha = config.get("r", 8), config.get("lora_alpha", 8)
    if type(rank) is not int or rank < 1 or type(alpha) not in (int, float):
        raise ValueError(
            f"the adapter {folder} has r {rank!r} and lora_alpha {alpha!r}: they must be numbers, r above 0"
        )
    return config


def _tied(model: Any) -> bool:
    """Whether the head of a model is its token embeddings."""
    return all(weight.path != "lm_head.kernel" for weight in _modules(model))


def _settle_head(model: Any, config: dict[str, Any], file: Any, names: set[str], folder: pathlib.Path) -> None:
    """Gives a tied model a head of its own if an adapter makes it differ from the embeddings; else drops that of the
    adapter, which is the same, from `names`.

    Raises:
        ValueError: the family has no such models.
    """
    embed = next(f"{_PREFIX}{weight.names[0]}" for weight in _modules(model) if weight.path == "embed_tokens")
    own = embed in names and _is_saved(config, embed.removeprefix(_PREFIX))
    if embed in names and _HEAD in names:
        apart = not np.array_equal(file.get_tensor(embed), file.get_tensor(_HEAD))
    else:  # PEFT leaves the other one as it was
        apart = _HEAD in names or (own and not config.get("ensure_weight_tying"))
    if not apart:
        names.discard(_HEAD)
        return
    source = model.config.to_dict()
    for part in (source, source.get("text_config") or {}):
        if "tie_word_embeddings" in part:
            part["tie_word_embeddings"] = False
    try:
        model.config = type(model.config).from_dict(source)
    except ValueError:
        raise ValueError(
            f"the adapter {folder} makes token embeddings and head differ, which are one in every "
            f"{model.config.model_type} model: train it with PEFT's ensure_weight_tying"
        ) from None
    table = model.embed_tokens[...]
    head = nnx.eval_shape(lambda: Linear(*table.shape[::-1], dtype=table.dtype, rngs=nnx.Rngs(0)))
    head.kernel = nnx.Param(table.T)
    model.lm_head = nnx.data(head)


def _check_complete(model: Any, config: dict[str, Any], names: set[str], folder: pathlib.Path) -> None:
    """Whether an adapter's file has what its configuration says, and nothing that it does not say.

    Raises:
        ValueError: naming the first module or tensor.
    """
    adapted = {_module(name) for name in names if ".lora_" in name}
    held = {name.removeprefix(_PREFIX) for name in names}
    # transformers builds no heads ahead
    tensors = [name for weight in _modules(model) if not weight.path.startswith("mtp.") for name in weight.names]
    for name in tensors:
        if _is_saved(config, name) and name not in held:
            raise ValueError(
                f"the adapter {folder} holds nothing at {_PREFIX}{name}, which its modules_to_save name: copy it again"
            )
    modules = {_module(name) for name in tensors} | {"lm_head"}
    around = {module for name in tensors for module in _around(name)} | {"lm_head"}
    for entry in config.get("modules_to_save") or ():
        if not any(module.endswith(entry) for module in around):
            raise ValueError(f"the adapter {folder} has modules_to_save {entry!r}, which this model does not have")
    targets = config.get("target_modules")
    if targets is None or targets == "all-linear":
        return
    for module in sorted(modules):
        if (module in adapted) != _is_target(config, module):
            what = "has something" if module in adapted else "has nothing"
            says = "do not name" if module in adapted else "name"
            raise ValueError(
                f"the adapter {folder} {what} for {module}, which its target_modules {says}: copy it again"
            )


def _is_saved(config: dict[str, Any], name: str) -> bool:
    """Whether PEFT saves a tensor whole, with the module around it."""
    entries = config.get("modules_to_save") or ()
    return any(module.endswith(entry) for module in _around(name) for entry in entries)


def _is_target(config: dict[str, Any], module: str) -> bool:
    """Whether PEFT adapts a linear layer of this name."""

    def named(patterns: str | list[str]) -> bool:
        if isinstance(patterns, str):
            return re.fullmatch(patterns, module) is not None
        return any(f".{module}".endswith(f".{pattern}") for pattern in patterns)

    targets, layers, lists = (config.get(key) for key in ("target_modules", "layers_to_transform", "layers_pattern"))
    if named(config.get("exclude_modules") or []) or _is_saved(config, f"{module}.weight") or not named(targets or []):
        return False
    if isinstance(targets, str) or layers in (None, []) or module in (targets or []):
        return True
    lists = [lists] if isinstance(lists, str) else lists
    number = re.match(rf"(?:|.*?\.)(?:{'|'.join(lists or ['[^.]*'])})\.(\d+)\.", module)
    return number is not None and int(number[1]) in (layers if isinstance(layers, list) else [layers])


def _modules_to_save(model: Any, names: set[str]) -> list[str]:
    """Patterns of exactly the parameters of the model that an adapter's file holds whole."""
    return [
        f"^{re.escape(weight.path)}$"
        for weight in _modules(model)
        if any(f"{_PREFIX}{name}" in names for name in weight.names)
    ]


def _targets(model: Any, names: set[str], folder: pathlib.Path) -> list[str]:
    """Patterns of exactly the projections that an adapter's tensors are for."""
    modules = {_module(name) for name in names if ".lora_" in name}
    chosen = []
    for weight in projections(_modules(model)):
        own = {name.removesuffix(".weight") for name in weight.names}
        if missing := sorted(own - modules) if own & modules else []:
            raise ValueError(
                f"the adapter {folder} has nothing for {missing[0]}, but adapts other layers of its stack: only "
                "adapters on all layers of a stack are supported"
            )
        if own & modules:
            chosen.append(f"^{re.escape(weight.path)}$")
    if not chosen:
        raise ValueError(f"the adapter {folder} adapts no projection of this model: give one that was made for it")
    return chosen


def main() -> int:
    """The command line; returns its exit code."""
    parser = argparse.ArgumentParser(prog="python -m cpjax.train.lora", description=__doc__)
    parser.add_argument("adapter", type=pathlib.Path, help="folder of the adapter, for instance runs/mine/adapter")
    parser.add_argument("out", type=pathlib.Path, help="folder for the merged model; must not exist")
    parser.add_argument("--base", help="folder of the model that it adapts (default: as in its adapter_config.json)")
    options = parser.parse_args()
    return run_command(lambda: merge(options.adapter, options.out, options.base))


def merge(adapter: pathlib.Path, out: pathlib.Path, base: str | None) -> int:
    """Writes the model `base` with an adapter merged into it."""
    if out.exists():
        raise ValueError(f"{out} exists already: name another folder for the merged model")
    config = read_adapter_config(adapter)  # before the model, which takes long
    base = base or config.get("base_model_name_or_path")
    if not base:
        raise ValueError(f"the adapter {adapter} does not say which model it adapts: name its folder with --base")
    model = from_pretrained(base)
    load_adapter(model, adapter)
    merge_adapters(model)
    save_pretrained(model, out, companions=base)
    print(f"merged {adapter} into {base}: {out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
