"""The training step: one pure function `(state, batch) -> (state, metrics)`.

The loss runs in one `jax.shard_map` that is manual over cp only. Parameters enter it whole and alike on all ranks,
so the gradient of each is the sum over ranks, whichever rank used it; dp and fsdp are left to the compiler.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from cpjax.loss import cross_entropy
from cpjax.mesh import compiler_options
from cpjax.models.common.checkpoint import parameter_sharding
from cpjax.shard import IGNORE, Sharder

Arrays = dict[str, jax.Array]
"""Arrays by dotted path, for instance "layers.slots.0.mlp.gate_proj.kernel"."""


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["params", "frozen", "opt_state", "step"], meta_fields=[]
)
@dataclasses.dataclass(frozen=True)
class TrainState:
    """All that a step changes, and the weights that it does not.

    Attributes:
        params: the trained parameters.
        frozen: parameters that get no gradient and no update, and the model's buffers.
        opt_state: optax state of `params`.
        step: int32 scalar, number of steps taken.
    """

    params: Arrays
    frozen: Arrays
    opt_state: Any
    step: jax.Array


def split_model(
    model: nnx.Module, freeze: Sequence[str] = (), hf_names: Mapping[str, Sequence[str]] | None = None
) -> tuple[nnx.GraphDef, Arrays, Arrays]:
    """Splits a model into its structure, the arrays to train and the others.

    Args:
        freeze: regular expressions, searched in the dotted path of each parameter and in its Hugging Face names.
        hf_names: the Hugging Face names of each dotted path (several where layers are stacked).

    Raises:
        ValueError: a pattern that is no regular expression, matches nothing, matches only some of the layers
            stacked in one array, or leaves nothing to train.
    """
    graphdef, state = nnx.split(model)
    params: Arrays = {}
    frozen: Arrays = {}
    used: set[str] = set()
    for path, variable in nnx.to_flat_state(state):
        name = ".".join(map(str, path))
        aliases = (hf_names or {}).get(name, ())
        hits = {pattern for pattern in freeze if _matches(pattern, name, aliases)}
        used |= hits
        is_param = isinstance(variable, nnx.Param)
        (params if is_param and not hits else frozen)[name] = variable.get_value()
    if unused := [pattern for pattern in freeze if pattern not in used]:
        raise ValueError(
            f"freeze pattern {unused[0]!r} matches no parameter: they are named like {next(iter(params))!r}"
        )
    if not params:
        raise ValueError(f"freeze patterns {list(freeze)} leave no parameter to train: drop one")
    return graphdef, params, frozen


def _matches(pattern: str, name: str, aliases: Sequence[str]) -> bool:
    try:
        if re.search(pattern, name):
            return True
    except re.error as error:
        raise ValueError(f"freeze pattern {pattern!r} is not a regular expression: {error}") from None
    matched = [alias for alias in aliases if re.search(pattern, alias)]
    if matched and len(matched) < len(aliases):
        raise ValueError(
            f"freeze pattern {pattern!r} matches {matched[0]!r} but not all of the {len(aliases)} tensors that are "
            f"stacked in {name!r}: freeze all layers of a stack, or none"
        )
    return bool(matched)


def merge_model(graphdef: nnx.GraphDef, *arrays: Arrays) -> Any:
    """The model of `split_model`, with these arrays in it."""
    flat: Any = {_path(name): array for part in arrays for name, array in part.items()}
    return nnx.merge(graphdef, nnx.from_flat_state(flat))


def _path(name: str) -> tuple[str | int, ...]:
    return tuple(int(part) if part.isdigit() else part for part in name.split("."))


def make_schedule(lr: float, steps: int, warmup: int) -> optax.Schedule:
    """Linear warmup that reaches `lr` at step `warmup`, then a cosine that would reach 0 one step after the last."""
    curve = optax.warmup_cosine_decay_schedule(0.0, lr, warmup, max(steps, warmup) + 1)
    return lambda count: curve(count + 1)  # the first step, count 0, is not wasted at a rate of 0


def make_optimizer(
    schedule: optax.Schedule,
    decayed: Mapping[str, bool],
    *,
    betas: tuple[float, float],
    weight_decay: float,
    clip: float,
) -> optax.GradientTransformation:
    """AdamW (arXiv 1711.05101) after clipping to a global norm; clip 0 does not clip.

    Args:
        decayed: by path, whether weight decay applies; where not given, to matrices only.
    """

    def mask(params: Arrays) -> dict[str, bool]:
        return {name: decayed.get(name, array.ndim > 1) for name, array in params.items()}

    adamw = optax.adamw(schedule, b1=betas[0], b2=betas[1], weight_decay=weight_decay, mask=mask)
    return optax.chain(optax.clip_by_global_norm(clip), adamw) if clip else adamw


def init_state(params: Arrays, frozen: Arrays, optimizer: optax.GradientTransformation, mesh: Mesh) -> TrainState:
    """The state before the first step, placed on the mesh."""

    def place(tree: Any) -> Any:
        return jax.tree.map(lambda x: jax.device_put(x, parameter_sharding(mesh, np.shape(x))), tree)

    params = place(params)
    opt_shapes = jax.eval_shape(optimizer.init, params)
    shardings = jax.tree.map(lambda x: parameter_sharding(mesh, x.shape), opt_shapes)
    opt_state = jax.jit(optimizer.init, out_shardings=shardings)(params)
    return TrainState(params, place(frozen), opt_state, place(jnp.zeros((), jnp.int32)))


def place_batch(batch: Mapping[str, np.ndarray], mesh: Mesh) -> Arrays:
    """Puts a host batch on the mesh: rows split over dp and fsdp, tokens whole on every cp rank.

    Raises:
        ValueError: the rows cannot be split evenly.
    """
    rows, parts = len(batch["input_ids"]), mesh.shape["dp"] * mesh.shape["fsdp"]
    if rows % parts:
        raise ValueError(
            f"a batch of {rows} rows cannot be split over dp {mesh.shape['dp']} x fsdp {mesh.shape['fsdp']}: "
            f"make the batch size a multiple of {parts}"
        )
    by_row = NamedSharding(mesh, P(("dp", "fsdp")))
    by_second = NamedSharding(mesh, P(None, ("dp", "fsdp")))
    return {
        name: jax.device_put(array, by_second if name == "position_ids" and array.ndim == 3 else by_row)
        for name, array in batch.items()
    }


def make_train_step(
    graphdef: nnx.GraphDef,
    optimizer: optax.GradientTransformation,
    schedule: optax.Schedule,
    mesh: Mesh,
    transport: str = "ring",
) -> Callable[[TrainState, Arrays, Sharder], tuple[TrainState, Arrays]]:
    """The compiled `(state, batch, sharder) -> (state, metrics)`; the old state is given away.

    Metrics are float32 scalars over the whole global batch, the same for every mesh: loss, accuracy, grad_norm
    (before clipping), lr, valid_tokens (labels that count) and tokens (all but pads).
    """

    def loss_fn(params: Arrays, frozen: Arrays, batch: Arrays, sharder: Sharder, valid: jax.Array):
        def local(params: Arrays, frozen: Arrays, batch: Arrays, valid: jax.Array):
            model = merge_model(graphdef, params, frozen)
            hidden = model(batch, sharder, transport=transport)
            labels = sharder.take_local(batch["labels"])
            parts = cross_entropy(hidden, model.head(), labels, valid_tokens=valid)
            return jax.lax.psum(parts, "cp")

        over_cp = jax.shard_map(local, mesh=mesh, in_specs=P(), out_specs=P(), axis_names={"cp"}, check_vma=True)
        return over_cp(params, frozen, batch, valid)

    @functools.partial(jax.jit, donate_argnums=0, compiler_options=compiler_options(mesh))
    def train_step(state: TrainState, batch: Arrays, sharder: Sharder) -> tuple[TrainState, Arrays]:
        valid = jnp.sum(batch["labels"] != IGNORE)
        grad_fn = jax.value_and_grad(loss_fn, has_aux=True)
        (loss, correct), grads = grad_fn(state.params, state.frozen, batch, sharder, valid)
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        new = TrainState(optax.apply_updates(state.params, updates), state.frozen, opt_state, state.step + 1)
        new = jax.tree.map(lambda x: jax.lax.with_sharding_constraint(x, parameter_sharding(mesh, x.shape)), new)
        metrics = {
            "loss": loss,
            "accuracy": correct / jnp.maximum(valid, 1),
            "grad_norm": optax.tree.norm(grads),
            "lr": schedule(state.step),
            "valid_tokens": valid,
            "tokens": jnp.sum(~batch["padding_mask"]),
        }
        return new, {name: jnp.asarray(value, jnp.float32) for name, value in metrics.items()}

    return train_step


def make_eval_step(
    graphdef: nnx.GraphDef, mesh: Mesh, transport: str = "ring", chunk_size: int = 1024
) -> Callable[[Arrays, Arrays, Arrays, Sharder], jax.Array]:
    """The compiled `(params, frozen, batch, sharder) -> int32 [B, T]`: the most likely next token at each position."""

    def eval_step(params: Arrays, frozen: Arrays, batch: Arrays, sharder: Sharder) -> jax.Array:
        def local(params: Arrays, frozen: Arrays, batch: Arrays) -> jax.Array:
            model = merge_model(graphdef, params, frozen)
            hidden = model(batch, sharder, transport=transport)
            chunks = [
                jnp.argmax(model.logits(hidden[:, start : start + chunk_size]), axis=-1)
                for start in range(0, hidden.shape[1], chunk_size)
            ]
            return jnp.concatenate(chunks, axis=1).astype(jnp.int32)

        over_cp = jax.shard_map(
            local, mesh=mesh, in_specs=P(), out_specs=P(None, "cp"), axis_names={"cp"}, check_vma=True
        )
        by_rank = over_cp(params, frozen, batch)
        return jnp.take(by_rank, sharder.inverse(), axis=1)

    return jax.jit(eval_step)
