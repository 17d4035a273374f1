"""Dropout of adapters: a token draws by its number in the batch, so that mesh and microbatches change nothing.

Recomputation in the backward pass drops what the forward pass did, since draws depend on seeds and numbers alone.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from cpjax.shard import Sharder
from cpjax.train.lora import Adapter

_NUMBERS = "token_numbers"
_ROW = np.uint32(0x9E3779B1)
"""Between the numbers of two rows, modulo 2^32: far from all its small multiples, and free of the padded length."""


def draw_anew(
    frozen: dict[str, jax.Array], batch: dict[str, jax.Array], step: jax.Array
) -> tuple[dict[str, jax.Array], dict[str, jax.Array]]:
    """Gives adapters that drop other seeds than in any other step, and numbers the tokens of the whole batch.

    Args:
        frozen: arrays by dotted path, seeds of adapters among them; without any, all stays as it is.
        batch: of the whole step.
    """
    seeds = {name: seed for name, seed in frozen.items() if name.endswith("adapter.seed")}
    if not seeds:
        return frozen, batch
    draw = jnp.vectorize(lambda seed: jax.random.bits(jax.random.fold_in(jax.random.key(seed), step)))
    anew = {name: draw(seed) for name, seed in seeds.items()}
    rows, places = (jax.lax.broadcasted_iota(jnp.uint32, batch["input_ids"].shape, axis) for axis in (0, 1))
    return frozen | anew, batch | {_NUMBERS: rows * _ROW + places}


def start_dropout(model: nnx.Module, batch: dict[str, jax.Array], sharder: Sharder) -> None:
    """Makes the adapters of a model drop, in the body of `shard_map`; a batch without numbers changes nothing.

    What enters an adapter is this rank's tokens, or, in a vision tower, the same on all ranks.
    """
    if _NUMBERS not in batch:
        return
    numbers = sharder.take_local(batch[_NUMBERS])
    first = batch[_NUMBERS][0, 0]  # sets microbatches apart

    def drop(x: jax.Array, seed: jax.Array, rate: float) -> jax.Array:
        key = jax.random.key(seed)
        if x.shape[:-1] == numbers.shape:
            draw = jax.vmap(
                jax.vmap(lambda n: jax.random.bernoulli(jax.random.fold_in(key, n), 1 - rate, x.shape[-1:]))
            )
            keep = draw(numbers)
        else:
            keep = jax.random.bernoulli(jax.random.fold_in(key, first), 1 - rate, x.shape)
        return jnp.where(keep, x / (1 - rate), 0).astype(x.dtype)

    for _, module in nnx.iter_modules(model):
        if isinstance(module, Adapter):
            module.drop = drop
