"""`--check`: whether the chosen mesh gives the loss and the gradients of a single device, before a run is started."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from rich.console import Console

from cpjax.mesh import AXES, make_mesh
from cpjax.models import family
from cpjax.models.common.checkpoint import Weight
from cpjax.models.common.experts import share_experts
from cpjax.models.common.sharding import check_ep, to_host
from cpjax.shard import IGNORE, layout_from_name
from cpjax.train.ahead import ahead_weight
from cpjax.train.config import Config, LoraConfig
from cpjax.train.lora import add_adapters, weight_table
from cpjax.train.processes import is_first, meet, together
from cpjax.train.report import by_part
from cpjax.train.step import Arrays, Teacher, init_state, make_train_step, place_arrays, place_batch, split_model
from cpjax.train.task import host_batch, read_model_config

LOSS, GRADIENT = 1e-6, 1e-5
"""Largest differences in float32: of the loss, and of a gradient relative to its tensor's largest entry."""

PATCHES = 128
"""Image patches of a row: two images, each longer than what a rank holds in one run."""

KEEP = optax.GradientTransformation(
    lambda params: jax.tree.map(jnp.zeros_like, params),
    lambda grads, state, params=None: (jax.tree.map(jnp.zeros_like, grads), grads),
)
"""An optimizer that changes nothing, and whose state after a step is the gradient."""


def check(config: Config) -> int:
    """Takes one step of a small model on one device and on the mesh of the options, and compares them.

    The model is the user's, cut down by its family's `reduced`, with adapters and teacher as in the options, in
    float32; rows, documents and images are synthetic and hard: of several lengths, one row with a single label, one
    with none. All parameters are trained, whatever the options freeze.

    Returns:
        0 if loss and gradients are the same, 1 if not.

    Raises:
        ValueError: options that do not fit each other or the devices.
    """
    say = Console(highlight=False, soft_wrap=True, quiet=not is_first()).print
    with together():
        model_config = read_model_config(config)
        check_ep(model_config, config.mesh.ep, config.mesh.cp, "the model")
    small = family(model_config.model_type).reduced(model_config)
    rows = make_rows(config, small)
    axes = {name: getattr(config.mesh, name) for name in AXES}
    what = f"LoRA of rank {config.lora.rank} on " if config.lora.rank else ""
    say(f"checks      {what}a small {type(model_config).__module__.split('.')[-2]} in float32: {len(rows)} synthetic "
        f"rows of up to {len(rows[0].input_ids)} tokens")  # fmt: skip
    say(f"mesh        {config.mesh.words}, {config.mesh.layout} layout, {config.mesh.transport} transport, against one "
        "device")  # fmt: skip
    with jax.default_matmul_precision("highest"):
        wanted_loss, wanted = gradients(config, small, rows, dict.fromkeys(AXES, 1), accumulate=1)
        loss, found = gradients(config, small, rows, axes, accumulate=config.run.accumulate)

    loss_error = abs(loss - wanted_loss) / abs(wanted_loss)
    errors = {name: difference(found[name], wanted[name]) for name in wanted}
    worst = max(errors, key=lambda name: errors[name])
    say(f"loss        {loss:.7g}, on one device {wanted_loss:.7g}: relative difference {loss_error:.1e}")
    say(f"gradients   of {len(errors)} tensors: they differ by at most {errors[worst]:.1e} of a tensor's largest "
        f"entry, in {worst}")  # fmt: skip
    wrong = [name for name, error in errors.items() if not error <= GRADIENT]
    if not wrong and loss_error <= LOSS:
        say(f"right       within {LOSS} (loss) and {GRADIENT} (gradients)")
        return 0
    if wrong:
        say(f"WRONG       {len(wrong)} gradients differ by more than {GRADIENT}; in the order of the forward pass the "
            f"first is {wrong[0]} ({errors[wrong[0]]:.1e}) and the last, which the backward pass meets first, "
            f"{wrong[-1]} ({errors[wrong[-1]]:.1e})")  # fmt: skip
    else:
        say(f"WRONG       the loss differs by more than {LOSS}")
    return 1


def make_rows(config: Config, small: Any) -> list[Any]:
    """The fewest rows, at least two, that the mesh and the microbatches can split."""
    module, rng = family(small.model_type), np.random.default_rng(config.run.seed)
    length = max(16 * config.mesh.cp, 48) + 5
    patches = PATCHES if config.records.patches or not config.records.files else 0
    rows = []
    for number in range(max(config.parts, 2)):
        row = module.synthetic_row(small, length - 3 * (number % 4), patches, rng, documents=2)
        if number in (1, 2):
            labels = np.array(row.labels)
            labels[np.flatnonzero(labels != IGNORE)[2 - number :]] = IGNORE  # one label, or none
            row = dataclasses.replace(row, labels=labels)
        rows.append(row)
    return rows


def gradients(
    config: Config, small: Any, rows: Sequence[Any], axes: Mapping[str, int], accumulate: int
) -> tuple[float, dict[str, np.ndarray]]:
    """The loss, and the gradients by Hugging Face name, in the order of the forward pass.

    Several processes compute what takes a single device each by itself.
    """
    mesh = make_mesh(*axes.values(), devices=jax.local_devices() if math.prod(axes.values()) == 1 else None)
    if mesh.size > 1:
        meet(mesh)
    layout = layout_from_name(config.mesh.layout, mesh.shape["cp"])
    patches = sum(len(media.patches) for media in rows[0].media)
    parts = axes["dp"] * axes["fsdp"] * accumulate
    batch, sharder = host_batch(small, rows, layout, len(rows[0].input_ids), patches, parts)
    table, graphdef, params, frozen = random_model(config.lora, small, config.mesh.ep, seed=0)
    teacher = None
    if config.distill.teacher:
        _, structure, arrays, buffers = random_model(LoraConfig(), small, config.mesh.ep, seed=1)
        teacher = Teacher(
            place_arrays(arrays | buffers, mesh), structure, config.distill.ratio, config.distill.temperature
        )
    step = make_train_step(
        graphdef, KEEP, lambda step: 1.0, mesh, accumulate=accumulate,
        ahead=ahead_weight(config.optimizer, params | frozen), transport=config.mesh.transport,
        kernel=config.mesh.kernel, remat=config.model.remat,
    )  # fmt: skip
    state, metrics = step(init_state(params, frozen, KEEP, mesh), place_batch(batch, mesh), sharder, teacher)
    return float(metrics["loss"]), named_in_order({name: to_host(x) for name, x in state.opt_state.items()}, table)


def random_model(lora: LoraConfig, small: Any, ep: int, seed: int) -> tuple[list[Weight], nnx.GraphDef, Arrays, Arrays]:
    """A fresh model, adapters included, moved away from its zeros and symmetries; its table, structure and arrays."""
    model = family(small.model_type).Model(small, rngs=nnx.Rngs(seed))
    share_experts(model, ep)
    if lora.rank:
        add_adapters(model, lora, seed)
    graphdef, params, frozen = split_model(model)
    rng = np.random.default_rng(seed)
    params = {name: array + 0.1 * rng.normal(size=array.shape).astype(np.float32) for name, array in params.items()}
    return weight_table(model), graphdef, params, frozen


def named_in_order(grads: Mapping[str, Any], table: Sequence[Weight]) -> dict[str, np.ndarray]:
    """By Hugging Face name, tower first and head last, layer by layer."""
    weights = {weight.path: weight for weight in table}
    named: dict[str, np.ndarray] = {}
    order = {path: grads[path] for path in weights if path in grads}
    for part, own in by_part(order, {path: weight.names for path, weight in weights.items()}).items():
        pairs = [pair for path, value in own.items() for pair in weights[path].to_disk(value)]
        behind = float("inf") if part == "layers" else 0  # the last norm
        named |= dict(sorted(pairs, key=lambda pair: _layer(pair[0], behind)))
    return named


def _layer(name: str, behind: float) -> float:
    """The number of the layer that a tensor belongs to, `behind` for one that belongs to none."""
    number = re.search(r"^(?!mtp\.).*\.layers\.(\d+)\.", name)
    return int(number[1]) if number else behind


def difference(found: np.ndarray, wanted: np.ndarray) -> float:
    """The largest, relative to the largest entry wanted; 0 / 0 is 0."""
    largest, scale = np.abs(found.astype(np.float64) - wanted).max(), np.abs(wanted).max()
    return float(largest / scale) if scale else float(largest and np.inf)
