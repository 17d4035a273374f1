"""`--plan`: what a run will take on GPUs that are not there, from config.json alone."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from rich.console import Console

from cpjax.mesh import AXES, make_mesh
from cpjax.models import family, read_config
from cpjax.models.common.experts import share_experts
from cpjax.models.common.sharding import check_ep, tree_shardings
from cpjax.plan import GPUS, Report, analyse, gpu_mesh
from cpjax.shard import layout_from_name
from cpjax.train.ahead import ahead_weight, freeze_patterns, without_heads
from cpjax.train.config import Config, LoraConfig
from cpjax.train.digits_task import DigitsTask
from cpjax.train.lora import add_adapters, weight_table
from cpjax.train.optimizer import make_optimizer, make_schedule
from cpjax.train.progress import peak_flops, step_flops
from cpjax.train.report import describe_parameters
from cpjax.train.step import Teacher, TrainState, init_state, make_train_step, split_model
from cpjax.train.task import HostBatch, host_batch, read_model_config


def plan(config: Config) -> int:
    """Compiles the training step for the GPUs of `--plan` and says what it takes; nothing is computed or written.

    Records are not read: rows are as long and have as many patches as the options allow.

    Raises:
        ValueError: options that do not fit each other, or no CUDA plugin, see `cpjax.plan.gpu_mesh`.
    """
    jax.config.update("jax_platforms", "cpu")  # JAX offers the CUDA compiler without a GPU only then
    say = Console(highlight=False, soft_wrap=True).print
    sizes = {name: getattr(config.mesh, name) for name in AXES}
    gpu = GPUS[config.plan.gpu]
    mesh = gpu_mesh(sizes, gpu=config.plan.gpu, hosts=config.plan.hosts)
    model_config = read_model_config(config)
    check_ep(model_config, config.mesh.ep, config.mesh.cp, "the model")
    batch, sharder = largest_batch(config, model_config)

    model = abstract_model(model_config, config.model.dtype, config.lora, config.mesh.ep)
    table = weight_table(model)
    names = {weight.path: weight.names for weight in table}
    graphdef, params, frozen = split_model(model, freeze_patterns(config.optimizer, names), names)
    ahead = ahead_weight(config.optimizer, names)
    trained, size = (sum(array.size for array in arrays.values()) for arrays in (params, params | frozen))
    teacher, teacher_config = abstract_teacher(config, mesh)
    say(f"parameters  {describe_parameters(params | frozen, names)}; {trained:,} of them are trained")
    on = f"on {config.plan.hosts} host{'s' * (config.plan.hosts > 1)}"
    say(f"mesh        {config.mesh.words}, {gpu.name}, {on}")
    say(f"step        {config.run.batch_size} rows of up to {sharder.length // sharder.rows:,} tokens, "
        f"{sharder.local_length:,} tokens of a row per device")  # fmt: skip
    say("compiling the training step for them")

    optimizer = make_optimizer(config.optimizer, table, params)
    step: Any = make_train_step(
        graphdef, optimizer, make_schedule(config.optimizer, config.run.steps), mesh,
        accumulate=config.run.accumulate, ema=config.optimizer.ema, ahead=ahead, transport=config.mesh.transport,
        kernel=config.mesh.kernel, dtype=jnp.dtype(config.model.compute), remat=config.model.remat,
    )  # fmt: skip
    state = abstract_state(config, optimizer, params, frozen, mesh)
    report = analyse(step.lower(state, abstract_batch(batch, mesh), sharder, teacher).compile(), config.plan.gpu)
    tokens = int(np.count_nonzero(~batch["padding_mask"]))
    counted = model_config if ahead else without_heads(model_config)
    flops = step_flops(counted, batch, trained / size, teacher_config and without_heads(teacher_config))
    for line in describe(report, config.plan.gpu, mesh.size, tokens, flops):
        say(line)
    return 0


def describe(report: Report, gpu: str, devices: int, tokens: int, flops: float) -> list[str]:
    """The report in lines, with the least time that products, memory and links need for a step."""
    chip = GPUS[gpu]
    moved = report.memory["arguments"] + 2 * report.memory["outputs"]  # the new state is written over the old one
    seconds = {
        "16-bit products": flops / devices / (peak_flops(chip.name) or 1),
        "reading and writing the state": moved / chip.bandwidth,
        "what is sent": report.sent / chip.link,
    }
    slowest = max(seconds, key=lambda name: seconds[name])
    lines = str(report).splitlines()[:2] + collectives(report)
    lines.append(f"per step: {tokens:,} tokens, {flops:.3g} FLOPs that the model needs (recomputation not counted)")
    lines += [f"  {name}: at least {1e3 * value:,.2f} ms" for name, value in seconds.items()]
    lines.append(f"at most {tokens / seconds[slowest]:,.0f} tokens/s, {tokens / seconds[slowest] / devices:,.0f} a "
                 f"device, bound by {slowest}")  # fmt: skip
    return lines


def collectives(report: Report) -> list[str]:
    """What is sent, by kind, and how much of it has computation beside it."""
    lines = []
    for kind in sorted({c.kind for c in report.collectives}):
        own = [c for c in report.collectives if c.kind == kind]
        sent, hidden = (sum(c.times * c.bytes for c in some) for some in (own, [c for c in own if c.beside]))
        lines.append(f"  {kind:<18} {sum(c.times for c in own):>6,} times  {sent / 2**20:>12,.1f} MiB, "
                     f"{hidden / max(sent, 1):.0%} of it beside computation")  # fmt: skip
    return lines


def largest_batch(config: Config, model_config: Any) -> HostBatch:
    """The digits' batch, or rows as long and with as many patches as records may be."""
    layout = layout_from_name(config.mesh.layout, config.mesh.cp)
    if not config.records.files:
        return DigitsTask(config, layout).next_batch()
    tokens, patches, rng = config.records.tokens, config.records.patches, np.random.default_rng(0)
    patches += -patches % model_config.vision.spatial_merge_size**2
    row = family(model_config.model_type).synthetic_row(model_config, tokens, patches, rng)
    return host_batch(model_config, [row] * config.run.batch_size, layout, tokens, patches or None, config.parts)


def abstract_model(model_config: Any, dtype: Any, lora: LoraConfig, ep: int) -> Any:
    """The model's shapes, adapters included."""

    def make() -> Any:
        model = family(model_config.model_type).Model(model_config, rngs=nnx.Rngs(0), dtype=jnp.dtype(dtype))
        if lora.rank:
            add_adapters(model, lora)
        return model

    model = nnx.eval_shape(make)
    share_experts(model, ep)
    return model


def abstract_state(
    config: Config, optimizer: optax.GradientTransformation, params: Any, frozen: Any, mesh: Mesh
) -> TrainState:
    """The shapes of the state before the first step, and where they live."""
    scaled = config.model.compute == "float16"

    def make(params: Any, frozen: Any) -> TrainState:
        return init_state(params, frozen, optimizer, make_mesh(), average=config.optimizer.ema > 0, scaled=scaled)

    return placed(jax.eval_shape(make, params, frozen), mesh)


def abstract_teacher(config: Config, mesh: Mesh) -> tuple[Teacher | None, Any]:
    """The teacher's shapes, in the number format that its config.json names, and its configuration."""
    if not config.distill.teacher:
        return None, None
    model_config = read_config(config.distill.teacher)
    source = model_config.source
    text = source.get("text_config") or {}
    dtype = source.get("dtype") or source.get("torch_dtype") or text.get("dtype") or "float32"
    check_ep(model_config, config.mesh.ep, config.mesh.cp, f"--distill.teacher {config.distill.teacher}")
    graphdef, params, buffers = split_model(abstract_model(model_config, dtype, LoraConfig(), config.mesh.ep))
    arrays = placed(params | buffers, mesh)
    return Teacher(arrays, graphdef, config.distill.ratio, config.distill.temperature), model_config


def placed(tree: Any, mesh: Mesh) -> Any:
    """Shapes with the shardings that parameters and what belongs to them have."""
    return jax.tree.map(
        lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), tree, tree_shardings(mesh, tree)
    )


def abstract_batch(batch: Any, mesh: Mesh) -> dict[str, jax.ShapeDtypeStruct]:
    """As `place_batch` puts it there."""
    return {
        name: jax.ShapeDtypeStruct(
            array.shape, array.dtype,
            sharding=NamedSharding(mesh, P(*[None] * (name == "position_ids" and array.ndim == 3), ("dp", "fsdp"))),
        )
        for name, array in batch.items()
    }  # fmt: skip
