"""The vision tower: patches of all frames of a row, packed, to one feature per pooled block of patches."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from cpjax.attention import Mask, attention
from cpjax.models.common.layers import (
    Buffer,
    Linear,
    Remat,
    RMSNorm,
    apply_rope,
    rms_norm,
    scan_layers,
    stack_layers,
)
from cpjax.models.common.rope import rope_frequencies
from cpjax.models.gemma4.config import VisionConfig
from cpjax.models.gemma4.layers import ClippedLinear, geglu, scaled_norm
from cpjax.shard import Identity, Sharder, make_sharder


class VisionAttention(nnx.Module):
    """Attention of patches to the patches of their own frame.

    Half of each head turns with the column, half with the row.
    """

    def __init__(self, config: VisionConfig, *, dtype: Any, rngs: nnx.Rngs):
        self.head_dim, self.eps = config.head_dim, config.rms_norm_eps
        linear = functools.partial(ClippedLinear, clipped=config.use_clipped_linears, dtype=dtype, rngs=rngs)
        width, kv_width = config.num_attention_heads * self.head_dim, config.num_key_value_heads * self.head_dim
        self.q_proj, self.k_proj = linear(config.hidden_size, width), linear(config.hidden_size, kv_width)
        self.v_proj, self.o_proj = linear(config.hidden_size, kv_width), linear(width, config.hidden_size)
        self.q_norm = scaled_norm(self.head_dim, self.eps, self.head_dim**-0.5, dtype=dtype)
        self.k_norm = RMSNorm(self.head_dim, self.eps, dtype=dtype)

    def __call__(self, x: jax.Array, angles: jax.Array, sharder: Sharder, mask: Mask, kernel: str) -> jax.Array:
        """x [B, N, E], angles [B, N, 2, D/4] -> [B, N, E]."""

        def turn(x: jax.Array) -> jax.Array:
            halves = jnp.split(x, 2, axis=-1)
            return jnp.concatenate([apply_rope(half, angles[:, :, i]) for i, half in enumerate(halves)], axis=-1)

        q, k, v = (
            project(x).reshape(*x.shape[:2], -1, self.head_dim) for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        v = rms_norm(v, self.eps).astype(x.dtype)
        out = attention(
            turn(self.q_norm(q)), turn(self.k_norm(k)), v, sharder=sharder, mask=mask, scale=1.0, kernel=kernel
        )
        return self.o_proj(out.reshape(*x.shape[:2], -1))


class VisionBlock(nnx.Module):
    """Attention and gated MLP, each with a norm before and after it."""

    def __init__(self, config: VisionConfig, *, dtype: Any, rngs: nnx.Rngs):
        size, hidden, eps = config.hidden_size, config.intermediate_size, config.rms_norm_eps
        linear = functools.partial(ClippedLinear, clipped=config.use_clipped_linears, dtype=dtype, rngs=rngs)
        self.input_layernorm = RMSNorm(size, eps, dtype=dtype)
        self.self_attn = VisionAttention(config, dtype=dtype, rngs=rngs)
        self.post_attention_layernorm = RMSNorm(size, eps, dtype=dtype)
        self.pre_feedforward_layernorm = RMSNorm(size, eps, dtype=dtype)
        self.gate_proj, self.up_proj, self.down_proj = linear(size, hidden), linear(size, hidden), linear(hidden, size)
        self.post_feedforward_layernorm = RMSNorm(size, eps, dtype=dtype)

    def __call__(self, x: jax.Array, angles: jax.Array, sharder: Sharder, mask: Mask, kernel: str) -> jax.Array:
        out = self.self_attn(self.input_layernorm(x), angles, sharder, mask, kernel)
        x = x + self.post_attention_layernorm(out)
        y = self.pre_feedforward_layernorm(x)
        return x + self.post_feedforward_layernorm(self.down_proj(geglu(self.gate_proj(y), self.up_proj(y))))


class Vision(nnx.Module):
    """Patch embedding, learned and rotary positions, blocks, pooling, and the projection to the text width.

    `out` is the text model's width.
    """

    def __init__(self, config: VisionConfig, out: int, *, dtype: Any, rngs: nnx.Rngs):
        self.config = config
        size = config.hidden_size
        self.input_proj = Linear(config.patch_dim, size, dtype=dtype, rngs=rngs)
        # First the rows of the columns' positions, then those of the rows'; both together are of a patch's scale, as
        # only they tell pooling where a patch was.
        table = 0.5**0.5 * jax.random.normal(rngs.params(), (2 * config.position_embedding_size, size), dtype)
        self.pos_embed = nnx.Param(table.astype(dtype))
        self.blocks = stack_layers(
            lambda rngs: VisionBlock(config, dtype=dtype, rngs=rngs), config.num_hidden_layers, rngs
        )
        if config.standardize:
            self.std_bias, self.std_scale = Buffer(jnp.zeros(size, dtype)), Buffer(jnp.ones(size, dtype))
        self.projection = Linear(size, out, dtype=dtype, rngs=rngs)

    def __call__(self, batch: Mapping[str, jax.Array], dtype: Any, remat: Remat, kernel: str) -> jax.Array:
        """The pooled features of every row, [B, N / pool^2, out]; those of pads are unspecified.

        Reads pixel_values, vision_segment_ids and vision_positions.
        """
        config, positions, segments = self.config, batch["vision_positions"], batch["vision_segment_ids"]
        x = self.input_proj((2 * batch["pixel_values"] - 1).astype(dtype))
        table = self.pos_embed[...]
        x = x + (table[positions[..., 0]] + table[positions[..., 1] + config.position_embedding_size]).astype(x.dtype)

        wide = jnp.promote_types(x.dtype, jnp.float32)
        frequencies = rope_frequencies(config.head_dim // 2, config.rope_theta)
        angles = positions.astype(wide)[..., None] * jnp.asarray(frequencies, wide)
        mask = Mask(causal=False, document_ids=segments, padding_mask=segments == 0)
        x = scan_layers(self.blocks, x, angles, make_sharder(x.shape[1], Identity()), mask, kernel, remat=remat)

        pooled = x.astype(wide).reshape(x.shape[0], -1, config.pooling_kernel_size**2, x.shape[2]).mean(2)
        pooled *= config.hidden_size**0.5
        if config.standardize:
            pooled = (pooled - self.std_bias[...].astype(wide)) * self.std_scale[...].astype(wide)
        return self.projection(rms_norm(pooled.astype(x.dtype), config.rms_norm_eps).astype(x.dtype))
