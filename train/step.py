"""The training step: one pure function `(state, batch, sharder) -> (state, metrics)`.

Loss and gradients run in one `jax.shard_map` that is manual over cp only. Parameters enter it whole; each rank takes
the gradient of the loss of all ranks with respect to its own copy of them, one microbatch after another, and the sums
are added over the ranks once, at the end. dp, fsdp and tp are left to the compiler.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from cpjax.loss import cross_entropy, distillation_loss
from cpjax.mesh import compiler_options
from cpjax.models.common.experts import RouterSums, balance_loss
from cpjax.models.common.sharding import assemble, cp_axes, cp_specs, put, tree_shardings
from cpjax.shard import IGNORE, Sharder
from cpjax.train.dropout import draw_anew, start_dropout
from cpjax.train.optimizer import moving_average
from cpjax.train.patterns import find
from cpjax.train.precision import LossScale
from cpjax.varying import vary_over

Arrays = dict[str, jax.Array]
"""Arrays by dotted path, for instance "layers.slots.0.mlp.gate_proj.kernel"."""


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["params", "frozen", "opt_state", "step", "nonfinite", "average", "loss_scale"],
    meta_fields=[],
)
@dataclasses.dataclass(frozen=True)
class TrainState:
    """All that a step changes, and the weights that it does not.

    Attributes:
        params: the trained parameters.
        frozen: parameters that get no gradient and no update, and the model's buffers.
        opt_state: optax state of `params`.
        step: int32 scalar, number of steps taken.
        nonfinite: int32 scalar, number of steps in a row, up to the last, that were skipped.
        average: moving average of `params`, in float32 or wider; empty if none is kept.
        loss_scale: for float16, otherwise None.
    """

    params: Arrays
    frozen: Arrays
    opt_state: Any
    step: jax.Array
    nonfinite: jax.Array
    average: Arrays
    loss_scale: LossScale | None

    @property
    def best(self) -> Arrays:
        """What evaluation and export use: the average if one is kept, in the parameters' dtype."""
        return {name: self.average.get(name, array).astype(array.dtype) for name, array in self.params.items()}


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["arrays"], meta_fields=["graphdef", "ratio", "temperature"]
)
@dataclasses.dataclass(frozen=True)
class Teacher:
    """A model that the trained one is to imitate, see `cpjax.loss.distillation_loss`.

    Attributes:
        arrays: all of its parameters and buffers; their dtype is the one that it computes in.
        graphdef: its structure.
        ratio: share of the imitation in the loss.
        temperature: that both models' logits are divided by.
    """

    arrays: Arrays
    graphdef: nnx.GraphDef
    ratio: float
    temperature: float

    @property
    def config(self) -> Any:
        """Configuration of the model."""
        return merge_model(self.graphdef, self.arrays).config


def split_model(
    model: nnx.Module, freeze: Sequence[str] = (), hf_names: Mapping[str, Sequence[str]] | None = None
) -> tuple[nnx.GraphDef, Arrays, Arrays]:
    """Splits a model into its structure, the arrays to train and the others.

    Of a model with adapters (`nnx.LoRAParam`) only these are trained.

    Args:
        freeze: regular expressions, searched in the dotted path of each parameter and in its Hugging Face names.
        hf_names: the Hugging Face names of each dotted path (several where layers are stacked).

    Raises:
        ValueError: a bad pattern, see `find`, or patterns that leave nothing to train.
    """
    graphdef, state = nnx.split(model)
    variables = {".".join(map(str, path)): variable for path, variable in nnx.to_flat_state(state)}
    found = find("freeze pattern", freeze, {name: (hf_names or {}).get(name, ()) for name in variables})
    hit = {name for names in found for name in names}
    adapted = any(isinstance(variable, nnx.LoRAParam) for variable in variables.values())
    kind = nnx.LoRAParam if adapted else nnx.Param
    params: Arrays = {}
    frozen: Arrays = {}
    for name, variable in variables.items():
        trained = isinstance(variable, kind) and name not in hit
        (params if trained else frozen)[name] = variable.get_value()
    if not params:
        raise ValueError(f"freeze patterns {list(freeze)} leave no parameter to train: drop one")
    return graphdef, params, frozen


def merge_model(graphdef: nnx.GraphDef, *arrays: Arrays) -> Any:
    """The model of `split_model`, with these arrays in it."""
    flat: Any = {_path(name): array for part in arrays for name, array in part.items()}
    return nnx.merge(graphdef, nnx.from_flat_state(flat))


def _path(name: str) -> tuple[str | int, ...]:
    return tuple(int(part) if part.isdigit() else part for part in name.split("."))


def init_state(
    params: Arrays,
    frozen: Arrays,
    optimizer: optax.GradientTransformation,
    mesh: Mesh,
    *,
    average: bool = False,
    scaled: bool = False,
) -> TrainState:
    """The state before the first step, placed on the mesh.

    Args:
        average: whether to keep a moving average of the parameters.
        scaled: whether to scale the loss, for float16.
    """

    def rest(params: Arrays) -> TrainState:
        wide = {name: array.astype(_wide(array)) for name, array in params.items()} if average else {}
        zero = jnp.zeros((), jnp.int32)
        return TrainState({}, {}, optimizer.init(params), zero, zero, wide, LossScale.start() if scaled else None)

    params, frozen = place_arrays((params, frozen), mesh)
    state = jax.jit(rest, out_shardings=tree_shardings(mesh, jax.eval_shape(rest, params)))(params)
    return dataclasses.replace(state, params=params, frozen=frozen)


def place_arrays(tree: Any, mesh: Mesh) -> Any:
    """Puts parameters, which every process holds whole or which are on the mesh already, where they live on it."""
    return jax.tree.map(put, tree, tree_shardings(mesh, tree))


def _wide(array: jax.Array) -> Any:
    return jnp.promote_types(array.dtype, jnp.float32)


def place_batch(batch: Mapping[str, np.ndarray], mesh: Mesh) -> Arrays:
    """Puts a host batch on the mesh: rows split over dp and fsdp, tokens whole on every cp rank.

    Every process gives the whole batch.

    Raises:
        ValueError: the rows cannot be split evenly.
    """
    rows, parts = len(batch["input_ids"]), mesh.shape["dp"] * mesh.shape["fsdp"]
    if rows % parts:
        raise ValueError(
            f"a batch of {rows} rows cannot be split over dp {mesh.shape['dp']} x fsdp {mesh.shape['fsdp']}: "
            f"make the batch size a multiple of {parts}"
        )
    return {
        name: put(array, NamedSharding(mesh, P(*[None] * _row_axis(name, array), ("dp", "fsdp"))))
        for name, array in batch.items()
    }


def _row_axis(name: str, array: Any) -> int:
    """The axis of a batch's array that runs over its rows."""
    return int(name == "position_ids" and array.ndim == 3)


def _microbatches(batch: Arrays, sharder: Sharder, count: int) -> tuple[Arrays, dict[str, Any]]:
    """Splits the rows of all arrays, and their maps if they have some, into `count` parts along a new first axis.

    Each part takes its rows from all over the batch, so that none has to move to another device.
    """
    rows = len(batch["input_ids"])

    def split(name: str, array: jax.Array) -> jax.Array:
        axis = _row_axis(name, array)
        before, after = array.shape[:axis], array.shape[axis + 1 :]
        each = array.shape[axis] // rows  # where rows were packed into one, media are still those of each
        array = jnp.moveaxis(array.reshape(*before, rows // count, count, each, *after), axis + 1, 0)
        return array.reshape(count, *before, rows // count * each, *after)

    maps = {"table": sharder.table, "places": sharder.places} if sharder.by_row else {}
    parts = {name: split(name, array) for name, array in batch.items()}
    return parts, {name: split(name, array) for name, array in maps.items()}


def make_train_step(
    graphdef: nnx.GraphDef,
    optimizer: optax.GradientTransformation,
    schedule: optax.Schedule,
    mesh: Mesh,
    *,
    accumulate: int = 1,
    ema: float = 0.0,
    ahead: float = 0.0,
    router_loss: float | None = None,
    **forward: Any,
) -> Callable[..., tuple[TrainState, Arrays]]:
    """The compiled `(state, batch, sharder, teacher=None) -> (state, metrics)`; the old state is given away.

    With a `Teacher`, whose model reads the same batch in the same layout, the loss is that of distillation. The teacher
    has no gradient, and no place in the state.

    A step whose loss or gradient is not finite changes neither parameters, average nor optimizer state, not a bit.

    Metrics are float32 scalars over the whole global batch, the same for every mesh and any number of microbatches:
    loss, accuracy, grad_norm (before clipping), lr, valid_tokens (labels that count), tokens (all but pads), nonfinite
    (steps in a row, up to this one, that were not finite), loss_scale where the loss is scaled, with a teacher ce and
    kl, of which the loss is made, and, where they are part of the loss, the routers' balance loss and loss_ahead, that
    of the heads of multi-token prediction (both before their factors).

    Args:
        optimizer: gives updates at a learning rate of 1, see `make_optimizer`.
        schedule: step, counted from 0, to learning rate.
        accumulate: microbatches, a divisor of the rows that a device holds.
        ema: decay of the moving average, if the state has one.
        ahead: weight, beside the loss, of the mean loss of a model's heads of multi-token prediction (see `outputs`).
            Each is relative to the labels that count (arXiv 2412.19437, equations 24 and 25). 0: there are none.
        router_loss: weight of the routers' balance loss; None: the model's `router_loss`, if it has one.
        forward: keyword arguments of the model's call: transport, kernel, dtype, remat.
    """
    manual = frozenset(["cp"] if mesh.shape["cp"] > 1 else ())  # a manual axis of size 1 beside fsdp breaks XLA

    def local(
        params: Arrays, frozen: Arrays, teacher: Teacher | None, batch: Arrays, valid: jax.Array, scale: jax.Array,
        *, sharder: Sharder, split: Mapping[str, int], teacher_split: Mapping[str, int],
    ) -> tuple[Arrays, Arrays]:  # fmt: skip
        """Loss and its parts, number of right predictions; gradients of the scaled loss; all of the whole step."""
        # Each rank has its own copy from here on of what it holds whole: else every use of such a parameter would add
        # its gradient over the ranks.
        params, frozen, teacher = jax.tree.map(lambda x: vary_over(x, manual), (params, frozen, teacher))
        model = merge_model(graphdef, params, frozen)
        balanced = getattr(model, "router_loss", 0.0) if router_loss is None else router_loss
        softcap = getattr(model, "logit_softcap", None)

        @functools.partial(jax.value_and_grad, has_aux=True)
        def loss_and_grads(
            params: Arrays, batch: Arrays, sharder: Sharder, routed: RouterSums | None
        ) -> tuple[jax.Array, Arrays]:
            own, sums, later = outputs(params, batch, sharder)
            labels = sharder.take_local(batch["labels"])
            if teacher is None:
                loss, correct = cross_entropy(*own, labels, valid_tokens=valid, softcap=softcap)
                parts = {"loss": loss, "correct": correct}
            else:
                model = merge_model(teacher.graphdef, teacher.arrays)
                assemble(model, teacher_split)
                targets = model(batch, sharder, **forward | {"dtype": None, "remat": "none"})
                loss, (ce, kl, correct) = distillation_loss(
                    *own, targets, model.head().astype(targets.dtype), labels, valid_tokens=valid, ratio=teacher.ratio,
                    temperature=teacher.temperature, softcap=softcap,
                    teacher_softcap=getattr(model, "logit_softcap", None),
                )  # fmt: skip
                parts = {"loss": loss, "ce": ce, "kl": kl, "correct": correct}
            if sums is not None:
                whole = routed or jax.lax.psum(sums, tuple(manual))
                balance = balance_loss(sums, whole.chosen, whole.tokens)
                parts |= {"loss": parts["loss"] + balanced * balance, "balance": balance}
            if later:
                losses = [cross_entropy(hidden, own[1], labels, valid_tokens=valid)[0] for hidden, labels in later]
                mean = sum(losses[1:], start=losses[0]) / len(losses)
                parts |= {"loss": parts["loss"] + ahead * mean, "loss_ahead": mean}
            return parts["loss"] * scale, parts

        def outputs(
            params: Arrays, batch: Arrays, sharder: Sharder
        ) -> tuple[tuple[jax.Array, jax.Array], RouterSums | None, list[Any]]:
            """Final hidden states and the head; what routers did, if their balance counts; and what lies further ahead.

            The last are hidden states and labels of each head of multi-token prediction, if these count.
            """
            model = merge_model(graphdef, params, frozen)
            start_dropout(model, batch, sharder)
            assemble(model, split)
            if balanced or ahead:
                hidden, sums, later = model.outputs(batch, sharder, ahead=ahead > 0, **forward)
            else:
                hidden, sums, later = model(batch, sharder, **forward), None, []
            return (hidden, model.head().astype(hidden.dtype)), sums if balanced else None, later

        def route(_: None, part: tuple[Arrays, dict[str, Any]]) -> tuple[None, RouterSums | None]:
            batch, maps = part
            return None, outputs(params, batch, dataclasses.replace(sharder, **maps))[1]

        def add(total: Any, part: tuple[Arrays, dict[str, Any]]) -> tuple[Any, None]:
            batch, maps = part
            (_, parts), grads = loss_and_grads(params, batch, dataclasses.replace(sharder, **maps), routed)
            return jax.tree.map(jnp.add, total, (parts, grads)), None

        if accumulate == 1:
            (_, parts), grads = loss_and_grads(params, batch, sharder, None)
            grads = {name: grad.astype(_wide(grad)) for name, grad in grads.items()}
        else:
            zeros = {name: jnp.zeros(array.shape, _wide(array)) for name, array in params.items()}
            microbatches = _microbatches(batch, sharder, accumulate)
            routed = None
            if balanced:  # the loss of a microbatch needs what the routers do with all of them: one more forward pass
                _, sums = jax.lax.scan(route, None, microbatches)
                routed = jax.lax.psum(jax.tree.map(lambda x: x.sum(0), sums), tuple(manual))
            zero = jnp.zeros((), jnp.result_type(*zeros.values()))
            names = ["loss", *(["ce", "kl"] if teacher else []), *(["balance"] if balanced else [])]
            names += ["loss_ahead"] if ahead else []
            start = {"correct": jnp.int32(0), **dict.fromkeys(names, zero)}, zeros
            start = jax.tree.map(lambda x: vary_over(x, manual), start)
            (parts, grads), _ = jax.lax.scan(add, start, microbatches)
        whole = {name: grad for name, grad in grads.items() if name not in split}  # gathering has added the others
        parts, whole = jax.lax.psum((parts, whole), tuple(manual))
        return parts, grads | whole

    @functools.partial(jax.jit, donate_argnums=0, compiler_options=compiler_options(mesh))
    def train_step(
        state: TrainState, batch: Arrays, sharder: Sharder, teacher: Teacher | None = None
    ) -> tuple[TrainState, Arrays]:
        valid = jnp.sum(batch["labels"] != IGNORE)
        frozen, batch = draw_anew(state.frozen, batch, state.step)
        scale = state.loss_scale.scale if state.loss_scale else jnp.float32(1)
        split = cp_axes(mesh, state.params | state.frozen)
        teacher_split = cp_axes(mesh, teacher.arrays) if teacher else {}
        on_ranks: Any = functools.partial(local, sharder=sharder, split=split, teacher_split=teacher_split)
        if manual:
            specs = cp_specs(state.params, split)
            teacher_specs: Any = cp_specs(teacher.arrays, teacher_split) if teacher else {}
            teacher_specs = teacher and dataclasses.replace(teacher, arrays=teacher_specs)
            on_ranks = jax.shard_map(
                on_ranks,
                mesh=mesh,
                in_specs=(specs, cp_specs(state.frozen, split), teacher_specs, P(), P(), P()),
                out_specs=(P(), specs),
                axis_names=manual,
                check_vma=True,
            )
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            parts, grads = on_ranks(state.params, frozen, teacher, batch, valid, scale)
        correct = parts.pop("correct")
        if state.loss_scale:
            grads = jax.tree.map(lambda grad: grad / scale, grads)
        norm, lr = optax.tree.norm(grads), schedule(state.step)
        finite = jnp.isfinite(parts["loss"]) & jnp.isfinite(norm)

        updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        params = optax.apply_updates(state.params, jax.tree.map(lambda update: lr * update, updates))
        average = moving_average(state.average, params, ema)
        old = (state.params, state.opt_state, state.average)
        params, opt_state, average = jax.tree.map(
            lambda new, old: jnp.where(finite, new, old), (params, opt_state, average), old
        )
        nonfinite = jnp.where(finite, 0, state.nonfinite + 1)
        loss_scale = state.loss_scale and state.loss_scale.after(finite)
        new = TrainState(params, state.frozen, opt_state, state.step + 1, nonfinite, average, loss_scale)
        new = jax.lax.with_sharding_constraint(new, tree_shardings(mesh, new))
        metrics = {
            **parts,
            "accuracy": correct / jnp.maximum(valid, 1),
            "grad_norm": norm,
            "lr": lr,
            "valid_tokens": valid,
            "tokens": jnp.sum(~batch["padding_mask"]),
            "nonfinite": nonfinite,
            **({"loss_scale": scale} if state.loss_scale else {}),
        }
        return new, {name: jnp.asarray(value, jnp.float32) for name, value in metrics.items()}

    return train_step


def run_model(
    function: Callable[[Any, Arrays], jax.Array],
    graphdef: nnx.GraphDef,
    mesh: Mesh,
    params: Arrays,
    frozen: Arrays,
    batch: Arrays,
    *,
    out_specs: P,
) -> jax.Array:
    """`function(model, batch)` on every rank of cp, each with its parts of the parameters and the whole batch."""
    split = cp_axes(mesh, params | frozen)

    def local(params: Arrays, frozen: Arrays, batch: Arrays) -> jax.Array:
        model = merge_model(graphdef, params, frozen)
        assemble(model, split)
        return function(model, batch)

    over_cp = local
    if mesh.shape["cp"] > 1:
        over_cp = jax.shard_map(
            local,
            mesh=mesh,
            in_specs=(cp_specs(params, split), cp_specs(frozen, split), P()),
            out_specs=out_specs,
            axis_names={"cp"},
            check_vma=True,
        )
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        return over_cp(params, frozen, batch)


def make_eval_step(
    graphdef: nnx.GraphDef, mesh: Mesh, *, chunk_size: int = 1024, **forward: Any
) -> Callable[[Arrays, Arrays, Arrays, Sharder], jax.Array]:
    """The compiled `(params, frozen, batch, sharder) -> int32 [B, T]`: the most likely next token at each position.

    Args:
        chunk_size: tokens whose logits are held at once.
        forward: as for `make_train_step`.
    """

    def eval_step(params: Arrays, frozen: Arrays, batch: Arrays, sharder: Sharder) -> jax.Array:
        def predict(model: Any, batch: Arrays) -> jax.Array:
            hidden = model(batch, sharder, **forward)
            chunks = [
                jnp.argmax(model.logits(hidden[:, start : start + chunk_size]), axis=-1)
                for start in range(0, hidden.shape[1], chunk_size)
            ]
            return jnp.concatenate(chunks, axis=1).astype(jnp.int32)

        by_rank = run_model(predict, graphdef, mesh, params, frozen, batch, out_specs=P(None, "cp"))
        return jnp.take_along_axis(by_rank, jnp.broadcast_to(sharder.inverse(), by_rank.shape), axis=1)

    return jax.jit(eval_step, out_shardings=NamedSharding(mesh, P()))  # any process reads all of it
