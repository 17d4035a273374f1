"""The teacher of a distillation, from its Hugging Face folder."""

from __future__ import annotations

import dataclasses
import pathlib
import re
from collections.abc import Mapping
from typing import Any

from jax.sharding import Mesh

from cpjax.models import from_pretrained, read_config
from cpjax.models.common.experts import share_experts
from cpjax.models.common.sharding import check_ep, check_tp
from cpjax.train.config import Config
from cpjax.train.data.encode import read_tokenizer
from cpjax.train.step import Teacher, place_arrays, split_model

_SAME = re.compile(r"(vocab_size|token_id|in_channels|patch_size|merge_size|num_position_embeddings)$")
"""Fields of a model's configuration that decide what is in a batch, which both models read."""


def load_teacher(config: Config, student: Any, mesh: Mesh) -> Teacher:
    """The teacher, split over the mesh as the student is; it computes in the number format of its folder.

    Args:
        student: the student's model configuration.

    Raises:
        ValueError: no model is in the folder, see `from_pretrained`, or one of another family, vocabulary, special
            tokens, image patches or tokenizer than the student's; or it cannot run on this mesh.
    """
    folder = config.distill.teacher
    own_config = read_config(folder)
    own, wanted = _fields(own_config), _fields(student)
    for name in sorted(own.keys() | wanted.keys()):
        if own.get(name) != wanted.get(name):
            raise ValueError(
                f"--distill.teacher {folder} has {name} {own.get(name)}, but the student's is {wanted.get(name)}: one "
                "batch goes to both, so give a teacher of the same family, tokenizer and image patches"
            )
    if config.model.path:
        _check_tokenizers(pathlib.Path(folder), pathlib.Path(config.model.path))
    check_tp(own_config, config.mesh.tp, f"--distill.teacher {folder}")
    check_ep(own_config, config.mesh.ep, config.mesh.cp, f"--distill.teacher {folder}")
    model = from_pretrained(folder, mesh=mesh)
    share_experts(model, config.mesh.ep)
    dtype = model.embed_tokens[...].dtype.name
    on_cpu, transport = mesh.devices.flat[0].platform == "cpu", config.mesh.transport
    if on_cpu and dtype == "bfloat16" and config.mesh.cp > 1 and transport != "ring":
        raise ValueError(
            f"the bfloat16 of --distill.teacher {folder} with --mesh.transport {transport} crashes XLA's compiler for "
            "CPUs: use ring, a teacher in float32, or GPUs"
        )
    graphdef, params, buffers = split_model(model)
    arrays = place_arrays(params | buffers, mesh)
    return Teacher(arrays, graphdef, config.distill.ratio, config.distill.temperature)


def _fields(config: Any) -> dict[str, Any]:
    """The family, and the fields that must be the same, by dotted name."""
    found = {"model_type": config.model_type}

    def collect(values: Mapping[str, Any], prefix: str) -> None:
        for name, value in values.items():
            if isinstance(value, Mapping):
                collect(value, f"{prefix}{name}.")
            elif _SAME.search(name):
                found[prefix + name] = value

    collect({name: value for name, value in dataclasses.asdict(config).items() if name != "source"}, "")
    return found


def _check_tokenizers(teacher: pathlib.Path, student: pathlib.Path) -> None:
    """Compares them token by token, where both folders have one."""
    if not all((folder / "tokenizer.json").is_file() for folder in (teacher, student)):
        return
    own, wanted = (read_tokenizer(folder).get_vocab() for folder in (teacher, student))
    for token in sorted(own.keys() | wanted.keys()):
        if own.get(token) != wanted.get(token):
            raise ValueError(
                f"the tokenizer of --distill.teacher {teacher} has the id {own.get(token)} for {token!r}, that of "
                f"--model.path {student} has {wanted.get(token)}: give a teacher trained with the same tokenizer"
            )
