"""The Gemma 4 vision-language model: sliding-window layers, every sixth or so full attention, and a vision tower."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from cpjax.attention import Mask, attention
from cpjax.models.common.experts import Experts, Routing, route
from cpjax.models.common.layers import (
    Buffer,
    GatedMLP,
    Linear,
    Remat,
    RMSNorm,
    apply_rope,
    rms_norm,
    scan_layers,
    splice,
    stack_layers,
)
from cpjax.models.gemma4.audio import Audio
from cpjax.models.gemma4.config import FULL, SLIDING, Config, Stack, TextConfig
from cpjax.models.gemma4.layers import geglu, scaled_norm
from cpjax.models.gemma4.vision import Vision
from cpjax.shard import Sharder
from cpjax.varying import vary_over, varying_axes

RESIDUAL_SCALE = 0.1
"""Fresh layers write to the residual stream at a tenth of its scale: at the start a token is mostly itself."""

KeysValues = tuple[jax.Array, jax.Array]
"""Normed and turned keys and normed values of a layer, [B, L, K, D] each."""


@dataclasses.dataclass(frozen=True)
class Local:
    """What every layer reads beside the hidden states: this rank's part of the token streams.

    Attributes:
        angles: [B, L, D/2] rope angles by type of layer.
        document_ids: [B, L], 0 = pad.
        padding_mask: [B, L], True = pad.
        vision_group_ids: [B, L], -1 = text; None where all attention is causal.
        sharder: layout of the sequence.
        transport, kernel: how attention moves keys and values, and what computes it, see `cpjax.attention.attention`.
    """

    angles: Mapping[str, jax.Array]
    document_ids: jax.Array
    padding_mask: jax.Array
    vision_group_ids: jax.Array | None
    sharder: Sharder
    transport: str
    kernel: str


class Attention(nnx.Module):
    """Grouped-query attention of normed queries, keys and values, unscaled.

    A full layer may have keys for values (before norm and rope); a `shared` one takes both from an earlier layer. Fresh
    query and key projections of full layers are equal, so that a token starts by attending to tokens like itself;
    those of sliding layers are not, so that it starts by attending to all that are near.
    """

    v_proj: Linear | None = None

    def __init__(self, config: TextConfig, kind: str, shared: bool, *, dtype: Any, rngs: nnx.Rngs):
        self.kind, self.eps, self.head_dim = kind, config.rms_norm_eps, config.width(kind)
        self.rope_scale = config.rope_of(kind).attention_factor
        self.window = (config.sliding_window - 1, None) if kind == SLIDING else (None, None)
        size, heads, kv_heads = config.hidden_size, config.num_attention_heads, config.kv_heads(kind)
        self.q_proj = Linear(size, heads * self.head_dim, dtype=dtype, rngs=rngs)
        self.o_proj = Linear(heads * self.head_dim, size, dtype=dtype, rngs=rngs)
        self.q_norm = scaled_norm(self.head_dim, self.eps, self.head_dim**-0.5, dtype=dtype)
        if not shared:
            self.k_proj = Linear(size, kv_heads * self.head_dim, dtype=dtype, rngs=rngs)
            self.k_norm = RMSNorm(self.head_dim, self.eps, dtype=dtype)
            if kind == FULL:
                keys = self.k_proj.kernel[...].reshape(size, kv_heads, self.head_dim)
                self.q_proj.kernel = nnx.Param(jnp.repeat(keys, heads // kv_heads, axis=1).reshape(size, -1))
            if kind == SLIDING or not config.attention_k_eq_v:
                self.v_proj = Linear(size, kv_heads * self.head_dim, dtype=dtype, rngs=rngs)

    def __call__(self, x: jax.Array, local: Local, kv: KeysValues | None) -> tuple[jax.Array, KeysValues]:
        """x [B, L, E] -> [B, L, E], and the keys and values that it saw: `kv` if given, else its own."""
        angles = local.angles[self.kind]
        if kv is None:
            kv = self.keys_values(x, angles)
        mask = Mask(
            document_ids=local.document_ids,
            padding_mask=local.padding_mask,
            window=self.window,
            vision_group_ids=local.vision_group_ids if self.kind == SLIDING else None,
            windowed_groups=True,
        )
        out = attention(
            self.queries(x, angles), *kv, sharder=local.sharder, mask=mask, scale=1.0, transport=local.transport,
            kernel=local.kernel,
        )  # fmt: skip
        return self.finish(out), kv

    def queries(self, x: jax.Array, angles: jax.Array) -> jax.Array:
        """x [B, L, E] -> [B, L, H, D]."""
        q = self.q_norm(self.q_proj(x).reshape(*x.shape[:2], -1, self.head_dim))
        return apply_rope(q, angles, self.rope_scale)

    def keys_values(self, x: jax.Array, angles: jax.Array) -> KeysValues:
        """x [B, L, E] -> its own keys and values."""
        shape = (*x.shape[:2], -1, self.head_dim)
        k = self.k_proj(x).reshape(shape)
        v = k if self.v_proj is None else self.v_proj(x).reshape(shape)
        return apply_rope(self.k_norm(k), angles, self.rope_scale), rms_norm(v, self.eps).astype(x.dtype)

    def finish(self, out: jax.Array) -> jax.Array:
        """What attention read, [B, L, H, D] -> [B, L, E]."""
        return self.o_proj(out.reshape(*out.shape[:2], -1))


class Router(nnx.Module):
    """Chooses the experts of each token by the largest of softmax(logits), which sum to one before they are scaled."""

    def __init__(self, config: TextConfig, *, dtype: Any, rngs: nnx.Rngs):
        self.eps, self.count = config.rms_norm_eps, config.top_k_experts
        self.scale = nnx.Param(jnp.ones(config.hidden_size, dtype))
        self.proj = Linear(config.hidden_size, config.num_experts, dtype=dtype, rngs=rngs)
        self.per_expert_scale = nnx.Param(jnp.ones(config.num_experts, dtype))

    def __call__(self, x: jax.Array) -> Routing:
        """x [B, L, E]."""
        x = rms_norm(x, self.eps).astype(x.dtype) * self.scale[...].astype(x.dtype) * x.shape[-1] ** -0.5
        wide = jnp.promote_types(x.dtype, jnp.float32)
        experts, weights = route(jax.nn.softmax(self.proj(x).astype(wide)), self.count)
        return Routing(experts, weights * self.per_expert_scale[...].astype(wide)[experts])


class Mixture(nnx.Module):
    """Routed experts beside the MLP of a layer, and the norms around both."""

    def __init__(self, config: TextConfig, *, dtype: Any, rngs: nnx.Rngs):
        size, eps = config.hidden_size, config.rms_norm_eps
        self.router = Router(config, dtype=dtype, rngs=rngs)
        self.experts = Experts(
            config.num_experts, size, config.moe_intermediate_size, activation=geglu, dtype=dtype, rngs=rngs
        )
        self.post_feedforward_layernorm_1 = RMSNorm(size, eps, dtype=dtype)
        self.pre_feedforward_layernorm_2 = RMSNorm(size, eps, dtype=dtype)
        self.post_feedforward_layernorm_2 = RMSNorm(size, eps, dtype=dtype)

    def __call__(self, x: jax.Array, y: jax.Array, padding_mask: jax.Array) -> jax.Array:
        """x [B, L, E], what the layer's MLP read before its norm, and y, what it made of it -> what both made."""
        routed = self.experts(self.pre_feedforward_layernorm_2(x), self.router(x), padding_mask)
        return self.post_feedforward_layernorm_1(y) + self.post_feedforward_layernorm_2(routed)


class DecoderLayer(nnx.Module):
    """Attention and gated MLP, each with a norm before and after it; then, in the E-series, the per-layer input."""

    def __init__(self, config: TextConfig, kind: str, shared: bool, *, dtype: Any, rngs: nnx.Rngs):
        size, eps, own = config.hidden_size, config.rms_norm_eps, config.hidden_size_per_layer_input
        hidden = config.intermediate_size * (2 if shared and config.use_double_wide_mlp else 1)
        self.input_layernorm = RMSNorm(size, eps, dtype=dtype)
        self.self_attn = Attention(config, kind, shared, dtype=dtype, rngs=rngs)
        self.post_attention_layernorm = scaled_norm(size, eps, RESIDUAL_SCALE, dtype=dtype)
        self.pre_feedforward_layernorm = RMSNorm(size, eps, dtype=dtype)
        self.mlp = GatedMLP(size, hidden, activation=geglu, dtype=dtype, rngs=rngs)
        self.mixture = Mixture(config, dtype=dtype, rngs=rngs) if config.enable_moe_block else None
        self.post_feedforward_layernorm = scaled_norm(size, eps, RESIDUAL_SCALE, dtype=dtype)
        if own:
            self.per_layer_input_gate = Linear(size, own, dtype=dtype, rngs=rngs)
            self.per_layer_projection = Linear(own, size, dtype=dtype, rngs=rngs)
            self.post_per_layer_input_norm = scaled_norm(size, eps, RESIDUAL_SCALE, dtype=dtype)
        self.layer_scalar = Buffer(jnp.ones(1, dtype))

    def __call__(
        self, x: jax.Array, local: Local, kv: KeysValues | None, own: jax.Array | None
    ) -> tuple[jax.Array, KeysValues]:
        """x [B, L, E] -> [B, L, E], and the layer's keys and values.

        Args:
            kv: shared ones.
            own: [B, L, P], the layer's own input.
        """
        out, kv = self.self_attn(self.input_layernorm(x), local, kv)
        return self.finish(x, out, own, local.padding_mask), kv

    def finish(self, x: jax.Array, out: jax.Array, own: jax.Array | None, padding_mask: jax.Array) -> jax.Array:
        """What follows attention, whose output for x is `out`."""
        x = x + self.post_attention_layernorm(out)
        y = self.mlp(self.pre_feedforward_layernorm(x))
        if self.mixture is not None:
            y = self.mixture(x, y, padding_mask)
        x = x + self.post_feedforward_layernorm(y)
        if own is not None:
            gated = geglu(self.per_layer_input_gate(x), own)
            x = x + self.post_per_layer_input_norm(self.per_layer_projection(gated))
        return x * self.layer_scalar[...].astype(x.dtype)


class LayerGroup(nnx.Module):
    """The shortest repeating pattern of layers (five sliding, one full), see `scan_layers`."""

    def __init__(self, config: TextConfig, stack: Stack, *, dtype: Any, rngs: nnx.Rngs):
        shared = stack.first >= config.first_shared
        self.slots = nnx.List([DecoderLayer(config, kind, shared, dtype=dtype, rngs=rngs) for kind in stack.pattern])

    def __call__(
        self,
        state: tuple[jax.Array, Mapping[str, KeysValues]],
        local: Local,
        shared: Mapping[str, KeysValues],
        own: jax.Array | None = None,
        *,
        slot: int,
    ) -> tuple[jax.Array, Mapping[str, KeysValues]]:
        """Hidden states [B, L, E], and by type the last keys and values, of those types that are asked for.

        Args:
            shared: keys and values that layers have in place of their own, by type.
            own: [B, L, slots, P], the inputs of each layer.
        """
        (x, kept), layer = state, self.slots[slot]
        kind = layer.self_attn.kind
        x, kv = layer(x, local, shared.get(kind), None if own is None else own[:, :, slot])
        return x, {name: kv if name == kind else old for name, old in kept.items()}


class Gemma4(nnx.Module):
    """The whole model.

    Fresh weights: matrices normal with standard deviation in^-0.5, token embeddings hidden_size^-0.5 (they are scaled
    by its inverse, and are the head as well), norms neutral, but `RESIDUAL_SCALE` where a layer writes to the residual
    stream, and D^-0.5 for queries, whose products with keys are not scaled.

    Args:
        config: sizes and token ids.
        rngs: source of the initial weights.
        dtype: of the parameters.
    """

    def __init__(self, config: Config, *, rngs: nnx.Rngs, dtype: Any = jnp.float32):
        self.config = config
        text = config.text
        self.logit_softcap = text.final_logit_softcapping

        def table(*shape: int, scale: float) -> nnx.Param:
            return nnx.Param((scale * jax.random.normal(rngs.params(), shape, dtype)).astype(dtype))

        self.embed_tokens = table(text.vocab_size, text.hidden_size, scale=text.hidden_size**-0.5)
        self.visual = Vision(config.vision, text.hidden_size, dtype=dtype, rngs=rngs)
        self.audio: Any = Audio(config.audio, text.hidden_size, dtype=dtype, rngs=rngs) if config.audio else None

        def layers(stack: Stack) -> LayerGroup:
            return stack_layers(lambda rngs: LayerGroup(text, stack, dtype=dtype, rngs=rngs), stack.groups, rngs)

        self.layers, *shared = map(layers, text.stacks)
        self.shared_layers = shared[0] if shared else None
        self.norm = RMSNorm(text.hidden_size, text.rms_norm_eps, dtype=dtype)
        if own := text.hidden_size_per_layer_input:
            width = text.num_hidden_layers * own
            self.per_layer_embed_tokens = table(text.vocab_size_per_layer_input, width, scale=own**-0.5)
            self.per_layer_model_projection = Linear(text.hidden_size, width, dtype=dtype, rngs=rngs)
            self.per_layer_projection_norm = RMSNorm(own, text.rms_norm_eps, dtype=dtype)

    def __call__(
        self,
        batch: Mapping[str, jax.Array],
        sharder: Sharder,
        transport: str = "ring",
        *,
        kernel: str = "auto",
        dtype: Any = None,
        remat: Remat = "layer",
    ) -> jax.Array:
        """Final hidden states of this rank's tokens, [B, L, E].

        Called in the body of a `shard_map` over the sharder's axis, or anywhere when cp = 1. The batch is full length
        and the same on every rank: embedding and splicing happen before the sequence is cut.

        Args:
            batch: input_ids, padding_mask, document_ids, position_ids [B, T] and, with images, video or sound, the
                streams of these, whose index and group ids are [B, T] (see `prepare`). Where the sharder flattened
                rows, the token streams have fewer of them, and those of media are still those of all.
            sharder: layout and lengths.
            transport, kernel: of attention, see `cpjax.attention.attention`.
            dtype: of activations and matrix products; None: that of the token embeddings.
            remat: what the backward pass computes anew, see `scan_layers`.
        """
        text = self.config.text
        hidden = self.embed(batch, sharder, dtype, remat, kernel)
        local = self.local(batch, sharder, hidden.dtype, transport, kernel)
        inputs = self.per_layer_inputs(sharder.take_local(batch["input_ids"]), hidden)
        kept = {}
        for kind in sorted(set(text.types[text.first_shared :])):
            zero = jnp.zeros((*hidden.shape[:2], text.kv_heads(kind), text.width(kind)), hidden.dtype)
            kept[kind] = (vary_over(zero, varying_axes(hidden)),) * 2
        own = by_group(inputs, text.stacks[0])
        hidden, kept = scan_layers(self.layers, (hidden, kept), local, {}, each=own, remat=remat)
        if self.shared_layers is not None:
            own = by_group(inputs, text.stacks[1])
            hidden, _ = scan_layers(self.shared_layers, (hidden, {}), local, kept, each=own, remat=remat)
        return self.norm(hidden)

    def embed(
        self,
        batch: Mapping[str, jax.Array],
        sharder: Sharder,
        dtype: Any = None,
        remat: Remat = "layer",
        kernel: str = "auto",
    ) -> jax.Array:
        """What enters the layers: the embeddings of this rank's tokens with media spliced in, [B, L, E].

        Args:
            dtype: of the result, and with it of all that follows; None: that of the parameters.
            remat, kernel: of the towers.
        """
        hidden = self.embed_text(batch["input_ids"], dtype)
        if "pixel_values" in batch:
            features = self.visual(batch, hidden.dtype, remat, kernel)
            hidden = splice(hidden, features, batch["vision_index"], sharder)
        if "audio_features" in batch:
            features = self.audio(batch, hidden.dtype, remat)
            hidden = splice(hidden, features, batch["audio_index"], sharder)
        return sharder.take_local(hidden)

    def embed_text(self, ids: jax.Array, dtype: Any = None) -> jax.Array:
        """ids [B, L] -> [B, L, E]."""
        table = self.embed_tokens[...]
        scale = jnp.asarray(self.config.text.hidden_size**0.5, table.dtype)  # rounded as the weights are
        return (table[ids] * scale).astype(dtype or table.dtype)

    def per_layer_inputs(self, ids: jax.Array, hidden: jax.Array) -> jax.Array | None:
        """What each layer gets of each token beside the hidden states, [B, L, layers, P]; None if nothing.

        Half of it is looked up by token, where a pad stands for media, half is made of what enters the layers. Both
        are of one token alone: only the rank's own are looked up, as all would be layers x P numbers for each token.

        Args:
            ids: [B, L], this rank's.
            hidden: [B, L, E], of `embed`.
        """
        config = self.config.text
        if not config.hidden_size_per_layer_input:
            return None
        table = self.per_layer_embed_tokens[...]
        ids = jnp.where(jnp.isin(ids, np.asarray(self.config.placeholder_ids)), config.pad_token_id, ids)
        shape = (*ids.shape, config.num_hidden_layers, config.hidden_size_per_layer_input)
        scale = jnp.asarray(config.hidden_size_per_layer_input**0.5, table.dtype)
        looked_up = (table[ids] * scale).astype(hidden.dtype).reshape(shape)
        made = self.per_layer_model_projection(hidden) * config.hidden_size**-0.5
        return (self.per_layer_projection_norm(made.reshape(shape)) + looked_up) * 0.5**0.5

    def local(
        self,
        batch: Mapping[str, jax.Array],
        sharder: Sharder,
        dtype: Any,
        transport: str = "ring",
        kernel: str = "auto",
    ) -> Local:
        """What the layers read beside hidden states of this dtype."""
        config = self.config.text
        groups = batch.get("vision_group_ids") if config.use_bidirectional_attention == "vision" else None
        return Local(
            angles=angles(config, sharder.take_local(batch["position_ids"]), jnp.promote_types(dtype, jnp.float32)),
            document_ids=sharder.take_local(batch["document_ids"]),
            padding_mask=sharder.take_local(batch["padding_mask"]),
            vision_group_ids=None if groups is None else sharder.take_local(groups),
            sharder=sharder,
            transport=transport,
            kernel=kernel,
        )

    def head(self) -> jax.Array:
        """The matrix from hidden states to logits before `logit_softcap`, [E, V]."""
        return self.embed_tokens[...].T

    def logits(self, hidden: jax.Array) -> jax.Array:
        """hidden [..., E] -> [..., V]."""
        logits, cap = hidden @ self.head().astype(hidden.dtype), self.logit_softcap
        return logits if cap is None else cap * jnp.tanh(logits / cap)


def angles(config: TextConfig, positions: jax.Array, dtype: Any) -> dict[str, jax.Array]:
    """By type of layer, how far each pair (i, i + D/2) of a head is turned at positions [B, L]: [B, L, D/2]."""
    turns = positions.astype(dtype)[..., None]
    return {
        kind: turns * jnp.asarray(config.rope_of(kind).frequencies(config.width(kind)), dtype)
        for kind in (SLIDING, FULL)
    }


def by_group(inputs: jax.Array | None, stack: Stack) -> tuple[jax.Array, ...]:
    """The inputs of the layers of a stack as `scan_layers` takes them, [groups, B, L, slots, P]."""
    if inputs is None:
        return ()
    period = len(stack.pattern)
    own = inputs[:, :, stack.first : stack.first + stack.groups * period]
    return (jnp.moveaxis(own.reshape(*own.shape[:2], stack.groups, period, -1), 2, 0),)
