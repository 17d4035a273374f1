"""Reading a prompt, and then one token after another, with a cache."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from cpjax.attention import cached_attention
from cpjax.models.common.cached import decode_layers, prefill_layers
from cpjax.models.step3p7.model import Attention, LayerGroup, Local, Step3p7
from cpjax.shard import Identity, make_sharder

Kept = tuple[jax.Array, jax.Array]
"""Keys and values of a layer, [G, B, K, C, D], layers of a stack along the first axis G."""


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["kept", "readable", "slot", "position"], meta_fields=[]
)
@dataclasses.dataclass(frozen=True)
class Cache:
    """What is kept of the tokens read so far, in C slots a row.

    Attributes:
        kept: by stack, and by slot of `LayerGroup`. Sliding layers, too, keep all that they have read.
        readable: bool [B, C], the slots with tokens of the row's last document.
        slot: int32 scalar, that of the next token.
        position: int32 [B], that of the next token.
    """

    kept: tuple[tuple[Kept, ...], ...]
    readable: jax.Array
    slot: jax.Array
    position: jax.Array


def prefill(model: Step3p7, batch: Mapping[str, jax.Array], room: int, dtype: Any = None) -> tuple[jax.Array, Cache]:
    """Reads prompts.

    Args:
        batch: as of `Step3p7.__call__`, but each row padded at its front, so that all end in the last column. Of
            several documents in a row, the last one goes on.
        room: tokens to come that the cache shall hold.
        dtype: of activations, keys and values; None: that of the parameters.

    Returns:
        The final hidden state of each row's last token, [B, E], and the cache.
    """
    sharder = make_sharder(batch["input_ids"].shape[1], Identity())
    hidden = model.embed(batch, sharder, dtype)
    local = model.local(batch, sharder, hidden.dtype)
    kept = []
    for stack in model.layers:
        hidden, new = prefill_layers(stack, hidden, functools.partial(_prefill_group, local=local, room=room))
        kept.append(new)
    cache = Cache(
        kept=tuple(kept),
        readable=jnp.pad(local.document_ids == local.document_ids[:, -1:], [(0, 0), (0, room)]),
        slot=jnp.asarray(hidden.shape[1], jnp.int32),
        position=batch["position_ids"][:, -1] + 1,
    )
    return model.norm(hidden[:, -1]), cache


def decode(model: Step3p7, tokens: jax.Array, cache: Cache) -> tuple[jax.Array, Cache]:
    """Reads one token of each row, int [B]; there must be room for it in the cache.

    Returns:
        Its final hidden state [B, E], and the cache with it.
    """
    hidden = model.embed_tokens[...][tokens][:, None].astype(cache.kept[0][0][0].dtype)
    readable = cache.readable.at[:, cache.slot].set(True)
    apply = functools.partial(
        _decode_group,
        angles=model.angles(cache.position[:, None], hidden.dtype),
        readable=readable,
        slot=cache.slot,
    )
    changed = []
    for stack, old in zip(model.layers, cache.kept, strict=True):
        hidden, new = decode_layers(stack, hidden, old, apply)
        changed.append(new)
    return model.norm(hidden[:, 0]), Cache(tuple(changed), readable, cache.slot + 1, cache.position + 1)


def _prefill_group(group: LayerGroup, x: jax.Array, local: Local, room: int) -> tuple[jax.Array, tuple[Kept, ...]]:
    kept = []
    for layer in group.slots:
        normed, attn = layer.input_layernorm(x), layer.self_attn
        q, k, v = attn.project(normed, local.sliding_angles if attn.sliding else local.angles)
        keys, values = (jnp.pad(t.swapaxes(1, 2), [(0, 0), (0, 0), (0, room), (0, 0)]) for t in (k, v))
        kept.append((keys, values))
        x = layer.finish(x, attn.finish(attn.attend(q, k, v, local), normed), local.padding_mask)
    return x, tuple(kept)


def _decode_group(
    group: LayerGroup,
    x: jax.Array,
    kept: tuple[Kept, ...],
    number: jax.Array,
    *,
    angles: tuple[jax.Array, jax.Array],
    readable: jax.Array,
    slot: jax.Array,
) -> tuple[jax.Array, tuple[Kept, ...]]:
    changed = []
    for layer, (keys, values) in zip(group.slots, kept, strict=True):
        normed, attn = layer.input_layernorm(x), layer.self_attn
        q, k, v = attn.project(normed, angles[attn.sliding])
        keys, values = keys.at[number, :, :, slot].set(k[:, 0]), values.at[number, :, :, slot].set(v[:, 0])
        seen = readable & _in_window(attn, readable.shape[1], slot)
        q = q[:, 0] * (attn.scale * attn.head_dim**0.5)  # cached_attention has a scale of its own
        out = cached_attention(q, keys[number], values[number], readable=seen)
        x = layer.finish(x, attn.finish(out[:, None], normed), jnp.zeros(x.shape[:2], bool))
        changed.append((keys, values))
    return x, tuple(changed)


def _in_window(attn: Attention, count: int, slot: jax.Array) -> jax.Array:
    """bool [C]: slots near enough to this one; tokens of a document lie in consecutive ones."""
    place = jnp.arange(count)
    return place >= 0 if attn.window is None else place > slot - attn.window
