"""Qwen3.5 vision-language models: gated DeltaNet layers, every fourth full attention, and a vision tower."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from cpjax.attention import Mask, attention
from cpjax.models.common.experts import RouterSums
from cpjax.models.common.layers import (
    GatedMLP,
    Linear,
    Remat,
    RMSNorm,
    apply_rope,
    scan_layers,
    splice,
    stack_layers,
)
from cpjax.models.common.qwen3_5.config import FULL, LINEAR, TextConfig
from cpjax.models.common.qwen3_5.vision import Vision
from cpjax.recurrence import causal_conv, gated_delta_rule
from cpjax.sequence import shift
from cpjax.shard import IGNORE, Sharder, convert

RESIDUAL_SCALE = 0.1
"""Fresh layers write to the residual stream at a tenth of its scale: at the start a token is mostly itself."""


@dataclasses.dataclass(frozen=True)
class Local:
    """What every layer reads beside the hidden states: this rank's part of the token streams.

    Attributes:
        angles: [B, L, R] rope angles.
        document_ids: [B, L], 0 = pad.
        padding_mask: [B, L], True = pad.
        sharder: layout of the sequence.
        transport, kernel: how attention moves keys and values, and what computes it, see `cpjax.attention.attention`.
    """

    angles: jax.Array
    document_ids: jax.Array
    padding_mask: jax.Array
    sharder: Sharder
    transport: str
    kernel: str


class GatedAttention(nnx.Module):
    """Grouped-query attention with q/k norm, partial rope, and an output gate.

    Fresh query and key projections are equal, so that a token starts by attending to tokens like itself.
    """

    def __init__(self, config: TextConfig, *, dtype: Any, rngs: nnx.Rngs):
        self.head_dim, self.rope_scale = config.head_dim, config.rope.attention_factor
        size, heads, kv_heads = config.hidden_size, config.num_attention_heads, config.num_key_value_heads
        self.q_proj = Linear(size, heads * self.head_dim * 2, dtype=dtype, rngs=rngs)  # per head [query | gate]
        self.k_proj = Linear(size, kv_heads * self.head_dim, dtype=dtype, rngs=rngs)
        self.v_proj = Linear(size, kv_heads * self.head_dim, dtype=dtype, rngs=rngs)
        self.o_proj = Linear(heads * self.head_dim, size, scale=RESIDUAL_SCALE, dtype=dtype, rngs=rngs)
        queries = self.q_proj.kernel[...].reshape(size, kv_heads, -1, 2, self.head_dim)
        keys = self.k_proj.kernel[...].reshape(size, kv_heads, 1, self.head_dim)
        self.q_proj.kernel = nnx.Param(queries.at[..., 0, :].set(keys).reshape(size, -1))
        self.q_norm = RMSNorm(self.head_dim, config.rms_norm_eps, zero_centered=True, dtype=dtype)
        self.k_norm = RMSNorm(self.head_dim, config.rms_norm_eps, zero_centered=True, dtype=dtype)

    def __call__(self, x: jax.Array, local: Local) -> jax.Array:
        """x [B, L, E] -> [B, L, E]."""
        q, k, v, gate = self.project(x, local.angles)
        return self.finish(self.attend(q, k, v, local), gate)

    def project(self, x: jax.Array, angles: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
        """Queries [B, L, H, D], keys and values [B, L, K, D], and the gate of the output [B, L, H, D]."""
        rows, length, _ = x.shape
        scale = self.rope_scale
        q, gate = jnp.split(self.q_proj(x).reshape(rows, length, -1, 2 * self.head_dim), 2, axis=-1)
        k = self.k_proj(x).reshape(rows, length, -1, self.head_dim)
        v = self.v_proj(x).reshape(rows, length, -1, self.head_dim)
        return apply_rope(self.q_norm(q), angles, scale), apply_rope(self.k_norm(k), angles, scale), v, gate

    def attend(self, q: jax.Array, k: jax.Array, v: jax.Array, local: Local) -> jax.Array:
        """Causal attention inside documents, [B, L, H, D]."""
        mask = Mask(causal=True, document_ids=local.document_ids, padding_mask=local.padding_mask)
        return attention(q, k, v, sharder=local.sharder, mask=mask, transport=local.transport, kernel=local.kernel)

    def finish(self, out: jax.Array, gate: jax.Array) -> jax.Array:
        """What attention read, [B, L, H, D], gated -> [B, L, E]."""
        return self.o_proj((out * jax.nn.sigmoid(gate)).reshape(*out.shape[:2], -1))


class GatedDeltaNet(nnx.Module):
    """Linear attention by the gated delta rule (arXiv 2412.06464).

    Fresh weights make it a table to look things up in: a token reads what tokens like itself have written (equal query
    and key projections, which the convolution passes on unmixed), and nearly nothing is forgotten.
    """

    def __init__(self, config: TextConfig, *, dtype: Any, rngs: nnx.Rngs):
        self.key_dim, self.value_dim = config.linear_key_head_dim, config.linear_value_head_dim
        self.key_heads, self.value_heads = config.linear_num_key_heads, config.linear_num_value_heads
        size, keys, values = config.hidden_size, self.key_dim * self.key_heads, self.value_dim * self.value_heads
        self.in_proj_qkv = Linear(size, 2 * keys + values, dtype=dtype, rngs=rngs)
        kernel = self.in_proj_qkv.kernel[...]
        self.in_proj_qkv.kernel = nnx.Param(kernel.at[:, :keys].set(kernel[:, keys : 2 * keys]))
        self.in_proj_z = Linear(size, values, dtype=dtype, rngs=rngs)
        self.in_proj_b = Linear(size, self.value_heads, dtype=dtype, rngs=rngs)
        self.in_proj_a = Linear(size, self.value_heads, dtype=dtype, rngs=rngs)
        width = config.linear_conv_kernel_dim
        conv = jax.random.normal(rngs.params(), (2 * keys + values, width), dtype) * width**-0.5
        conv = conv.at[: 2 * keys].set(jnp.eye(1, width, width - 1, dtype=dtype))
        self.conv1d = nnx.Param(conv.astype(dtype))
        # Time steps log-uniform in (0.001, 0.1) as in Mamba2 (arXiv 2405.21060); decay rates in the same range, where
        # Mamba2 has up to 16, so that a fresh head remembers hundreds of tokens or more.
        log_rate, log_step = jax.random.uniform(
            rngs.params(), (2, self.value_heads), minval=np.log(1e-3), maxval=np.log(0.1)
        )
        step = jnp.exp(log_step)
        self.A_log = nnx.Param(log_rate.astype(dtype))
        self.dt_bias = nnx.Param(jnp.log(jnp.expm1(step)).astype(dtype))
        self.norm = RMSNorm(self.value_dim, config.rms_norm_eps, dtype=dtype)
        self.out_proj = Linear(values, size, scale=RESIDUAL_SCALE, dtype=dtype, rngs=rngs)

    def __call__(self, x: jax.Array, local: Local) -> jax.Array:
        """x [B, L, E] -> [B, L, E]."""
        x = jnp.where(local.padding_mask[..., None], 0, x)
        sharder, documents = local.sharder, local.document_ids
        weight = self.conv1d[...].astype(x.dtype)
        mixed = causal_conv(self.in_proj_qkv(x), weight, sharder=sharder, document_ids=documents)
        out = gated_delta_rule(*self.project(x, mixed), sharder=sharder, document_ids=documents)
        return self.finish(out, x)

    def project(self, x: jax.Array, mixed: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array, jax.Array]:
        """What the delta rule takes: q, k [B, L, H, Dk], v [B, L, H, Dv], log_decay and beta [B, L, H].

        Args:
            x: [B, L, E].
            mixed: `in_proj_qkv(x)` after the convolution.
        """
        rows, length, _ = x.shape
        keys = self.key_dim * self.key_heads
        q, k, v = jnp.split(jax.nn.silu(mixed), [keys, 2 * keys], axis=-1)
        q = _unit(q.reshape(rows, length, self.key_heads, self.key_dim)) * self.key_dim**-0.5
        k = _unit(k.reshape(rows, length, self.key_heads, self.key_dim))
        q, k = (jnp.repeat(t, self.value_heads // self.key_heads, axis=2) for t in (q, k))
        v = v.reshape(rows, length, self.value_heads, self.value_dim)

        wide = jnp.promote_types(x.dtype, jnp.float32)
        beta = jax.nn.sigmoid(self.in_proj_b(x).astype(wide))
        step = jax.nn.softplus(self.in_proj_a(x).astype(wide) + self.dt_bias[...].astype(wide))
        return q, k, v, -jnp.exp(self.A_log[...].astype(wide)) * step, beta

    def finish(self, out: jax.Array, x: jax.Array) -> jax.Array:
        """What the delta rule read, [B, L, H, Dv], normed and gated by x [B, L, E] -> [B, L, E]."""
        out = self.norm(out, gate=self.in_proj_z(x).reshape(out.shape))
        return self.out_proj(out.reshape(*out.shape[:2], -1))


def _unit(x: jax.Array) -> jax.Array:
    """x / sqrt(|x|^2 + 1e-6) over the last axis."""
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    return (wide * jax.lax.rsqrt(jnp.square(wide).sum(-1, keepdims=True) + 1e-6)).astype(x.dtype)


class Mixture(Protocol):
    """A mixture of experts in the place of an MLP."""

    def __call__(self, x: jax.Array, padding_mask: jax.Array) -> tuple[jax.Array, RouterSums]:
        """x [B, L, E], padding_mask [B, L] -> [B, L, E], and what the router did."""
        ...


class DecoderLayer(nnx.Module):
    """Pre-norm token mixer (linear or full attention) and MLP or mixture of experts."""

    def __init__(
        self, config: TextConfig, layer_type: str, mlp: Callable[..., Any], *, dtype: Any, rngs: nnx.Rngs
    ):  # fmt: skip
        size, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = RMSNorm(size, eps, zero_centered=True, dtype=dtype)
        mixer = GatedDeltaNet if layer_type == LINEAR else GatedAttention
        self.mixer = mixer(config, dtype=dtype, rngs=rngs)
        self.post_attention_layernorm = RMSNorm(size, eps, zero_centered=True, dtype=dtype)
        self.mlp: GatedMLP | Mixture = mlp(config, dtype=dtype, rngs=rngs)

    def __call__(self, x: jax.Array, local: Local) -> tuple[jax.Array, RouterSums | None]:
        """x [B, L, E] -> [B, L, E], and what its router did, if it has one."""
        x = x + self.mixer(self.input_layernorm(x), local)
        return self.feed_forward(x, local.padding_mask)

    def feed_forward(self, x: jax.Array, padding_mask: jax.Array) -> tuple[jax.Array, RouterSums | None]:
        """The second half of the layer."""
        normed = self.post_attention_layernorm(x)
        if isinstance(self.mlp, GatedMLP):
            return x + self.mlp(normed), None
        out, sums = self.mlp(normed, padding_mask)
        return x + out, sums


class LayerGroup(nnx.Module):
    """The shortest repeating pattern of layers (three linear, one full), see `scan_layers`."""

    def __init__(self, config: TextConfig, mlp: Callable[..., Any], *, dtype: Any, rngs: nnx.Rngs):
        types = config.types[: config.period]
        self.slots = nnx.List([DecoderLayer(config, kind, mlp, dtype=dtype, rngs=rngs) for kind in types])

    def __call__(
        self, carry: tuple[jax.Array, RouterSums | None], local: Local, runs: Local, *, slot: int
    ) -> tuple[jax.Array, RouterSums | None]:
        """x [B, L, E] in the order of `local`, and the sums of the routers so far -> both after a layer.

        A state wants runs of consecutive tokens: where the layout has none, each stretch of linear layers, norms and
        MLPs included, works on the order of `runs`. So a stretch takes one exchange in and one out, however long it is.
        """
        x, total = carry
        orders = [runs if isinstance(layer.mixer, GatedDeltaNet) else local for layer in self.slots]
        x = convert(x, (orders[slot - 1] if slot else local).sharder, orders[slot].sharder)
        x, sums = self.slots[slot](x, orders[slot])
        if slot == len(orders) - 1:
            x = convert(x, orders[slot].sharder, local.sharder)
        return x, jax.tree.map(jnp.add, total, sums)


class Ahead(nnx.Module):
    """The head of multi-token prediction (arXiv 2412.19437, section 2.2): one more layer, which is told the next token.

    What its router does, if it has one, is no part of the balance loss.
    """

    def __init__(self, config: TextConfig, mlp: Callable[..., Any], *, dtype: Any, rngs: nnx.Rngs):
        size, eps = config.hidden_size, config.rms_norm_eps
        self.pre_fc_norm_embedding = RMSNorm(size, eps, zero_centered=True, dtype=dtype)
        self.pre_fc_norm_hidden = RMSNorm(size, eps, zero_centered=True, dtype=dtype)
        self.fc = Linear(2 * size, size, dtype=dtype, rngs=rngs)
        self.layer = DecoderLayer(config, FULL, mlp, dtype=dtype, rngs=rngs)
        self.norm = RMSNorm(size, eps, zero_centered=True, dtype=dtype)

    def __call__(self, hidden: jax.Array, told: jax.Array, local: Local) -> jax.Array:
        """Final hidden states, and what enters the layers of the next tokens, both [B, L, E] -> [B, L, E]."""
        x = self.fc(jnp.concatenate([self.pre_fc_norm_embedding(told), self.pre_fc_norm_hidden(hidden)], axis=-1))
        return self.norm(self.layer(x, local)[0])


class VisionLanguageModel(nnx.Module):
    """The whole model; families say what an MLP is.

    Fresh weights: matrices normal with standard deviation in^-0.5 (`RESIDUAL_SCALE` times that where a layer writes to
    the residual stream), token embeddings standard normal (hidden_size^-0.5 if tied), norms neutral.

    Args:
        config: sizes and token ids.
        rngs: source of the initial weights.
        dtype: of the parameters.
    """

    mlp: ClassVar[Callable[..., Any]]
    """(text config, dtype, rngs) -> `GatedMLP` or `Mixture`."""

    def __init__(self, config: Any, *, rngs: nnx.Rngs, dtype: Any = jnp.float32):
        self.config = config
        text = config.text
        shape = (text.vocab_size, text.hidden_size)
        scale = text.hidden_size**-0.5 if config.tie_word_embeddings else 1  # a tied table is the head as well
        self.embed_tokens = nnx.Param((scale * jax.random.normal(rngs.params(), shape, dtype)).astype(dtype))
        self.visual = Vision(config.vision, dtype=dtype, rngs=rngs)
        groups = text.num_hidden_layers // text.period
        self.layers = stack_layers(lambda rngs: LayerGroup(text, type(self).mlp, dtype=dtype, rngs=rngs), groups, rngs)
        self.norm = RMSNorm(text.hidden_size, text.rms_norm_eps, zero_centered=True, dtype=dtype)
        self.lm_head = (
            None if config.tie_word_embeddings else Linear(text.hidden_size, text.vocab_size, dtype=dtype, rngs=rngs)
        )

        def ahead(rngs: nnx.Rngs) -> Ahead:
            return Ahead(text, type(self).mlp, dtype=dtype, rngs=rngs)

        self.mtp = stack_layers(ahead, 1, rngs) if text.mtp_num_hidden_layers else None

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
            batch: input_ids, padding_mask, document_ids [B, T], position_ids [3, B, T] and, with images or video, the
                vision streams and vision_index [B, T] (see `prepare`). Where the sharder flattened rows, the token
                streams have fewer of them, and the vision streams are still those of all.
            sharder: layout and lengths. Under a layout that holds no runs (striped, packed, dispatched), linear layers
                work in contiguous order, see `LayerGroup`.
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
    ) -> tuple[jax.Array, RouterSums | None, list[tuple[jax.Array, jax.Array]]]:
        """The same, what the routers did with this rank's tokens, if there are any, and what lies further ahead.

        Args:
            ahead: whether to apply the head of multi-token prediction, which predicts the token after the next one. It
                is told of the next one what enters the layers there, so that of an image it sees what they see, and
                keeps the token's own position: both as where released heads are put to use (vLLM, SGLang).

        Returns:
            Final hidden states [B, L, E], the sums, and of the head final hidden states and labels [B, L]; these are
            -100 where the token after the next one is not of the token's own document.
        """
        whole = self.embed_whole(batch, sharder, dtype, remat, kernel)
        hidden = sharder.take_local(whole)
        local = self.local(batch, sharder, hidden.dtype, transport, kernel)
        runs = local
        if not sharder.layout.runs:
            runs = self.local(batch, sharder.contiguous(), hidden.dtype, transport, kernel)
        hidden, sums = scan_layers(self.layers, (hidden, self.no_sums(hidden)), local, runs, remat=remat)
        hidden = self.norm(hidden)
        if not ahead:
            return hidden, sums, []
        places = jnp.broadcast_to(jnp.arange(whole.shape[1]), whole.shape[:2])
        following, labels = (
            shift(sharder.take_local(stream), 1, sharder=sharder, fill=fill, document_ids=local.document_ids)
            for stream, fill in ((places, 0), (batch["labels"], IGNORE))
        )
        told = jnp.take_along_axis(whole, following[..., None], axis=1, mode="clip")
        return hidden, sums, [(scan_layers(self.mtp, hidden, told, local, remat=remat), labels)]

    def no_sums(self, hidden: jax.Array) -> RouterSums | None:
        """The sums before the first layer, if layers have routers."""
        return None

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
        return sharder.take_local(self.embed_whole(batch, sharder, dtype, remat, kernel))

    def embed_whole(
        self, batch: Mapping[str, jax.Array], sharder: Sharder, dtype: Any, remat: Remat, kernel: str
    ) -> jax.Array:
        """The same of all tokens, [B, T, E]."""
        table = self.embed_tokens[...]
        hidden = table[batch["input_ids"]].astype(dtype or table.dtype)
        if "pixel_values" in batch:
            features = self.visual(batch, hidden.dtype, remat, kernel)
            hidden = splice(hidden, features, batch["vision_index"], sharder)
        return hidden

    def local(
        self,
        batch: Mapping[str, jax.Array],
        sharder: Sharder,
        dtype: Any,
        transport: str = "ring",
        kernel: str = "auto",
    ) -> Local:
        """What the layers read beside hidden states of this dtype."""
        positions = sharder.take_local(batch["position_ids"], axis=2)
        return Local(
            angles=mrope_angles(self.config.text, positions, jnp.promote_types(dtype, jnp.float32)),
            document_ids=sharder.take_local(batch["document_ids"]),
            padding_mask=sharder.take_local(batch["padding_mask"]),
            sharder=sharder,
            transport=transport,
            kernel=kernel,
        )

    def head(self) -> jax.Array:
        """The matrix from hidden states to logits, [E, V]."""
        return self.embed_tokens[...].T if self.lm_head is None else self.lm_head.kernel[...]

    def logits(self, hidden: jax.Array) -> jax.Array:
        """hidden [..., E] -> [..., V]."""
        return hidden @ self.head().astype(hidden.dtype)


def mrope_angles(config: TextConfig, positions: jax.Array, dtype: Any) -> jax.Array:
    """Interleaved multi-axis rope: frequency j turns with the height or width position where j % 3 is 1 or 2.

    Beyond three times that axis' section, and where j % 3 is 0, it turns with time.

    Args:
        positions: [3, B, L] time, height, width.

    Returns:
        [B, L, rotary_dim / 2].
    """
    frequency = np.arange(config.rotary_dim // 2)
    axis = frequency % 3
    axis = np.where(frequency < 3 * np.asarray(config.mrope_section)[axis], axis, 0)
    turns = jnp.moveaxis(positions.astype(dtype)[axis], 0, -1)
    return turns * jnp.asarray(config.rope.frequencies(config.head_dim), dtype)
