"""Low-rank adapters in PEFT's format; `python -m cpjax.train.lora ADAPTER OUT` merges one into its model."""

from __future__ import annotations

import argparse
import contextlib
import json
import pathlib
import re
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from safetensors import SafetensorError, safe_open

from cpjax.models import family, from_pretrained, save_pretrained
from cpjax.models.common.checkpoint import Weight, named_tensors, new_folder, read_json, write_tensors
from cpjax.models.common.layers import Linear
from cpjax.train.config import LoraConfig
from cpjax.train.errors import run_command
from cpjax.train.patterns import find, projections

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"

_PLAIN = {"peft_type": "LORA", "bias": "none"}
_ABSENT = (
    "modules_to_save", "rank_pattern", "alpha_pattern", "lora_bias", "trainable_token_indices", "target_parameters",
    "layer_replication", "fan_in_fan_out", "alora_invocation_tokens", "use_qalora", "use_bdlora",
)  # fmt: skip
"""What an adapter may not have: each changes what the tensors mean."""


class Adapter(nnx.Module):
    """What LoRA (arXiv 2106.09685) makes of x @ kernel: x @ kernel + scale (x @ a) @ b.

    With a magnitude (DoRA, arXiv 2402.09353) each column of kernel + scale a @ b is scaled to that length; as in PEFT
    the length it had is a constant to the gradient. It is found without forming the sum of the two matrices.

    Attributes:
        a: [in, rank], uniform within in^-0.5 at the start.
        b: [rank, out], zero at the start.
        magnitude: [out], or None.
        scale: a number.
    """

    def __init__(self, kernel: jax.Array, options: LoraConfig, key: jax.Array):
        *stack, fan_in, fan_out = kernel.shape
        dtype, rank, bound = jnp.promote_types(kernel.dtype, jnp.float32), options.rank, fan_in**-0.5
        self.a = nnx.LoRAParam(jax.random.uniform(key, (*stack, fan_in, rank), dtype, -bound, bound))
        self.b = nnx.LoRAParam(jnp.zeros((*stack, rank, fan_out), dtype))
        self.scale = options.alpha / (rank**0.5 if options.rslora else rank)
        self.magnitude = nnx.LoRAParam(self.lengths(kernel)) if options.dora else None

    def __call__(self, x: jax.Array, kernel: jax.Array, y: jax.Array) -> jax.Array:
        """x [..., in], y = x @ kernel [..., out] -> [..., out]."""
        y += self.scale * ((x @ self.a[...].astype(x.dtype)) @ self.b[...].astype(x.dtype))
        if self.magnitude is None:
            return y
        return y * (self.magnitude[...] / jax.lax.stop_gradient(self.lengths(kernel))).astype(x.dtype)

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

    Raises:
        ValueError: a bad pattern, see `find`.
    """
    linears = {path for path, _ in _linears(model)}  # as in PEFT, kernels that are stacked by expert are no targets
    candidates = [w for w in projections(family(model.config.model_type).weights(model.config)) if w.path in linears]
    found = find("lora.targets pattern", options.targets, {weight.path: weight.names for weight in candidates})
    chosen = {path for paths in found for path in paths}
    keys = iter(jax.random.split(jax.random.key(seed), len(chosen)))
    for path, linear in _linears(model):
        if path in chosen:
            linear.adapter = Adapter(linear.kernel[...], options, next(keys))


def merge_adapters(model: Any) -> None:
    """Puts every adapter into its kernel: a plain model again."""
    for _, linear in _linears(model):
        if isinstance(linear.adapter, Adapter):
            linear.kernel = nnx.Param(linear.adapter.merged(linear.kernel[...]))
            del linear.adapter


def weight_table(model: Any) -> list[Weight]:
    """Every parameter, those of adapters included, with the tensors that hold it on disk."""
    table = family(model.config.model_type).weights(model.config)
    return table + adapter_weights(model)


def adapter_weights(model: Any) -> list[Weight]:
    """The parameters of the adapters, under PEFT's names."""
    kernels = {weight.path: weight for weight in family(model.config.model_type).weights(model.config)}
    table = []
    for path, linear in _linears(model):
        if linear.adapter is None:
            continue
        kernel = kernels[path]
        stems = [f"base_model.model.{name.removesuffix('.weight')}" for name in kernel.names]
        for part, name in (("a", "lora_A.weight"), ("b", "lora_B.weight"), ("magnitude", "lora_magnitude_vector")):
            if getattr(linear.adapter, part) is not None:
                names = tuple(f"{stem}.{name}" for stem in stems)
                own = f"{path.removesuffix('kernel')}adapter.{part}"
                table.append(Weight(own, names, kernel.stacked, transpose=part != "magnitude"))
    return table


def save_adapter(model: Any, folder: pathlib.Path, options: LoraConfig, base: str) -> None:
    """Writes adapter_config.json and adapter_model.safetensors, which `peft` loads; they appear whole or not at all.

    Args:
        options: those that the adapters were made with.
        base: folder of the model that they adapt, for whoever loads them.

    Raises:
        ValueError: the folder holds something other than an earlier adapter.
    """
    table = adapter_weights(model)
    config = {
        **_PLAIN,
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": options.rank,
        "lora_alpha": int(options.alpha) if options.alpha == int(options.alpha) else options.alpha,
        "lora_dropout": 0.0,
        "use_rslora": options.rslora,
        "use_dora": options.dora,
        "target_modules": _target_modules(model, table),
        "inference_mode": True,
    }
    adapters = nnx.state(model, nnx.LoRAParam)
    with new_folder(folder, lambda name: name in (CONFIG, TENSORS, "README.md")) as new:
        (new / CONFIG).write_text(json.dumps(config, indent=2) + "\n")
        write_tensors(dict(named_tensors(table, adapters)), new / TENSORS)


def _target_modules(model: Any, adapters: Sequence[Weight]) -> list[str]:
    """The adapted modules as PEFT wants them: by their last names where these say it all, otherwise in full."""
    full = {_module(name) for weight in adapters for name in weight.names}
    every = {name.rpartition(".")[0] for w in family(model.config.model_type).weights(model.config) for name in w.names}
    last = {module.rpartition(".")[2] for module in full}
    exact = {module for module in every if module.rpartition(".")[2] in last} == full
    return sorted(last if exact else full)


def _module(name: str) -> str:
    """The module that a tensor of PEFT's belongs to."""
    return re.sub(r"^base_model\.model\.|\.lora_\w+(\.weight)?$", "", name)


def load_adapter(model: Any, folder: pathlib.Path, options: LoraConfig | None = None) -> LoraConfig:
    """Puts the adapters of a folder in PEFT's format on a model.

    Args:
        options: what the adapters must be like; None: whatever the folder holds.

    Returns:
        What they are like.

    Raises:
        ValueError: the folder is no adapter, damaged, of a kind that is not supported, or other than `options` say;
            a tensor is missing, unknown or of another shape.
    """
    if not (folder / CONFIG).is_file():
        raise ValueError(f"{folder} has no {CONFIG}: give the folder of a PEFT adapter")
    config = read_json(folder / CONFIG)
    for key, wanted in _PLAIN.items():
        if config.get(key, wanted) != wanted:
            raise ValueError(f"the adapter {folder} has {key} {config[key]!r}: only {wanted!r} is supported")
    for key in _ABSENT:
        if config.get(key):
            raise ValueError(
                f"the adapter {folder} has {key} {config[key]!r}, which is not supported: train without it"
            )
    with contextlib.ExitStack() as stack:
        try:
            file = stack.enter_context(safe_open(folder / TENSORS, framework="np"))
        except (SafetensorError, FileNotFoundError) as error:
            raise ValueError(f"{folder / TENSORS} is missing or damaged ({error}): copy the adapter again") from None
        names = set(file.keys())
        found = LoraConfig(
            rank=int(config.get("r", 0)),
            alpha=float(config.get("lora_alpha", 0)),
            rslora=bool(config.get("use_rslora")),
            dora=bool(config.get("use_dora")),
            targets=_targets(model, names, folder),
        )
        for key in ("rank", "alpha", "rslora", "dora"):
            if options and getattr(found, key) != getattr(options, key):
                raise ValueError(
                    f"the adapter {folder} has {key} {getattr(found, key)}, but --lora.{key} is "
                    f"{getattr(options, key)}: set it to the adapter's, or start from a fresh one"
                )
        add_adapters(model, options or found)
        table = adapter_weights(model)
        shapes = {".".join(map(str, path)): v.shape for path, v in nnx.to_flat_state(nnx.state(model, nnx.LoRAParam))}
        needed = {name: weight.shape_on_disk(shapes[weight.path]) for weight in table for name in weight.names}
        for name, shape in needed.items():
            held = tuple(file.get_slice(name).get_shape()) if name in names else None
            if held != shape:
                raise ValueError(
                    f"the adapter {folder} holds {f'shape {held}' if held else 'nothing'} at {name}, but the model "
                    f"with rank {found.rank} needs {shape}: give an adapter of this model, or the rank it has"
                )
        if unknown := sorted(names - needed.keys()):
            raise ValueError(
                f"the adapter {folder} holds {unknown[0]}, for which the model has no adapter: give the targets that "
                "it was trained with"
            )
        adapters = {path.removesuffix("kernel"): linear.adapter for path, linear in _linears(model) if linear.adapter}
        for weight in table:
            tensors = [jnp.asarray(file.get_tensor(name)) for name in weight.names]
            value = jnp.stack(tensors) if weight.stacked else tensors[0]
            value = jnp.swapaxes(value, -1, -2) if weight.transpose else value
            prefix, _, part = weight.path.rpartition("adapter.")
            old = getattr(adapters[prefix], part)
            setattr(adapters[prefix], part, nnx.LoRAParam(value.astype(old[...].dtype)))
    return found


def _targets(model: Any, names: set[str], folder: pathlib.Path) -> list[str]:
    """Patterns of exactly the projections that an adapter's tensors are for."""
    modules = {_module(name) for name in names}
    chosen = []
    for weight in projections(family(model.config.model_type).weights(model.config)):
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
    if base is None:
        base = str(read_json(adapter / CONFIG).get("base_model_name_or_path"))
    model = from_pretrained(base)
    load_adapter(model, adapter)
    merge_adapters(model)
    save_pretrained(model, out, companions=base)
    print(f"merged {adapter} into {base}: {out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
