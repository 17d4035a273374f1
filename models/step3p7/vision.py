"""The vision tower: patches of all views of a row, packed, to the features that its placeholder tokens become."""

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
    scan_layers,
    stack_layers,
)
from cpjax.models.common.rope import rope_frequencies
from cpjax.models.step3p7.config import VisionConfig
from cpjax.shard import Identity, Sharder, make_sharder


class VisionAttention(nnx.Module):
    """Attention of patches to the patches of their own view."""

    def __init__(self, config: VisionConfig, *, dtype: Any, rngs: nnx.Rngs):
        self.num_heads = config.num_attention_heads
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (
            Linear(config.hidden_size, config.hidden_size, bias=True, dtype=dtype, rngs=rngs) for _ in range(4)
        )

    def __call__(self, x: jax.Array, angles: jax.Array, sharder: Sharder, mask: Mask, kernel: str) -> jax.Array:
        """x [B, N, E], angles [B, N, D/2] -> [B, N, E]."""
        q, k, v = (p(x).reshape(*x.shape[:2], self.num_heads, -1) for p in (self.q_proj, self.k_proj, self.v_proj))
        q, k = (apply_rope(_halves(t), angles) for t in (q, k))
        out = attention(q, k, v, sharder=sharder, mask=mask, kernel=kernel)
        return self.out_proj(out.reshape(x.shape))


def _halves(x: jax.Array) -> jax.Array:
    """Checkpoints have the two features of a rotated pair side by side: this moves them half a head apart."""
    return x.reshape(*x.shape[:-1], -1, 2).swapaxes(-1, -2).reshape(x.shape)


class VisionBlock(nnx.Module):
    """Pre-norm attention and MLP, each scaled feature by feature before it is added."""

    def __init__(self, config: VisionConfig, *, dtype: Any, rngs: nnx.Rngs):
        size, eps = config.hidden_size, config.layer_norm_eps
        self.ln_1 = LayerNorm(size, eps, dtype=dtype)
        self.attn = VisionAttention(config, dtype=dtype, rngs=rngs)
        self.ls_1 = nnx.Param(jnp.full(size, config.layer_scale_init_value, dtype))
        self.ln_2 = LayerNorm(size, eps, dtype=dtype)
        self.c_fc = Linear(size, config.intermediate_size, bias=True, dtype=dtype, rngs=rngs)
        self.c_proj = Linear(config.intermediate_size, size, bias=True, dtype=dtype, rngs=rngs)
        self.ls_2 = nnx.Param(jnp.full(size, config.layer_scale_init_value, dtype))

    def __call__(self, x: jax.Array, angles: jax.Array, sharder: Sharder, mask: Mask, kernel: str) -> jax.Array:
        x = x + self.ls_1[...].astype(x.dtype) * self.attn(self.ln_1(x), angles, sharder, mask, kernel)
        hidden = self.c_fc(self.ln_2(x))
        hidden = hidden * jax.nn.sigmoid(1.702 * hidden)
        return x + self.ls_2[...].astype(x.dtype) * self.c_proj(hidden)


class Vision(nnx.Module):
    """Patch embedding, learned and rotary positions, blocks, and two convolutions that halve each view's sides."""

    def __init__(self, config: VisionConfig, *, dtype: Any, rngs: nnx.Rngs):
        self.config = config
        size = config.hidden_size
        self.conv1 = Linear(config.patch_dim, size, dtype=dtype, rngs=rngs)
        table = 0.02 * jax.random.normal(rngs.params(), (config.table_side**2, size), dtype)
        self.pos_embed = nnx.Param(table.astype(dtype))
        self.ln_pre = LayerNorm(size, config.layer_norm_eps, dtype=dtype)
        self.blocks = stack_layers(
            lambda rngs: VisionBlock(config, dtype=dtype, rngs=rngs), config.num_hidden_layers, rngs
        )
        self.downsampler1 = Linear(9 * size, 2 * size, bias=True, dtype=dtype, rngs=rngs)  # in: channel, row, column
        self.downsampler2 = Linear(18 * size, 4 * size, bias=True, dtype=dtype, rngs=rngs)

    def __call__(self, batch: Mapping[str, jax.Array], dtype: Any, remat: Remat, kernel: str) -> jax.Array:
        """The features of every row, [B, M, 4 hidden_size]; those of pads are unspecified.

        Reads pixel_values, vision_segment_ids, vision_positions, vision_table_indices, vision_table_weights,
        vision_windows1 and vision_windows2.
        """
        x = self.conv1(batch["pixel_values"].astype(dtype))
        wide = jnp.promote_types(x.dtype, jnp.float32)
        corners = self.pos_embed[...].astype(wide)[batch["vision_table_indices"]]
        x = x + (corners * batch["vision_table_weights"].astype(wide)[..., None]).sum(-2).astype(x.dtype)

        head_dim = self.config.hidden_size // self.config.num_attention_heads
        frequencies = rope_frequencies(head_dim // 2, self.config.rope_theta)
        # The column turns the first half of the frequencies, the row the second.
        angles = batch["vision_positions"][..., ::-1].astype(wide)[..., None] * jnp.asarray(frequencies, wide)
        angles = angles.reshape(*x.shape[:2], head_dim // 2)

        segments = batch["vision_segment_ids"]
        mask = Mask(causal=False, document_ids=segments, padding_mask=segments == 0)
        sharder = make_sharder(x.shape[1], Identity())
        x = scan_layers(self.blocks, self.ln_pre(x), angles, sharder, mask, kernel, remat=remat)
        x = self.downsampler1(_windows(x, batch["vision_windows1"]))
        return self.downsampler2(_windows(x, batch["vision_windows2"]))


def _windows(x: jax.Array, index: jax.Array) -> jax.Array:
    """What each 3 x 3 window of a convolution sees, channel by channel: x [B, N, E], index [B, M, 9] -> [B, M, 9 E].

    Args:
        index: -1 for the border of zeros.
    """
    rows, count, _ = index.shape
    seen = jnp.take_along_axis(x, jnp.maximum(index, 0).reshape(rows, -1, 1), axis=1, mode="clip")
    seen = jnp.where(index[..., None] >= 0, seen.reshape(rows, count, 9, -1), 0)
    return seen.swapaxes(2, 3).reshape(rows, count, -1)
