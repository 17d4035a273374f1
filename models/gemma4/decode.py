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
from cpjax.models.gemma4.config import SLIDING
from cpjax.models.gemma4.model import Gemma4, KeysValues, LayerGroup, Local, angles, by_group
from cpjax.shard import Identity, make_sharder


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["kept", "readable", "slot", "position"], meta_fields=[]
)
@dataclasses.dataclass(frozen=True)
class Cache:
    """What is kept of the tokens read so far, in C slots a row.

    Attributes:
        kept: keys and values [G, B, K, C, D] of the G groups of layers that have their own, by slot of `LayerGroup`.
        readable: bool [B, C], the slots with tokens of the row's last document.
        slot: int32 scalar, that of the next token.
        position: int32 [B], that of the next token.
    """

    kept: tuple[KeysValues, ...]
    readable: jax.Array
    slot: jax.Array
    position: jax.Array


def prefill(model: Gemma4, batch: Mapping[str, jax.Array], room: int, dtype: Any = None) -> tuple[jax.Array, Cache]:
    """Reads prompts.

    Args:
        batch: as of `Gemma4.__call__`, but each row padded at its front, so that all end in the last column. Of several
            documents in a row, the last one goes on.
        room: tokens to come that the cache shall hold.
        dtype: of activations, keys and values; None: that of the parameters.

    Returns:
        The final hidden state of each row's last token, [B, E], and the cache.
    """
    sharder = make_sharder(batch["input_ids"].shape[1], Identity())
    hidden = model.embed(batch, sharder, dtype)
    local = model.local(batch, sharder, hidden.dtype)
    inputs, stacks = model.per_layer_inputs(batch["input_ids"], hidden), model.config.text.stacks
    apply = functools.partial(_prefill_group, local=local, shared={})
    hidden, kept = prefill_layers(model.layers, hidden, apply, by_group(inputs, stacks[0]))
    if model.shared_layers is not None:
        apply = functools.partial(_prefill_group, local=local, shared=_last(model.layers, kept))
        hidden, _ = prefill_layers(model.shared_layers, hidden, apply, by_group(inputs, stacks[1]))
    goes_on = local.document_ids == local.document_ids[:, -1:]
    cache = Cache(
        kept=jax.tree.map(lambda x: jnp.pad(x.swapaxes(2, 3), [(0, 0)] * 3 + [(0, room), (0, 0)]), kept),
        readable=jnp.pad(goes_on, [(0, 0), (0, room)]),
        slot=jnp.asarray(goes_on.shape[1], jnp.int32),
        position=batch["position_ids"][:, -1] + 1,
    )
    return model.norm(hidden[:, -1]), cache


def decode(model: Gemma4, tokens: jax.Array, cache: Cache) -> tuple[jax.Array, Cache]:
    """Reads one token of each row, int [B]; there must be room for it in the cache.

    Returns:
        Its final hidden state [B, E], and the cache with it.
    """
    text = model.config.text
    hidden = model.embed_text(tokens[:, None], cache.kept[0][0].dtype)
    inputs = model.per_layer_inputs(tokens[:, None], hidden)
    readable = cache.readable.at[:, cache.slot].set(True)
    near = jnp.arange(readable.shape[1]) > cache.slot - text.sliding_window
    apply = functools.partial(
        _decode_group,
        angles=angles(text, cache.position[:, None], jnp.promote_types(hidden.dtype, jnp.float32)),
        readable={True: readable & near, False: readable},
        slot=cache.slot,
    )
    own = by_group(inputs, text.stacks[0])
    hidden, kept = decode_layers(model.layers, hidden, cache.kept, functools.partial(apply, shared={}), own)
    if model.shared_layers is not None:
        apply, own = functools.partial(apply, shared=_last(model.layers, kept)), by_group(inputs, text.stacks[1])
        hidden, _ = decode_layers(model.shared_layers, hidden, (), apply, own)
    return model.norm(hidden[:, 0]), Cache(kept, readable, cache.slot + 1, cache.position + 1)


def _last(layers: Any, kept: tuple[KeysValues, ...]) -> dict[str, KeysValues]:
    """Of each type of layer, what the last one keeps."""
    return {layer.self_attn.kind: (k[-1], v[-1]) for layer, (k, v) in zip(layers.slots, kept, strict=True)}


def _prefill_group(
    group: LayerGroup, x: jax.Array, own: jax.Array | None = None, *, local: Local, shared: Mapping[str, KeysValues]
) -> tuple[jax.Array, tuple[KeysValues, ...]]:
    kept = []
    for number, layer in enumerate(group.slots):
        x, kv = layer(x, local, shared.get(layer.self_attn.kind), None if own is None else own[:, :, number])
        kept.append(kv)
    return x, tuple(kept)


def _decode_group(
    group: LayerGroup,
    x: jax.Array,
    kept: tuple[KeysValues, ...],
    number: jax.Array,
    own: jax.Array | None = None,
    *,
    angles: Mapping[str, jax.Array],
    readable: Mapping[bool, jax.Array],
    slot: jax.Array,
    shared: Mapping[str, KeysValues],
) -> tuple[jax.Array, tuple[KeysValues, ...]]:
    changed = []
    for i, layer in enumerate(group.slots):
        attn = layer.self_attn
        y = layer.input_layernorm(x)
        if attn.kind in shared:
            keys, values = shared[attn.kind]
        else:
            k, v = attn.keys_values(y, angles[attn.kind])
            keys, values = kept[i]
            keys, values = keys.at[number, :, :, slot].set(k[:, 0]), values.at[number, :, :, slot].set(v[:, 0])
            changed.append((keys, values))
            keys, values = keys[number], values[number]
        q = attn.queries(y, angles[attn.kind])[:, 0]
        out = cached_attention(q, keys, values, readable=readable[attn.kind == SLIDING], scale=1.0)
        pads = jnp.zeros(x.shape[:2], bool)
        x = layer.finish(x, attn.finish(out[:, None]), None if own is None else own[:, :, i], pads)
    return x, tuple(changed)
