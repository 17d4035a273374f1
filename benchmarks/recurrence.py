"""Recurrences, forward + backward: the whole sequence on one device, and split over cp of them, on the same cores."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.common import Contender, Problem, Row, Settings, measure, on_mesh, reference
from cpjax.recurrence import gated_delta_rule, ssd
from cpjax.shard import layout_from_name, make_sharder

HEADS, WIDTH = 8, 64


def run(settings: Settings) -> Iterator[list[Row]]:
    """The rows of one problem after the other."""
    for length in settings.lengths:
        for name, (function, problem) in {"gated delta rule": _delta(length), "Mamba2": _ssd(length)}.items():
            ways = [("identity", 1), ("zigzag", settings.cp)]
            if not settings.quick:
                ways.append(("contiguous", settings.cp))
            contenders = [_contender(function, problem, *way) for way in ways]
            yield measure("recurrence", name, length, contenders, settings.seconds)


def _contender(function: Callable[..., Any], problem: Problem, layout: str, cp: int) -> Contender:
    sharder = make_sharder(problem.cotangent.shape[1], layout_from_name(layout, cp))
    name = "cpjax, one device" if cp == 1 else f"cpjax {layout}, cp={cp}"
    order = sharder.indices(np.arange(cp))
    return on_mesh(name, problem, lambda *tokens: function(*tokens, sharder=sharder), cp, order)


def _delta(length: int) -> tuple[Callable[..., Any], Problem]:
    rng = np.random.default_rng(0)
    q, k, v, cotangent = (rng.normal(size=(1, length, HEADS, WIDTH)) for _ in range(4))
    q, k = (x / np.linalg.norm(x, axis=-1, keepdims=True) for x in (q, k))
    log_decay = -0.1 * rng.exponential(size=(1, length, HEADS))
    beta = rng.uniform(size=(1, length, HEADS))

    def step(state: jax.Array, token: Any) -> tuple[jax.Array, jax.Array]:
        q, k, v, g, beta = token
        state = jnp.exp(g)[..., None, None] * state
        state += k[..., None] * (beta[..., None] * (v - jnp.einsum("bhkv,bhk->bhv", state, k)))[..., None, :]
        return state, jnp.einsum("bhkv,bhk->bhv", state, q)

    return gated_delta_rule, _problem(step, (q, k, v, log_decay, beta), cotangent)


def _ssd(length: int) -> tuple[Callable[..., Any], Problem]:
    rng = np.random.default_rng(0)
    x, b, c, cotangent = (rng.normal(size=(1, length, heads, WIDTH)) for heads in (HEADS, 1, 1, HEADS))
    dt = 0.1 * rng.exponential(size=(1, length, HEADS))
    a = -np.linspace(0.1, 2, HEADS, dtype=np.float32)

    def function(x: jax.Array, dt: jax.Array, b: jax.Array, c: jax.Array, **options: Any) -> jax.Array:
        return ssd(x, dt, jnp.asarray(a), b, c, **options)

    def step(state: jax.Array, token: Any) -> tuple[jax.Array, jax.Array]:
        x, dt, b, c = token
        state = jnp.exp(a * dt)[..., None, None] * state + b[..., None] * (dt[..., None] * x)[..., None, :]
        return state, jnp.einsum("bhnp,bn->bhp", state, c[:, 0])

    return function, _problem(step, (x, dt, b, c), cotangent)


def _problem(step: Callable[..., Any], tokens: tuple[np.ndarray, ...], cotangent: np.ndarray) -> Problem:
    """The reference goes token by token, in spans whose states are computed again in the backward pass."""
    length, span = cotangent.shape[1], 64
    tokens, cotangent = jax.tree.map(lambda x: x.astype(np.float32), (tokens, cotangent))

    def definition(*tokens: jax.Array) -> jax.Array:
        spans = jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0).reshape(-1, span, 1, *x.shape[2:]), tokens)
        start = jnp.zeros((1, HEADS, WIDTH, WIDTH))
        _, out = jax.lax.scan(jax.checkpoint(lambda state, span: jax.lax.scan(step, state, span)), start, spans)
        return jnp.moveaxis(out.reshape(length, 1, HEADS, WIDTH), 0, 1)

    wanted = reference(definition, tokens, cotangent)
    return Problem(tokens, cotangent, cotangent, np.arange(length), wanted)
