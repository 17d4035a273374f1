"""The vision tower: patches of all frames of a row, packed, to one feature per merged block of patches."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from cpjax.attention import Mask, attention
from cpjax.models.common.layers import (
    LayerNorm,
    Linear,
    Remat,
    apply_rope,
    gelu,
    scan_layers,
    stack_layers,
)
from cpjax.models.common.qwen3_5.config import VisionConfig
from cpjax.models.common.rope import rope_frequencies
from cpjax.shard import Identity, Sharder, make_sharder

_EPS = 1e-6


class VisionAttention(nnx.Module):
    """Attention of patches to the patches of their own frame."""

    def __init__(self, config: VisionConfig, *, dtype: Any, rngs: nnx.Rngs):
        self.num_heads = config.num_heads
        self.qkv = Linear(config.hidden_size, 3 * config.hidden_size, bias=True, dtype=dtype, rngs=rngs)
        self.proj = Linear(config.hidden_size, config.hidden_size, bias=True, dtype=dtype, rngs=rngs)

    def __call__(self, x: jax.Array, angles: jax.Array, sharder: Sharder, mask: Mask, kernel: str) -> jax.Array:
        """x [B, N, E], angles [B, N, D/2] -> [B, N, E]."""
        q, k, v = jnp.unstack(self.qkv(x).reshape(*x.shape[:2], 3, self.num_heads, -1), axis=2)
        out = attention(apply_rope(q, angles), apply_rope(k, angles), v, sharder=sharder, mask=mask, kernel=kernel)
        return self.proj(out.reshape(x.shape))


class VisionBlock(nnx.Module):
    """Pre-norm attention and MLP."""

    def __init__(self, config: VisionConfig, *, dtype: Any, rngs: nnx.Rngs):
        size = config.hidden_size
        self.norm1 = LayerNorm(size, _EPS, dtype=dtype)
        self.attn = VisionAttention(config, dtype=dtype, rngs=rngs)
        self.norm2 = LayerNorm(size, _EPS, dtype=dtype)
        self.linear_fc1 = Linear(size, config.intermediate_size, bias=True, dtype=dtype, rngs=rngs)
        self.linear_fc2 = Linear(config.intermediate_size, size, bias=True, dtype=dtype, rngs=rngs)
        self.gelu = jax.nn.gelu if config.hidden_act == "gelu_pytorch_tanh" else gelu

    def __call__(self, x: jax.Array, angles: jax.Array, sharder: Sharder, mask: Mask, kernel: str) -> jax.Array:
        x = x + self.attn(self.norm1(x), angles, sharder, mask, kernel)
        return x + self.linear_fc2(self.gelu(self.linear_fc1(self.norm2(x))))


class Vision(nnx.Module):
    """Patch embedding, learned and rotary positions, blocks, and the merger into the text width."""

    def __init__(self, config: VisionConfig, *, dtype: Any, rngs: nnx.Rngs):
        self.config = config
        size, merged = config.hidden_size, config.hidden_size * config.spatial_merge_size**2
        self.patch_embed = Linear(config.patch_dim, size, bias=True, dtype=dtype, rngs=rngs)
        table = 0.02 * jax.random.normal(rngs.params(), (config.num_position_embeddings, size), dtype)
        self.pos_embed = nnx.Param(table.astype(dtype))
        self.blocks = stack_layers(lambda rngs: VisionBlock(config, dtype=dtype, rngs=rngs), config.depth, rngs)
        self.norm = LayerNorm(size, _EPS, dtype=dtype)
        self.linear_fc1 = Linear(merged, merged, bias=True, dtype=dtype, rngs=rngs)
        self.linear_fc2 = Linear(merged, config.out_hidden_size, bias=True, dtype=dtype, rngs=rngs)

    def __call__(self, batch: Mapping[str, jax.Array], dtype: Any, remat: Remat, kernel: str) -> jax.Array:
        """The merged features of every row, [B, N / merge^2, out_hidden_size]; those of pads are unspecified.

        Reads pixel_values, vision_segment_ids, vision_positions, vision_table_indices and vision_table_weights.
        """
        x = self.patch_embed(batch["pixel_values"].astype(dtype))
        wide = jnp.promote_types(x.dtype, jnp.float32)
        corners = self.pos_embed[...].astype(wide)[batch["vision_table_indices"]]
        x = x + (corners * batch["vision_table_weights"].astype(wide)[..., None]).sum(-2).astype(x.dtype)

        head_dim = self.config.hidden_size // self.config.num_heads
        frequencies = rope_frequencies(head_dim // 2, self.config.rope_theta)
        angles = batch["vision_positions"].astype(wide)[..., None] * jnp.asarray(frequencies, wide)
        angles = angles.reshape(*x.shape[:2], head_dim // 2)

        segments = batch["vision_segment_ids"]
        mask = Mask(causal=False, document_ids=segments, padding_mask=segments == 0)
        x = scan_layers(self.blocks, x, angles, make_sharder(x.shape[1], Identity()), mask, kernel, remat=remat)

        x = self.norm(x).reshape(x.shape[0], -1, self.linear_fc1.kernel.shape[0])
        return self.linear_fc2(gelu(self.linear_fc1(x)))
