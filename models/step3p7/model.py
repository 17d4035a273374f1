"""The Step 3.7 vision-language model: full and sliding attention, dense and sparse layers, and a vision tower."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from cpjax.attention import Mask, attention
from cpjax.models.common.experts import Experts, route
from cpjax.models.common.layers import (
    Buffer,
    GatedMLP,
    Linear,
    Remat,
    RMSNorm,
    apply_rope,
    scan_layers,
    splice,
    stack_layers,
    swiglu,
)
from cpjax.models.step3p7.config import Config, TextConfig
from cpjax.models.step3p7.layers import Layer
from cpjax.models.step3p7.vision import Vision
from cpjax.sequence import shift
from cpjax.shard import IGNORE, Sharder

RESIDUAL_SCALE = 0.1
"""Of what fresh layers write to the residual stream: at the start a token is mostly itself."""
MATCHING_SCALE = 4.0
"""Of fresh query and key projections of full layers. Norms behind them make it nothing to what they compute, but large
numbers change slowly under Adam: tokens still attend to their like when layers below have put there what they seek."""


@dataclasses.dataclass(frozen=True)
class Local:
    """What every layer reads beside the hidden states: this rank's part of the token streams.

    Attributes:
        angles, sliding_angles: [B, L, R] rope angles of the two kinds of attention.
        document_ids: [B, L], 0 = pad.
        padding_mask: [B, L], True = pad.
        sharder: layout of the sequence.
        transport, kernel: how attention moves keys and values, and what computes it, see `cpjax.attention.attention`.
    """

    angles: jax.Array
    sliding_angles: jax.Array
    document_ids: jax.Array
    padding_mask: jax.Array
    sharder: Sharder
    transport: str
    kernel: str


class Attention(nnx.Module):
    """Grouped-query attention with q/k norm, partial rope, and one gate for the output of each head.

    Fresh query and key projections of full layers are equal, so that a token starts by attending to tokens like itself;
    those of sliding layers are not, so that it starts by attending to all that are near.
    """

    def __init__(self, config: TextConfig, layer: Layer, *, dtype: Any, rngs: nnx.Rngs):
        size, heads, kv_heads = config.hidden_size, config.heads(layer), config.num_key_value_heads
        self.head_dim = config.head_dim
        self.scale = (config.query_pre_attn_scalar or config.head_dim) ** -0.5
        self.sliding = layer.sliding
        self.rope_scale = (config.sliding_rope if layer.sliding else config.rope).attention_factor
        self.window = config.sliding_window if layer.sliding else None
        self.q_proj = Linear(size, heads * self.head_dim, dtype=dtype, rngs=rngs)
        self.k_proj = Linear(size, kv_heads * self.head_dim, dtype=dtype, rngs=rngs)
        self.v_proj = Linear(size, kv_heads * self.head_dim, dtype=dtype, rngs=rngs)
        self.g_proj = Linear(size, heads, dtype=dtype, rngs=rngs)
        self.o_proj = Linear(heads * self.head_dim, size, scale=RESIDUAL_SCALE, dtype=dtype, rngs=rngs)
        if not layer.sliding:
            keys = (MATCHING_SCALE * self.k_proj.kernel[...]).reshape(size, kv_heads, 1, self.head_dim)
            queries = jnp.broadcast_to(keys, (size, kv_heads, heads // kv_heads, self.head_dim))
            self.q_proj.kernel, self.k_proj.kernel = (nnx.Param(w.reshape(size, -1)) for w in (queries, keys))
        self.q_norm = RMSNorm(self.head_dim, config.rms_norm_eps, zero_centered=True, dtype=dtype)
        self.k_norm = RMSNorm(self.head_dim, config.rms_norm_eps, zero_centered=True, dtype=dtype)

    def __call__(self, x: jax.Array, local: Local) -> jax.Array:
        """x [B, L, E] -> [B, L, E]."""
        q, k, v = self.project(x, local.sliding_angles if self.sliding else local.angles)
        return self.finish(self.attend(q, k, v, local), x)

    def project(self, x: jax.Array, angles: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Queries [B, L, H, D], keys and values [B, L, K, D]."""
        q, k, v = (p(x).reshape(*x.shape[:2], -1, self.head_dim) for p in (self.q_proj, self.k_proj, self.v_proj))
        scale = self.rope_scale
        return apply_rope(self.q_norm(q), angles, scale), apply_rope(self.k_norm(k), angles, scale), v

    def attend(self, q: jax.Array, k: jax.Array, v: jax.Array, local: Local) -> jax.Array:
        """Causal attention inside documents, and the window if there is one, [B, L, H, D]."""
        left = None if self.window is None else self.window - 1
        mask = Mask(
            causal=True, window=(left, 0), document_ids=local.document_ids, padding_mask=local.padding_mask
        )  # fmt: skip
        return attention(
            q, k, v, sharder=local.sharder, mask=mask, scale=self.scale, transport=local.transport, kernel=local.kernel
        )  # fmt: skip

    def finish(self, out: jax.Array, x: jax.Array) -> jax.Array:
        """What attention read, [B, L, H, D], gated by x [B, L, E] -> [B, L, E]."""
        out = out * jax.nn.sigmoid(self.g_proj(x))[..., None]
        return self.o_proj(out.reshape(*x.shape[:2], -1))


def clamped_swiglu(gate: jax.Array, up: jax.Array, limit: float) -> jax.Array:
    """silu(gate), at most the limit, times up, between minus and plus the limit."""
    return jnp.minimum(jax.nn.silu(gate), limit) * jnp.clip(up, -limit, limit)


def _activation(limit: float | None) -> Callable[[jax.Array, jax.Array], jax.Array]:
    return swiglu if limit is None else functools.partial(clamped_swiglu, limit=limit)


class SparseMLP(nnx.Module):
    """The chosen ones of many experts, and one that every token goes through.

    The router scores experts by a sigmoid; a bias, which is no parameter, has its say in the choice alone.
    """

    def __init__(self, config: TextConfig, layer: Layer, *, dtype: Any, rngs: nnx.Rngs):
        size, count = config.hidden_size, config.n_routed_experts
        self.chosen, self.factor = config.num_experts_per_tok, config.moe_router_scaling_factor
        self.gate = Linear(size, count, dtype=dtype, rngs=rngs)
        self.router_bias = Buffer(jnp.zeros(count, dtype))
        self.experts = Experts(
            count, size, config.moe_intermediate_size, activation=_activation(layer.limit), scale=RESIDUAL_SCALE,
            dtype=dtype, rngs=rngs,
        )  # fmt: skip
        self.share_expert = GatedMLP(
            size, config.share_expert_dim, activation=_activation(layer.shared_limit), scale=RESIDUAL_SCALE,
            dtype=dtype, rngs=rngs,
        )  # fmt: skip

    def __call__(self, x: jax.Array, padding_mask: jax.Array) -> jax.Array:
        """x [B, L, E] -> [B, L, E]."""
        chosen_by = x.astype(jnp.promote_types(x.dtype, self.gate.kernel[...].dtype))  # as transformers does
        scores = jax.nn.sigmoid(self.gate(chosen_by).astype(jnp.promote_types(x.dtype, jnp.float32)))
        routing = route(scores, self.chosen, bias=self.router_bias[...].astype(scores.dtype))
        return self.experts(x, routing, padding_mask) * self.factor + self.share_expert(x)


class DecoderLayer(nnx.Module):
    """Pre-norm attention and MLP."""

    def __init__(self, config: TextConfig, layer: Layer, *, dtype: Any, rngs: nnx.Rngs):
        size, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = RMSNorm(size, eps, zero_centered=True, dtype=dtype)
        self.self_attn = Attention(config, layer, dtype=dtype, rngs=rngs)
        self.post_attention_layernorm = RMSNorm(size, eps, zero_centered=True, dtype=dtype)
        self.mlp: Any
        if layer.sparse:
            self.mlp = SparseMLP(config, layer, dtype=dtype, rngs=rngs)
        else:
            self.mlp = GatedMLP(
                size, config.intermediate_size, activation=_activation(layer.shared_limit), scale=RESIDUAL_SCALE,
                dtype=dtype, rngs=rngs,
            )  # fmt: skip

    def __call__(self, x: jax.Array, local: Local) -> jax.Array:
        """x [B, L, E] -> [B, L, E]."""
        return self.finish(x, self.self_attn(self.input_layernorm(x), local), local.padding_mask)

    def finish(self, x: jax.Array, mixed: jax.Array, padding_mask: jax.Array) -> jax.Array:
        """Adds what attention made of x, and then the MLP; all [B, L, E], but padding_mask [B, L]."""
        x = x + mixed
        normed = self.post_attention_layernorm(x)
        return x + (self.mlp(normed, padding_mask) if isinstance(self.mlp, SparseMLP) else self.mlp(normed))


class LayerGroup(nnx.Module):
    """One round of a repeating pattern of layers, see `scan_layers`."""

    def __init__(self, config: TextConfig, pattern: tuple[Layer, ...], *, dtype: Any, rngs: nnx.Rngs):
        self.slots = nnx.List([DecoderLayer(config, layer, dtype=dtype, rngs=rngs) for layer in pattern])

    def __call__(self, x: jax.Array, local: Local, *, slot: int) -> jax.Array:
        """x [B, L, E] -> [B, L, E]."""
        return self.slots[slot](x, local)


class Ahead(nnx.Module):
    """A head of multi-token prediction (arXiv 2412.19437, section 2.2): one more layer, which is told a later token."""

    def __init__(self, config: TextConfig, layer: Layer, *, dtype: Any, rngs: nnx.Rngs):
        size, eps = config.hidden_size, config.rms_norm_eps
        self.enorm = RMSNorm(size, eps, zero_centered=True, dtype=dtype)
        self.hnorm = RMSNorm(size, eps, zero_centered=True, dtype=dtype)
        self.eh_proj = Linear(2 * size, size, dtype=dtype, rngs=rngs)
        self.layer = DecoderLayer(config, layer, dtype=dtype, rngs=rngs)
        self.norm = RMSNorm(size, eps, zero_centered=True, dtype=dtype)

    def __call__(self, hidden: jax.Array, told: jax.Array, local: Local) -> jax.Array:
        """Final hidden states and the embeddings of the tokens it is told, both [B, L, E] -> [B, L, E]."""
        x = self.eh_proj(jnp.concatenate([self.enorm(told), self.hnorm(hidden)], axis=-1))
        return self.norm(self.layer(x, local))


class Step3p7(nnx.Module):
    """The whole model.

    Fresh weights: matrices normal with standard deviation in^-0.5 (`RESIDUAL_SCALE` times that where a layer writes to
    the residual stream, `MATCHING_SCALE` times where a full layer makes queries and keys), token embeddings standard
    normal (hidden_size^-0.5 if tied), norms neutral.

    Args:
        config: sizes and token ids.
        rngs: source of the initial weights.
        dtype: of the parameters.
    """

    def __init__(self, config: Config, *, rngs: nnx.Rngs, dtype: Any = jnp.float32):
        self.config = config
        text, vision = config.text, config.vision
        shape = (text.vocab_size, text.hidden_size)
        scale = text.hidden_size**-0.5 if config.tie_word_embeddings else 1  # a tied table is the head as well
        self.embed_tokens = nnx.Param((scale * jax.random.normal(rngs.params(), shape, dtype)).astype(dtype))
        self.visual = Vision(vision, dtype=dtype, rngs=rngs)
        self.projector = Linear(
            4 * vision.hidden_size, text.hidden_size, bias=config.projector_bias, dtype=dtype, rngs=rngs
        )

        def group(rngs: nnx.Rngs, pattern: tuple[Layer, ...]) -> LayerGroup:
            return LayerGroup(text, pattern, dtype=dtype, rngs=rngs)

        self.layers = nnx.List(
            [stack_layers(functools.partial(group, pattern=s.pattern), s.repeats, rngs) for s in text.stacks]
        )
        self.norm = RMSNorm(text.hidden_size, text.rms_norm_eps, zero_centered=True, dtype=dtype)

        def ahead(rngs: nnx.Rngs, layer: Layer) -> Ahead:
            return Ahead(text, layer, dtype=dtype, rngs=rngs)

        self.mtp = nnx.List([stack_layers(functools.partial(ahead, layer=layer), 1, rngs) for layer in text.mtp_layers])
        self.lm_head = (
            None if config.tie_word_embeddings else Linear(text.hidden_size, text.vocab_size, dtype=dtype, rngs=rngs)
        )

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
            batch: input_ids, padding_mask, document_ids, position_ids [B, T] and, with images, the vision streams and
                vision_index [B, T] (see `prepare`). Where the sharder flattened rows, the token streams have fewer
                of them, and the vision streams are still those of all.
            sharder: layout and lengths.
            transport, kernel: of attention, see `cpjax.attention.attention`.
            dtype: of activations and matrix products; None: that of the token embeddings.
            remat: what the backward pass computes anew, see `scan_layers`.
        """
        return self.outputs(batch, sharder, transport, kernel=kernel, dtype=dtype, remat=remat)[0]

    def outputs(
        self,
        batch: Mapping[str, jax.Array],
        sharder: Sharder,
        transport: str = "ring",
        *,
        kernel: str = "auto",
        dtype: Any = None,
        remat: Remat = "layer",
        ahead: bool = False,
    ) -> tuple[jax.Array, None, list[tuple[jax.Array, jax.Array]]]:
        """The same, nothing of the routers, which have no balance loss, and what lies further ahead.

        Args:
            ahead: whether to apply the heads of multi-token prediction. Head k is told the token k after each and, as
                all share the model's head, predicts the one after that. Both come from the whole sequence, wherever
                they live, and from the token's own document: elsewhere the label is -100.

        Returns:
            Final hidden states [B, L, E], None, and for each head final hidden states and labels [B, L].
        """
        hidden = self.embed(batch, sharder, dtype, remat, kernel)
        local = self.local(batch, sharder, hidden.dtype, transport, kernel)
        for stack in self.layers:
            hidden = scan_layers(stack, hidden, local, remat=remat)
        final = hidden = self.norm(hidden)
        if not ahead:
            return final, None, []
        ids, labels = (sharder.take_local(batch[name]) for name in ("input_ids", "labels"))
        out = []
        for depth, head in enumerate(self.mtp, start=1):
            later, targets = (
                shift(stream, depth, sharder=sharder, fill=fill, document_ids=local.document_ids)
                for stream, fill in ((ids, self.config.text.pad_token_id), (labels, IGNORE))
            )
            told = self.embed_tokens[...][later].astype(hidden.dtype)
            hidden = scan_layers(head, hidden, told, local, remat=remat)
            out.append((hidden, targets))
        return final, None, out

    def embed(
        self,
        batch: Mapping[str, jax.Array],
        sharder: Sharder,
        dtype: Any = None,
        remat: Remat = "layer",
        kernel: str = "auto",
    ) -> jax.Array:
        """What enters the layers: the embeddings of this rank's tokens with images spliced in, [B, L, E].

        Args:
            dtype: of the result, and with it of all that follows; None: that of the parameters.
            remat, kernel: of the vision tower.
        """
        table = self.embed_tokens[...]
        hidden = table[batch["input_ids"]].astype(dtype or table.dtype)
        if "pixel_values" in batch:
            features = self.projector(self.visual(batch, hidden.dtype, remat, kernel))
            hidden = splice(hidden, features, batch["vision_index"], sharder)
        return sharder.take_local(hidden)

    def local(
        self,
        batch: Mapping[str, jax.Array],
        sharder: Sharder,
        dtype: Any,
        transport: str = "ring",
        kernel: str = "auto",
    ) -> Local:
        """What the layers read beside hidden states of this dtype."""
        angles, sliding_angles = self.angles(sharder.take_local(batch["position_ids"]), dtype)
        return Local(
            angles=angles,
            sliding_angles=sliding_angles,
            document_ids=sharder.take_local(batch["document_ids"]),
            padding_mask=sharder.take_local(batch["padding_mask"]),
            sharder=sharder,
            transport=transport,
            kernel=kernel,
        )

    def angles(self, positions: jax.Array, dtype: Any) -> tuple[jax.Array, jax.Array]:
        """Rope angles of full and of sliding attention, [B, L, R] in `dtype` or wider, at positions [B, L]."""
        text, wide = self.config.text, jnp.promote_types(dtype, jnp.float32)
        turns = positions.astype(wide)[..., None]
        full, sliding = (jnp.asarray(r.frequencies(text.head_dim), wide) for r in (text.rope, text.sliding_rope))
        return turns * full, turns * sliding

    def head(self) -> jax.Array:
        """The matrix from hidden states to logits, [E, V]."""
        return self.embed_tokens[...].T if self.lm_head is None else self.lm_head.kernel[...]

    def logits(self, hidden: jax.Array) -> jax.Array:
        """hidden [..., E] -> [..., V]."""
        return hidden @ self.head().astype(hidden.dtype)
