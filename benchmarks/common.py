"""What the parts share: a problem with its reference, its contenders, and their rows of the table."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from cpjax.mesh import compiler_options
from cpjax.shard.layout import invert

Row = dict[str, Any]
"""One line of the table: `part`, `problem`, `name` and, as far as they apply, the columns of `benchmarks.output`."""


@dataclasses.dataclass(frozen=True)
class Settings:
    """What to run: ranks, lengths, and the seconds that the timed rounds of one problem may take."""

    cp: int
    lengths: tuple[int, ...]
    seconds: float
    quick: bool


@dataclasses.dataclass(frozen=True)
class Problem:
    """Full sequences in global order, and what must come out.

    Attributes:
        tokens: [B, S, ...], the operands.
        cotangent: of the output, for the timed runs.
        probe: cotangent of the checked run.
        rows: the tokens whose outputs are checked.
        wanted: output at `rows`, then the gradient of each operand under `probe`.
    """

    tokens: tuple[np.ndarray, ...]
    cotangent: np.ndarray
    probe: np.ndarray
    rows: np.ndarray
    wanted: Sequence[Any]

    def error(self, output: Any, gradients: Sequence[Any]) -> float:
        """Largest difference from what is wanted, relative to the largest entry of each array."""
        errors = []
        for got, wanted in zip((output[:, self.rows], *gradients), self.wanted, strict=True):
            got, wanted = (np.asarray(x, np.float32) for x in (got, wanted))
            errors.append(np.abs(got - wanted).max() / np.abs(wanted).max())
        return float(max(errors))


@dataclasses.dataclass
class Contender:
    """One way to compute output and gradients of a problem; without `run`, the note says why there is none."""

    name: str
    run: Callable[[], Any] | None = None  # computes and waits
    max_error: float | None = None
    temp_bytes: int | None = None  # per device
    note: str = ""
    rounds: list[float] = dataclasses.field(default_factory=list)  # seconds


def timed(run: Callable[[], Any]) -> tuple[Any, float]:
    """The result, and the seconds it took."""
    start = time.perf_counter()
    result = run()
    return result, time.perf_counter() - start


def devices(cp: int) -> list[jax.Device]:
    """The default ones if there are enough, else virtual CPU devices."""
    return (jax.devices() if jax.device_count() >= cp else jax.devices("cpu"))[:cp]


def make_mesh(cp: int) -> jax.sharding.Mesh:
    return jax.make_mesh((cp,), ("cp",), devices=devices(cp), axis_types=(jax.sharding.AxisType.Auto,))


def with_gradients(function: Callable[..., Any]) -> Callable[[Any, Any], Any]:
    """Of tokens and the output's cotangent: the output, and the gradient of each operand."""

    def both(tokens: Any, cotangent: Any) -> Any:
        output, pull = jax.vjp(function, *tokens)
        return output, pull(cotangent)

    return both


def reference(function: Callable[..., Any], tokens: Any, cotangent: Any) -> list[Any]:
    """What is `wanted` of a problem, in float32."""
    tokens, cotangent = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), (tokens, cotangent))
    with jax.default_matmul_precision("highest"):
        output, gradients = jax.jit(with_gradients(function))(tokens, cotangent)
    return [output, *gradients]


def on_mesh(
    name: str,
    problem: Problem,
    function: Callable[..., Any],
    cp: int,
    order: np.ndarray | None = None,
    *,
    manual: bool = True,
    check_vma: bool = True,
    note: str = "",
) -> Contender:
    """`function(*tokens)` and its gradients: in shard_map on local tokens, or (not manual) left to the partitioner.

    `order` says which token each slot of the sharded sequence holds.
    """
    mesh, spec = make_mesh(cp), P(None, "cp")
    if manual and cp > 1:
        function = jax.shard_map(
            function, mesh=mesh, in_specs=spec, out_specs=spec, axis_names={"cp"}, check_vma=check_vma
        )
    order = np.arange(problem.cotangent.shape[1]) if order is None else order.reshape(-1)
    back = invert(order, order.size)
    tokens, cotangent, probe = jax.device_put(
        jax.tree.map(lambda x: x[:, order], (problem.tokens, problem.cotangent, problem.probe)),
        NamedSharding(mesh, spec),
    )

    jitted = jax.jit(with_gradients(function), compiler_options=compiler_options(mesh))
    compiled = jitted.lower(tokens, cotangent).compile()
    result, first = timed(lambda: jax.block_until_ready(compiled(tokens, probe)))
    output, gradients = jax.tree.map(lambda x: np.asarray(x)[:, back], result)
    memory = compiled.memory_analysis()
    return Contender(
        name,
        lambda: jax.block_until_ready(compiled(tokens, cotangent)),
        problem.error(output, gradients),
        None if memory is None else memory.temp_size_in_bytes,
        note,
        [first],
    )


def measure(part: str, case: str, length: int, contenders: Sequence[Contender], seconds: float) -> list[Row]:
    """Times all contenders in turn and tells the best of each, relative to that of the first one.

    Not the median: what a busy machine adds to the time of a program is never negative. The checked run counts; one to
    eight rounds follow it.
    """
    start = time.perf_counter()
    for _ in range(8):
        for contender in contenders:
            if contender.run is not None:
                contender.rounds.append(timed(contender.run)[1])
        if time.perf_counter() - start > seconds:
            break
    first = min(contenders[0].rounds)
    rows = []
    for c in contenders:
        row: Row = {"part": part, "problem": f"{case}, S={length}", "case": case, "length": length, "name": c.name}
        if c.run is not None:
            best = min(c.rounds)
            row |= {"seconds": best, "ratio": best / first, "temp_bytes": c.temp_bytes, "max_error": c.max_error}
            row |= {"rounds": c.rounds}
        rows.append({**row, "note": c.note})
    return rows
