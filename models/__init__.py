"""Flax (nnx) model families, and reading and writing them as Hugging Face folders."""

from __future__ import annotations

import importlib
import os
import pathlib
from types import ModuleType
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh

from cpjax.models.common import checkpoint

__all__ = ["FAMILIES", "family", "from_pretrained", "hf_names", "read_config", "save_pretrained", "to_hf_names"]

FAMILIES = {
    "gemma4": "cpjax.models.gemma4",
    "qwen3_5": "cpjax.models.qwen3_5",
    "qwen3_5_moe": "cpjax.models.qwen3_5_moe",
    "step3p7": "cpjax.models.step3p7",
}
"""The module of each family, by the `model_type` of config.json."""


def family(model_type: str) -> ModuleType:
    """The module of a family, by the `model_type` of config.json.

    Each has `Config` (with `from_dict` and `to_dict`), `Model`, `weights`, `DROPPED`, `prepare` and `STREAMS`, for
    `cpjax.models.generate` a `prefill` and a `decode`, and for the trainer's --check, --plan and MFU
    `forward_flops`, `reduced` and `synthetic_row`. A folder may also be laid out as `stacked_weights` says, if
    there are any, and lack what its `without_absent`, if any, takes out of the configuration. A model whose layers have
    routers has `router_loss`, what their balance loss is multiplied by; one with heads of multi-token prediction has
    these in `mtp`. Both have `outputs`, which takes what a call does, and `ahead`, whether to apply the heads, and
    returns hidden states, `experts.RouterSums` or None, and of each head hidden states and labels. A model that caps
    its logits says so in `logit_softcap`.

    Raises:
        ValueError: no such family.
    """
    if model_type not in FAMILIES:
        raise ValueError(f"model_type {model_type!r} is not supported: choose one of {', '.join(sorted(FAMILIES))}")
    return importlib.import_module(FAMILIES[model_type])


def read_config(folder: str | os.PathLike[str]) -> Any:
    """The configuration of the model in a Hugging Face folder, of whichever family.

    Raises:
        ValueError: naming config.json, which is missing or damaged, or of a model that is not supported.
    """
    file = pathlib.Path(folder) / checkpoint.CONFIG
    source = checkpoint.read_json(file)
    if source.get("model_type") is None:
        raise ValueError(f"{file} has no model_type: copy or download the file again")
    try:
        return family(str(source["model_type"])).Config.from_dict(source)
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from None
    except (TypeError, AttributeError) as error:
        raise ValueError(f"{file} has a value of another type than it must be ({error}): download it again") from None


def from_pretrained(folder: str | os.PathLike[str], mesh: Mesh | None = None, dtype: Any = None) -> Any:
    """The model in a Hugging Face folder (config.json with model.safetensors, or its index and shards).

    Args:
        folder: path of the folder.
        mesh: splits the parameters over its `fsdp` axis; None puts them on the default device.
        dtype: of the parameters; None keeps each tensor's own. Those that a family computes with in float32 anyway
            (decay rates, gated norms, biases of routers, statistics: `wide` in its table) are never made narrower than
            the folder has them.

    Raises:
        ValueError: the folder, its configuration or one of its tensors is missing, unsupported or damaged.
    """
    path = pathlib.Path(folder)
    config = read_config(path)
    module = family(config.model_type)
    if hasattr(module, "without_absent"):
        config = module.without_absent(config, checkpoint.tensor_names(path))
    abstract = nnx.eval_shape(lambda: module.Model(config, rngs=nnx.Rngs(0)))
    tables = [layout(config) for layout in (module.weights, getattr(module, "stacked_weights", None)) if layout]
    return checkpoint.load(abstract, tables, path, mesh=mesh, dtype=dtype, dropped=module.DROPPED)


def save_pretrained(
    model: Any,
    folder: str | os.PathLike[str],
    *,
    companions: str | os.PathLike[str] | None = None,
    max_shard_bytes: int = 5_000_000_000,
) -> None:
    """Writes a folder that `from_pretrained`, and transformers, read.

    config.json is what the model was read from, except that a `dtype` in it follows the weights. The folder appears
    whole or not at all; an earlier export in its place is replaced.

    Args:
        model: of any family.
        folder: created, with its parents.
        companions: a folder whose tokenizer, chat template and processor files, as far as it has them, are copied.
        max_shard_bytes: weights beyond it go to several files and an index.

    Raises:
        ValueError: the folder holds something other than an earlier export.
    """
    config = model.config.to_dict()
    for part in (config, *(value for value in config.values() if isinstance(value, dict))):
        for key in ("dtype", "torch_dtype"):
            if part.get(key) is not None:
                part[key] = jnp.dtype(model.embed_tokens[...].dtype).name
    weights = family(model.config.model_type).weights(model.config)
    source = None if companions is None else pathlib.Path(companions)
    checkpoint.save(weights, model, config, pathlib.Path(folder), max_shard_bytes, source)


def to_hf_names(model_or_config: Any, tree: Any) -> dict[str, Any]:
    """A parameter-shaped tree (parameters, gradients, moments) as the tensors of a Hugging Face folder.

    Args:
        model_or_config: says which family, and its sizes.
        tree: a model, its `nnx.State` or part of it, or a dict of arrays, nested or by dotted path.

    Returns:
        Arrays by name, shaped as on disk.

    Raises:
        ValueError: a leaf that is no parameter of the model.
    """
    config = getattr(model_or_config, "config", model_or_config)
    return dict(checkpoint.named_tensors(family(config.model_type).weights(config), tree))


def hf_names(model_or_config: Any) -> dict[str, tuple[str, ...]]:
    """The Hugging Face names of each parameter, by its dotted path; several where layers are stacked."""
    config = getattr(model_or_config, "config", model_or_config)
    return {weight.path: weight.names for weight in family(config.model_type).weights(config)}
