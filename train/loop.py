"""A training run, top to bottom: prepare, say what will be done, train, evaluate, export."""

from __future__ import annotations

import contextlib
import os
import pathlib
import shlex
import signal
import sys
import time
from collections.abc import Iterator
from types import FrameType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh
from rich.console import Console

from cpjax import __version__
from cpjax.mesh import make_mesh
from cpjax.models import family, from_pretrained, save_pretrained
from cpjax.models.common.experts import share_experts
from cpjax.models.common.sharding import check_ep, check_tp
from cpjax.shard import layout_from_name
from cpjax.train.ahead import ahead_weight, freeze_patterns, without_heads
from cpjax.train.checkpoint import Checkpoints, check_folder, claim_folder, shapes_of
from cpjax.train.config import Config
from cpjax.train.data import RecordError
from cpjax.train.distill import load_teacher
from cpjax.train.errors import InputError, computing, sentence
from cpjax.train.logs import Logs, Trace, check_packages
from cpjax.train.lora import add_adapters, load_adapter, merge_adapters, save_adapter, weight_table
from cpjax.train.metrics import draw_metrics, read_metrics
from cpjax.train.optimizer import make_optimizer, make_schedule
from cpjax.train.processes import everywhere, first_text, is_first, meet, together
from cpjax.train.progress import Speed, held_out, show_progress
from cpjax.train.report import describe_parameters, relative_change
from cpjax.train.step import (
    TrainState,
    init_state,
    make_train_step,
    merge_model,
    place_batch,
    split_model,
)
from cpjax.train.task import open_task


def train(config: Config, devices: str) -> int:
    """Starts or resumes a run.

    Args:
        devices: what it runs on, in words.

    Returns:
        0 when the run is complete, 1 when its loss did not stay finite, 128 + the signal that stopped it.

    Raises:
        ValueError: options that do not fit each other, the devices, or the run in the output folder; nothing has been
            written then.
        InputError: data turned out to be bad while it trained; what was trained is saved.
    """
    console = Console(highlight=False, soft_wrap=True, quiet=not is_first())
    say = console.print
    run, out = config.run, pathlib.Path(config.run.out)
    with together():
        check_folder(config)
        check_packages(run)
    mesh = make_mesh(config.mesh.dp, config.mesh.fsdp, config.mesh.cp, config.mesh.tp)
    meet(mesh)
    layout = layout_from_name(config.mesh.layout, config.mesh.cp)
    compute, on_cpu, transport = config.model.compute, mesh.devices.flat[0].platform == "cpu", config.mesh.transport
    if on_cpu and compute == "bfloat16" and config.mesh.cp > 1 and transport != "ring":
        raise ValueError(
            f"bfloat16 with --mesh.transport {transport} crashes XLA's compiler for CPUs: use ring, float32, or GPUs"
        )

    with together():
        task = open_task(config, layout)
        if run.keep_best and run.keep_best not in task.measures():
            choice = ", ".join(task.measures()) or "none, as there are no --records.held_out"
            raise ValueError(f"--run.keep_best is {run.keep_best}: the metrics to choose from are {choice}")
        check_tp(task.model_config, config.mesh.tp, "the model")
        check_ep(task.model_config, config.mesh.ep, config.mesh.cp, "the model")
        if config.optimizer.balance and not hasattr(family(task.model_config.model_type).Model, "router_loss"):
            raise ValueError(
                f"--optimizer.balance is {config.optimizer.balance}, but {task.model_config.model_type} models have no "
                "balance loss: drop it"
            )
        graphdef, state, optimizer, names = prepare(config, task.model_config, mesh)
    teacher = load_teacher(config, task.model_config, mesh) if config.distill.teacher else None
    name = class_name(task.model_config)
    ahead = ahead_weight(config.optimizer, names)
    schedule = make_schedule(config.optimizer, run.steps)
    sizes = describe_parameters(state.params | state.frozen, names)
    frozen_size = sum(array.size for array in state.frozen.values())
    forward: dict[str, Any] = {
        "transport": config.mesh.transport,
        "kernel": config.mesh.kernel,
        "dtype": jnp.dtype(compute),
        "remat": config.model.remat,
    }
    train_step = make_train_step(
        graphdef,
        optimizer,
        schedule,
        mesh,
        accumulate=run.accumulate,
        ema=config.optimizer.ema,
        ahead=ahead,
        router_loss=config.optimizer.balance,
        **forward,
    )
    evaluate = task.make_evaluation(graphdef, mesh, **forward)

    batch, sharder = task.next_batch()
    jax.eval_shape(train_step, state, place_batch(batch, mesh), sharder, teacher)  # what does not fit is said here

    with together():
        claim = claim_folder(config) if is_first() else contextlib.nullcontext()
    checkpoints = Checkpoints(config)
    if run.resume:
        state = shapes_of(state) if checkpoints.last_step is not None else state
        restored = checkpoints.restore(state, mesh, say)
        say(f"resuming after step {restored.step}" if restored else "no checkpoint yet: starting from step 0")
        if restored:
            state = restored
            task.restore(checkpoints.data)
            batch, sharder = task.next_batch()
    first = int(state.step)
    log, trace = Logs(config, first) if is_first() else None, Trace(run.profiled(first), out / "profile")
    all_sizes = sum(array.size for array in (state.params | state.frozen).values())
    counted = task.model_config if ahead else without_heads(task.model_config)
    speed = Speed(mesh, counted, 1 - frozen_size / all_sizes, teacher and without_heads(teacher.config))

    start = f"from {config.model.path}" if config.model.path else "from scratch"
    if sizes_given := config.model.sizes_given() if config.model.path else ():
        start += f", which says its sizes itself: {', '.join(sizes_given)} are not used"
    say(f"cpjax {__version__}: trains {name} {start}")
    say(f"devices     {devices}")
    say(f"mesh        {config.mesh.words}")
    say(f"sequence    {layout.name} layout, {config.mesh.transport} transport: {sharder.length:,} tokens, "
        f"padded to {sharder.padded_length:,}, {sharder.local_length:,} per device")  # fmt: skip
    for line in task.describe():
        say(f"data        {line}")
    parts = f", in {run.accumulate} parts" if run.accumulate > 1 else ""
    say(f"step        {run.batch_size} rows, {batch['input_ids'].size:,} tokens{parts}")
    say(f"parameters  {sizes}" + (f"; {frozen_size:,} of them frozen" if frozen_size else ""))
    if teacher:
        size, distill = sum(array.size for array in teacher.arrays.values()), config.distill
        say(f"teacher     {distill.teacher}: {size:,} parameters, ratio {distill.ratio}, temperature "
            f"{distill.temperature}")  # fmt: skip
    left = f"steps {first + 1} to {run.steps}" if first < run.steps else f"complete, all {run.steps} steps are taken"
    say(f"run         {left}, seed {run.seed}, into {out}")
    if config.optimizer.warmup >= run.steps:
        peak = config.optimizer.lr * run.steps / config.optimizer.warmup
        say(f"warmup      {config.optimizer.warmup} steps, all of the run: the learning rate only grows, to {peak:.3g}")

    python = shlex.quote(os.path.relpath(sys.executable) if sys.prefix.startswith(os.getcwd()) else sys.executable)
    resume = f"{python} -m cpjax.train --config {shlex.quote(str(out / 'config.yaml'))} --run.resume true"

    broken = False
    with (
        computing(),
        claim,
        contextlib.closing(checkpoints),
        contextlib.closing(log) if log else contextlib.nullcontext(),
        contextlib.closing(trace),
        catch_signals() as caught,
        show_progress(console, first, run.steps) as advance,
    ):
        for step in range(first + 1, run.steps + 1):
            started = time.perf_counter()
            trace.begin(step)
            state, metrics = train_step(state, place_batch(batch, mesh), sharder, teacher)
            used, position = batch, task.state()
            problem: InputError | OSError | None = None
            try:
                if step < run.steps:
                    batch, sharder = task.next_batch()  # while the devices work
            except (InputError, OSError) as error:
                problem = error
            record: dict[str, Any] = {"step": step} | {name: float(value) for name, value in metrics.items()}
            record |= speed.record(used, record["tokens"], time.perf_counter() - started)
            trace.end(step)
            broken = record["nonfinite"] >= run.max_nonfinite
            signals = everywhere(caught)
            if step % run.eval_every == 0 or step == run.steps:
                try:
                    record |= evaluate(state.best, state.frozen)
                except (InputError, OSError) as error:
                    problem = problem or error
            reason = first_text(sentence(problem) if problem else "")
            stop = bool(signals or reason) or broken or step == run.steps
            if log:
                log.write(record)
            if step % run.save_every == 0 or stop or checkpoints.is_best(record):
                checkpoints.save(state, step, record, position)
            advance(record)
            if reason:
                skip = isinstance(problem, RecordError) and config.records.broken != "skip"
                raise InputError(
                    f"{reason}; stopped after step {step}, which is saved: mend the data"
                    + (", or add --records.broken skip," if skip else "")
                    + f" and continue with {resume}"
                ) from problem
            if stop:
                break

    done = int(state.step)
    if broken:
        replay = out / f"nonfinite-{done}.npz"
        if is_first():
            np.savez(replay, **used)  # type: ignore[arg-type]
        say(
            f"stopped after step {done}: the loss or a gradient of the last {int(state.nonfinite)} steps was not "
            f"finite; they changed no parameter, the state is saved in checkpoint {done}, and the batch of step "
            f"{done}, as the training step takes it, in {replay}"
        )
        return 1
    if done < run.steps:
        say(f"stopped by {signals[0].name} after step {done}, which is saved; continue with\n{resume}")
        return 128 + signals[0]

    best = checkpoints.best_step or done
    if best < done:
        state = shapes_of(state)
        with contextlib.closing(Checkpoints(config)) as kept:
            state = kept.read(best, state, mesh)
    result: dict[str, Any] = {}
    if is_first():
        records = read_metrics(out / "metrics.jsonl")
        result = next(record for record in records if record["step"] == best)
        draw_metrics(records, out / "curves.png", f"{task.describe()[0]}\ncp {layout.cp}, {layout.name} layout")
    model, adapter, export = merge_model(graphdef, state.best, state.frozen), out / "adapter", out / "export"
    if config.lora.rank:
        save_adapter(model, adapter, config.lora, os.path.abspath(config.model.path))
        merge_adapters(model)
    if exported := not config.lora.rank or config.lora.merge:
        save_pretrained(model, export, companions=config.model.path or None)
        if is_first():
            task.write_card(export, result, name)
    changes = relative_change(make_base(config, task.model_config, mesh), model, names, mesh)
    say("moved       " + ", ".join(f"{part} {change:.2g}" for part, change in changes.items())
        + " (change since the start, relative to the norm)")  # fmt: skip
    for line in held_out(result):
        say(line)
    if left_out := task.left_out():
        say(f"left out    {left_out}")
    say(f"picture     {out / 'curves.png'}")
    say(f"metrics     {out / 'metrics.jsonl'}")
    chosen = f", of step {best}, the best by {run.keep_best}" if checkpoints.best_step else ""
    say(f"checkpoints {out / 'checkpoints'}")
    say(f"resume      {resume}")
    if config.lora.rank:
        say(f"adapter     {adapter}{chosen}")
    if exported:
        say(f"export      {export}{chosen}")
        if task.ask:
            say(f"try it      {python} -m {task.ask} {shlex.quote(str(export))}")
    else:
        merged = shlex.quote(str(out / "merged"))
        say(f"merge it    {python} -m cpjax.train.lora {shlex.quote(str(adapter))} {merged}")
    return 0


def prepare(
    config: Config, model_config: Any, mesh: Mesh
) -> tuple[nnx.GraphDef, TrainState, optax.GradientTransformation, dict[str, tuple[str, ...]]]:
    """Structure of the model, the state before the first step on the mesh, the optimizer, and the tensors' names.

    Raises:
        ValueError: a folder that cannot be used, or options that do not fit the model.
    """
    model = make_model(config, model_config, mesh)
    share_experts(model, config.mesh.ep)
    table = weight_table(model)
    names = {weight.path: weight.names for weight in table}
    graphdef, params, frozen = split_model(model, freeze_patterns(config.optimizer, names), names)
    optimizer = make_optimizer(config.optimizer, table, params)
    average, scaled = config.optimizer.ema > 0, config.model.compute == "float16"
    return graphdef, init_state(params, frozen, optimizer, mesh, average=average, scaled=scaled), optimizer, names


def class_name(model_config: Any) -> str:
    """The model's class in transformers."""
    return model_config.to_dict().get("architectures", [family(model_config.model_type).Model.__name__])[0]


def make_model(config: Config, model_config: Any, mesh: Mesh) -> Any:
    """The model before the first step, with the adapters that are to be trained."""
    model = make_base(config, model_config, mesh)
    if config.lora.path:
        load_adapter(model, pathlib.Path(config.lora.path), config.lora)
    elif config.lora.rank:
        add_adapters(model, config.lora, config.run.seed)
    return model


def make_base(config: Config, model_config: Any, mesh: Mesh) -> Any:
    """The model without adapters: from a Hugging Face folder, split over the mesh, or fresh weights from the seed."""
    dtype = jnp.dtype(config.model.dtype)
    if config.model.path:
        return from_pretrained(config.model.path, mesh=mesh, dtype=dtype)
    model_class = family(model_config.model_type).Model
    return model_class(model_config, rngs=nnx.Rngs(config.run.seed), dtype=dtype)


@contextlib.contextmanager
def catch_signals() -> Iterator[list[signal.Signals]]:
    """Collects SIGTERM and Ctrl-C instead of dying of them; a second one has its usual effect."""
    caught: list[signal.Signals] = []
    usual = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}

    def handle(number: int, frame: FrameType | None) -> None:
        caught.append(signal.Signals(number))
        for each, handler in usual.items():
            signal.signal(each, handler)

    for number in usual:
        signal.signal(number, handle)
    try:
        yield caught
    finally:
        for number, handler in usual.items():
            signal.signal(number, handler)
