"""Optimizers, learning rates, and groups of parameters with their own rate or decay."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import optax

from cpjax.models.common.checkpoint import Weight
from cpjax.train.config import OptimizerConfig
from cpjax.train.patterns import find, projections

MUON_RMS = 0.2
"""Root mean square of Muon's updates, as AdamW's: one learning rate and decay serve both (arXiv 2502.16982)."""


def make_schedule(options: OptimizerConfig, steps: int) -> optax.Schedule:
    """The learning rate of each step, counted from 0: linear warmup to the peak, then one of four curves.

    The peak is reached at step `warmup` and the end of the curve one step after the last, so that neither the first
    nor the last step is wasted at a rate of 0.
    """
    lr, warmup, last = options.lr, options.warmup, options.lr * options.final
    rest = max(steps - warmup, 0) + 1
    decay = max(math.ceil(options.decay * steps), 1)
    curve = {
        "cosine": optax.cosine_decay_schedule(lr, rest, alpha=options.final),
        "linear": optax.linear_schedule(lr, last, rest),
        "constant": optax.constant_schedule(lr),
        "wsd": optax.linear_schedule(lr, last, decay, transition_begin=max(rest - decay, 0)),
    }[options.schedule]
    whole = optax.join_schedules([optax.linear_schedule(0.0, lr, warmup), curve], [warmup]) if warmup else curve
    return lambda count: whole(count + 1)


def make_optimizer(
    options: OptimizerConfig, weights: Sequence[Weight], params: Mapping[str, Any]
) -> optax.GradientTransformation:
    """Gradients to updates at a learning rate of 1: the step multiplies them with that of its schedule.

    So the rate depends on the step alone, also after steps that were skipped. Gradients are clipped to a global norm
    first; weight decay is decoupled in all optimizers (arXiv 1711.05101).

    What is a matrix is decided by the tensors in the Hugging Face folder, whichever way they are stacked here. Matrices
    and convolutions decay, vectors do not. Muon takes the projections inside layers, each layer's by itself (one
    that is fused on disk, as q, k and v may be, counts as one matrix), and leaves the others, embeddings and head to
    Adam with Nesterov momentum.

    Args:
        weights: the model's table; parameters that are not in it count as tensors of their own shape.
        params: parameters or their shapes, by dotted path.

    Raises:
        ValueError: a group's pattern is bad, see `find`.
    """
    table = {weight.path: weight for weight in weights}
    own = {name: table.get(name) or Weight(name, (name,)) for name in params}
    on_disk = {name: own[name].shape_on_disk(array.shape) for name, array in params.items()}
    found = find("optimizer.groups pattern", [group.pattern for group in options.groups],
                 {name: weight.names for name, weight in own.items()})  # fmt: skip
    rates = dict.fromkeys(params, 1.0)
    decays = {name: options.weight_decay * (len(on_disk[name]) > 1) for name in params}
    for group, names in reversed(list(zip(options.groups, found, strict=True))):  # the first that matches wins
        rates |= dict.fromkeys(names, group.lr_scale)
        decays |= {
            name: options.weight_decay * (len(on_disk[name]) > 1) if group.weight_decay is None else group.weight_decay
            for name in names
        }

    def finish(updates: dict[str, jax.Array], params: dict[str, jax.Array]) -> dict[str, jax.Array]:
        return {name: rates[name] * (update - decays[name] * params[name]) for name, update in updates.items()}

    b1, b2 = options.betas
    if options.name == "adamw":
        core: optax.GradientTransformation = optax.adam(1.0, b1, b2)
    elif options.name == "adafactor":
        # Rates are absolute, as in transformers' Trainer, not relative to the size of a parameter.
        adafactor = optax.adafactor(1.0, multiply_by_parameter_scale=False)
        core = by_layer(adafactor, {name for name, weight in own.items() if weight.stacked})
    elif options.name == "muon":
        matrix = optax.contrib.MuonDimensionNumbers(-2, -1)
        hidden = {weight.path for weight in projections(weights)}
        core = optax.contrib.muon(
            1.0, beta=options.momentum, adam_b1=b1, adam_b2=b2, consistent_rms=MUON_RMS,
            muon_weight_dimension_numbers={name: matrix if name in hidden else None for name in params},
        )  # fmt: skip
    else:
        core = optax.sgd(1.0, momentum=options.momentum or None)
    clip = optax.clip_by_global_norm(options.clip) if options.clip else optax.identity()
    cast = optax.stateless(lambda grads, params: optax.tree.cast_like(grads, params))
    return optax.chain(clip, cast, core, optax.stateless(finish))


def by_layer(optimizer: optax.GradientTransformation, stacked: set[str]) -> optax.GradientTransformation:
    """An optimizer that sees the parameters one by one, and those that are stacked layer by layer.

    For optimizers that use norms of whole parameters. The state holds one of the inner states for each parameter.
    """

    def init(params: dict[str, jax.Array]) -> dict[str, Any]:
        return {
            name: (jax.vmap(optimizer.init) if name in stacked else optimizer.init)(p) for name, p in params.items()
        }

    def update(updates: dict[str, jax.Array], states: dict[str, Any], params: Any = None) -> tuple[Any, Any]:
        found = {
            name: (jax.vmap(optimizer.update) if name in stacked else optimizer.update)(
                updates[name], states[name], params[name]
            )
            for name in updates
        }
        return {name: pair[0] for name, pair in found.items()}, {name: pair[1] for name, pair in found.items()}

    return optax.GradientTransformation(init, update)


def moving_average(average: Mapping[str, jax.Array], params: Mapping[str, jax.Array], decay: float) -> dict[str, Any]:
    """decay x average + (1 - decay) x params."""
    return {name: decay * old + (1 - decay) * params[name].astype(old.dtype) for name, old in average.items()}
