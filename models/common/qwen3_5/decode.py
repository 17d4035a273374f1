"""Reading a prompt, and then one token after another, with a cache."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from cpjax.attention import cached_attention
from cpjax.models.common.cached import decode_layers, prefill_layers
from cpjax.models.common.qwen3_5.model import (
    DecoderLayer,
    GatedAttention,
    GatedDeltaNet,
    LayerGroup,
    Local,
    VisionLanguageModel,
    mrope_angles,
)
from cpjax.recurrence import causal_conv, continue_gated_delta_rule
from cpjax.shard import Identity, make_sharder

Kept = tuple[jax.Array, jax.Array]
"""What a layer keeps, layers of a stack along the first axis G. Full attention: keys and values [G, B, K, C, D].
Linear attention: the last W - 1 inputs of the convolution [G, B, W - 1, channels], and the state [G, B, H, Dk, Dv]."""


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["kept", "readable", "slot", "position"], meta_fields=[]
)
@dataclasses.dataclass(frozen=True)
class Cache:
    """What is kept of the tokens read so far, in C slots a row.

    Attributes:
        kept: by slot of `LayerGroup`.
        readable: bool [B, C], the slots with tokens of the row's last document.
        slot: int32 scalar, that of the next token.
        position: int32 [B], that of the next token, on all three axes.
    """

    kept: tuple[Kept, ...]
    readable: jax.Array
    slot: jax.Array
    position: jax.Array


def prefill(
    model: VisionLanguageModel, batch: Mapping[str, jax.Array], room: int, dtype: Any = None
) -> tuple[jax.Array, Cache]:
    """Reads prompts.

    Args:
        batch: as of the model's call, but each row padded at its front, so that all end in the last column; T tokens
            are at least the width of the convolution. Of several documents in a row, the last one goes on.
        room: tokens to come that the cache shall hold.
        dtype: of activations, keys and values; None: that of the parameters.

    Returns:
        The final hidden state of each row's last token, [B, E], and the cache.
    """
    sharder = make_sharder(batch["input_ids"].shape[1], Identity())
    hidden = model.embed(batch, sharder, dtype)
    local = model.local(batch, sharder, hidden.dtype)
    apply = functools.partial(_prefill_group, local=local, room=room)
    hidden, kept = prefill_layers(model.layers, hidden, apply)
    cache = Cache(
        kept=kept,
        readable=jnp.pad(_goes_on(local), [(0, 0), (0, room)]),
        slot=jnp.asarray(local.padding_mask.shape[1], jnp.int32),
        position=batch["position_ids"][:, :, -1].max(0) + 1,  # a last token of an image is the furthest of its image
    )
    return model.norm(hidden[:, -1]), cache


def decode(model: VisionLanguageModel, tokens: jax.Array, cache: Cache) -> tuple[jax.Array, Cache]:
    """Reads one token of each row, int [B]; there must be room for it in the cache.

    Returns:
        Its final hidden state [B, E], and the cache with it.
    """
    hidden = model.embed_tokens[...][tokens][:, None].astype(cache.kept[0][0].dtype)
    positions = jnp.broadcast_to(cache.position[:, None], (3, len(tokens), 1))
    angles = mrope_angles(model.config.text, positions, jnp.promote_types(hidden.dtype, jnp.float32))
    readable = cache.readable.at[:, cache.slot].set(True)
    apply = functools.partial(_decode_group, angles=angles, readable=readable, slot=cache.slot)
    hidden, kept = decode_layers(model.layers, hidden, cache.kept, apply)
    return model.norm(hidden[:, 0]), Cache(kept, readable, cache.slot + 1, cache.position + 1)


def _goes_on(local: Local) -> jax.Array:
    """bool [B, L]: tokens of the row's last document."""
    return local.document_ids == local.document_ids[:, -1:]


def _prefill_group(group: LayerGroup, x: jax.Array, local: Local, room: int) -> tuple[jax.Array, tuple[Kept, ...]]:
    kept = []
    for layer in group.slots:
        if isinstance(layer.mixer, GatedAttention):
            mix = functools.partial(_prefill_attention, layer.mixer, local=local, room=room)
        else:
            mix = functools.partial(_prefill_delta, layer.mixer, local=local)
        x, new = _layer(layer, x, local.padding_mask, mix)
        kept.append(new)
    return x, tuple(kept)


def _decode_group(
    group: LayerGroup,
    x: jax.Array,
    kept: tuple[Kept, ...],
    number: jax.Array,
    *,
    angles: jax.Array,
    readable: jax.Array,
    slot: jax.Array,
) -> tuple[jax.Array, tuple[Kept, ...]]:
    changed, none = [], jnp.zeros(x.shape[:2], bool)
    for layer, old in zip(group.slots, kept, strict=True):
        if isinstance(layer.mixer, GatedAttention):
            mix = functools.partial(_decode_attention, layer.mixer, angles=angles, readable=readable, slot=slot)
        else:
            mix = functools.partial(_decode_delta, layer.mixer)
        x, new = _layer(layer, x, none, functools.partial(mix, kept=old, number=number))
        changed.append(new)
    return x, tuple(changed)


def _layer(
    layer: DecoderLayer, x: jax.Array, padding_mask: jax.Array, mix: Callable[[jax.Array], tuple[jax.Array, Kept]]
) -> tuple[jax.Array, Kept]:
    mixed, kept = mix(layer.input_layernorm(x))
    x = x + mixed
    return layer.feed_forward(x, padding_mask)[0], kept


def _prefill_attention(mixer: GatedAttention, x: jax.Array, *, local: Local, room: int) -> tuple[jax.Array, Kept]:
    q, k, v, gate = mixer.project(x, local.angles)
    keys, values = (jnp.pad(t.swapaxes(1, 2), [(0, 0), (0, 0), (0, room), (0, 0)]) for t in (k, v))
    return mixer.finish(mixer.attend(q, k, v, local), gate), (keys, values)


def _decode_attention(
    mixer: GatedAttention,
    x: jax.Array,
    *,
    angles: jax.Array,
    readable: jax.Array,
    slot: jax.Array,
    kept: Kept,
    number: jax.Array,
) -> tuple[jax.Array, Kept]:
    q, k, v, gate = mixer.project(x, angles)
    keys, values = kept
    keys, values = keys.at[number, :, :, slot].set(k[:, 0]), values.at[number, :, :, slot].set(v[:, 0])
    out = cached_attention(q[:, 0], keys[number], values[number], readable=readable)
    return mixer.finish(out[:, None], gate), (keys, values)


def _prefill_delta(mixer: GatedDeltaNet, x: jax.Array, *, local: Local) -> tuple[jax.Array, Kept]:
    x = jnp.where(local.padding_mask[..., None], 0, x)
    inputs = mixer.in_proj_qkv(x)
    weight, documents = mixer.conv1d[...].astype(x.dtype), local.document_ids
    mixed = causal_conv(inputs, weight, sharder=local.sharder, document_ids=documents)
    out, state = continue_gated_delta_rule(*mixer.project(x, mixed), document_ids=documents)
    recent = jnp.where(_goes_on(local)[..., None], inputs, 0)[:, x.shape[1] - weight.shape[1] + 1 :]
    return mixer.finish(out, x), (recent, state)


def _decode_delta(mixer: GatedDeltaNet, x: jax.Array, *, kept: Kept, number: jax.Array) -> tuple[jax.Array, Kept]:
    recent, state = kept
    weight = mixer.conv1d[...].astype(x.dtype)
    window = jnp.concatenate([recent[number], mixer.in_proj_qkv(x)], axis=1)
    mixed = causal_conv(window, weight, sharder=make_sharder(window.shape[1], Identity()))[:, -1:]
    out, new = continue_gated_delta_rule(*mixer.project(x, mixed), state=state[number])
    return mixer.finish(out, x), (recent.at[number].set(window[:, 1:]), state.at[number].set(new))
