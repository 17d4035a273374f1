"""Text from a model, token by token, for any family."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from cpjax.models import family
from cpjax.models.common.cached import split_rows
from cpjax.models.common.sharding import constrain, put

MIN_LENGTH = 64
"""Prompts are padded to this many tokens, or twice, four times ... as many."""


def generate(
    model: Any,
    rows: Sequence[Any],
    max_new_tokens: int,
    *,
    stop_tokens: Sequence[int] = (),
    temperature: float = 0.0,
    top_p: float = 1.0,
    seed: int = 0,
    batch_size: int = 8,
    mesh: Mesh | None = None,
    dtype: Any = None,
) -> list[list[int]]:
    """Goes on with each prompt, reading its own tokens, until a stop token or `max_new_tokens`.

    Prompts of about the same length are put in one batch. A program is compiled for each padded length and number of
    features of images, both rounded up to powers of two. What a prompt gives depends on its batch by rounding alone.

    Every device reads whole prompts: rows, not tokens, are split over all axes of the mesh, cp too. All processes give
    the same rows and get all texts.

    Args:
        model: of any family.
        rows: prompts, `Row` of the family; labels are ignored.
        stop_tokens: ids that end a text.
        temperature: 0 takes the most likely token; otherwise one is drawn from softmax(logits / temperature).
        top_p: draws from the fewest most likely tokens that have at least this probability together
            (arXiv 1904.09751).
        seed: of the draws; those of a row depend on it and the row's number alone.
        batch_size: prompts that are read together, at most; a multiple of the number of devices.
        mesh: where the parameters are, None for the default device.
        dtype: to compute in, None for that of the parameters.

    Returns:
        The new tokens of each row, up to and with its stop token.

    Raises:
        ValueError: an option out of range, or a row that the family's `prepare` refuses.
    """
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens={max_new_tokens} must be at least 1")
    if temperature < 0 or not 0 < top_p <= 1:
        raise ValueError(f"temperature={temperature} must not be negative, and top_p={top_p} must be in (0, 1]")
    devices = 1 if mesh is None else mesh.size
    if batch_size < 1 or batch_size % devices:
        raise ValueError(f"batch_size={batch_size} must be a multiple of {devices}, the devices it is split over")
    patches = [_patches(model, row) for row in rows]
    order = sorted(range(len(rows)), key=lambda number: (patches[number], len(rows[number].input_ids)))
    size = min(batch_size, max(-(-len(rows) // devices), 1) * devices)
    groups = [order[start : start + size] for start in range(0, len(rows), size)]
    batches = [_host_batch(model, rows, numbers + numbers[-1:] * (size - len(numbers))) for numbers in groups]

    graphdef, params = nnx.split(model)
    stops = np.asarray(stop_tokens, np.int32)
    draw = np.asarray([temperature, top_p], np.float32) if temperature else None
    out: list[list[int]] = [[] for _ in rows]
    for numbers, batch in zip(groups, batches, strict=True):
        with jax.set_mesh(mesh) if mesh is not None else contextlib.nullcontext():
            tokens = _generate(
                params, _place(batch, mesh), stops, draw, seed, graphdef=graphdef, count=max_new_tokens, dtype=dtype
            )
        for number, row in zip(numbers, np.asarray(tokens).tolist(), strict=False):  # without those that fill up
            ends = [i for i, token in enumerate(row) if token in stop_tokens]
            out[number] = row[: ends[0] + 1] if ends else row
    return out


def _power_of_two(count: int) -> int:
    """The smallest that is at least `count`; 0 for 0."""
    return 1 << (count - 1).bit_length() if count else 0


def _patches(model: Any, row: Any) -> int:
    """Image patches of a row, those that become one feature times a power of two."""
    unit = model.config.vision.spatial_merge_size**2
    return unit * _power_of_two(-(-sum(len(media.patches) for media in row.media) // unit))


def _host_batch(model: Any, rows: Sequence[Any], numbers: Sequence[int]) -> dict[str, tuple[np.ndarray, int]]:
    """The prompts of a batch, each padded at its front, and the numbers of their rows.

    Returns:
        Arrays, and the axis of each that holds the rows.
    """
    module = family(model.config.model_type)
    chosen = [rows[number] for number in numbers]
    length = max(MIN_LENGTH, _power_of_two(max(len(row.input_ids) for row in chosen)))
    patches = max(_patches(model, row) for row in chosen)
    try:
        batch = module.prepare(model.config, chosen, length=length, num_patches=patches or None)
    except ValueError as error:
        raise ValueError(f"in the batch of prompts {list(numbers)}, counted from 0: {error}") from None
    del batch["labels"]
    pads = batch["padding_mask"].sum(1, keepdims=True)
    sources = (np.arange(length) - pads) % length  # [B, T]
    out = {"numbers": (np.asarray(numbers, np.int32), 0)}
    for name, array in batch.items():
        axis = module.STREAMS[name].axis if name in module.STREAMS else array.ndim - 1
        if axis is not None:
            index = sources.reshape(*[1] * (axis - 1), *sources.shape, *[1] * (array.ndim - axis - 1))
            array = np.take_along_axis(array, index, axis)
        out[name] = (array, 0 if axis is None else axis - 1)
    return out


def _place(batch: Mapping[str, tuple[np.ndarray, int]], mesh: Mesh | None) -> dict[str, Any]:
    """The arrays of a host batch, rows split over all axes of the mesh if there is one."""
    if mesh is None:
        return {name: array for name, (array, _) in batch.items()}
    return {
        name: put(array, NamedSharding(mesh, P(*[None] * axis, mesh.axis_names)))
        for name, (array, axis) in batch.items()
    }


@functools.partial(jax.jit, static_argnames=("graphdef", "count", "dtype"))
def _generate(
    params: Any,
    batch: dict[str, jax.Array],
    stops: jax.Array,
    draw: jax.Array | None,
    seed: int,
    *,
    graphdef: nnx.GraphDef,
    count: int,
    dtype: Any = None,
) -> jax.Array:
    """int32 [B, count], the new tokens; unspecified behind a stop token.

    Args:
        draw: temperature and top_p; None takes the most likely token.
    """
    model = nnx.merge(graphdef, params)
    module = family(model.config.model_type)
    keys = jax.vmap(functools.partial(jax.random.fold_in, jax.random.key(seed)))(batch["numbers"])

    def choose(hidden: jax.Array, step: jax.Array | int) -> jax.Array:
        logits = split_rows(model.logits(hidden))
        logits = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
        if draw is None:
            return jnp.argmax(logits, axis=-1).astype(jnp.int32)
        now = jax.vmap(jax.random.fold_in, (0, None))(keys, step)
        return jax.vmap(sample, (0, 0, None, None))(now, logits, *draw)

    def more(carry: Any) -> jax.Array:
        step, _, done, *_ = carry
        return (step < count) & ~done.all()

    def step_on(carry: Any) -> Any:
        step, tokens, done, out, cache = carry
        hidden, cache = module.decode(model, tokens, cache)
        tokens = choose(hidden, step)
        return step + 1, tokens, done | jnp.isin(tokens, stops), out.at[:, step].set(tokens), cache

    hidden, cache = module.prefill(model, batch, count - 1, dtype)
    tokens = choose(hidden, 0)
    out = jnp.zeros((len(tokens), count), jnp.int32).at[:, 0].set(tokens)
    carry = jnp.asarray(1, jnp.int32), tokens, jnp.isin(tokens, stops), out, cache
    out = jax.lax.while_loop(more, step_on, carry)[3]
    return constrain(out, P())


def sample(key: jax.Array, logits: jax.Array, temperature: jax.Array, top_p: jax.Array) -> jax.Array:
    """A token drawn from softmax(logits / temperature), of the fewest most likely that together have `top_p`.

    Args:
        logits: [V].
    """
    logits = logits / temperature
    descending = -jnp.sort(-logits)
    share = jax.nn.softmax(descending)
    before = jnp.cumsum(share) - share  # of those that are more likely
    least = jnp.min(jnp.where(before < top_p, descending, jnp.inf))
    return jax.random.categorical(key, jnp.where(logits >= least, logits, -jnp.inf)).astype(jnp.int32)
