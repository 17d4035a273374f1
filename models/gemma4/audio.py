"""The audio tower: a conformer over frames of sound, one feature for every four of them."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from cpjax.models.common.layers import Linear, Remat, RMSNorm, rms_norm, scan_layers, stack_layers
from cpjax.models.gemma4.config import AudioConfig
from cpjax.models.gemma4.layers import ClippedLinear

_EPS = 1e-6


class AudioAttention(nnx.Module):
    """Attention of a frame to itself and those just before it, with relative positions (arXiv 1901.02860).

    Frames come in chunks: each sees its own chunk and what is left of it, of which a mask keeps the context.
    """

    def __init__(self, config: AudioConfig, *, dtype: Any, rngs: nnx.Rngs):
        self.config, size = config, config.hidden_size
        linear = functools.partial(
            ClippedLinear, size, size, clipped=config.use_clipped_linears, dtype=dtype, rngs=rngs
        )
        self.q_proj, self.k_proj, self.v_proj, self.post = linear(), linear(), linear(), linear()
        self.relative_k_proj = Linear(size, size, dtype=dtype, rngs=rngs)
        self.per_dim_scale = nnx.Param(jnp.zeros(size // config.num_attention_heads, dtype))

    def __call__(self, x: jax.Array) -> jax.Array:
        """x [n, F, E] -> [n, F, E]."""
        config, (count, frames, size) = self.config, x.shape
        heads, chunk, past = config.num_attention_heads, config.attention_chunk_size, config.attention_context_left - 1
        width, wide = size // heads, jnp.promote_types(x.dtype, jnp.float32)
        chunks = -(-frames // chunk)
        q, k, v = (
            project(x).astype(wide).reshape(count, frames, heads, width)
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        q *= jax.nn.softplus(self.per_dim_scale[...].astype(wide)) * (width**-0.5 / math.log(2))
        k *= math.log1p(math.e) / math.log(2)
        q = jnp.pad(q, [(0, 0), (0, chunks * chunk - frames), (0, 0), (0, 0)])
        q = q.reshape(count, chunks, chunk, heads, width)
        seen = np.arange(chunks)[:, None] * chunk + np.arange(past + chunk)  # of what starts `past` before the first
        k, v = (
            jnp.pad(y, [(0, 0), (past, chunks * chunk - frames), (0, 0), (0, 0)])[:, seen] for y in (k, v)
        )  # [n, chunks, past + chunk, H, D]

        table = jnp.asarray(_relative_positions(size, (chunk + past) // 2), x.dtype)
        relative = jnp.einsum("ncqhd,phd->nchqp", q, self.relative_k_proj(table).astype(wide).reshape(-1, heads, width))
        ahead = np.arange(past + chunk) - np.arange(chunk)[:, None]  # `past` for a frame itself, less for earlier ones
        near = (ahead > 0) & (ahead <= past) & (seen[:, None] >= past)  # [chunks, chunk, past + chunk]
        relative = jnp.take_along_axis(
            relative, jnp.asarray(np.clip(ahead, 0, len(table) - 1))[None, None, None], axis=-1, mode="clip"
        )
        scores = jnp.einsum("ncqhd,nckhd->nchqk", q, k) + relative
        scores = config.attention_logit_cap * jnp.tanh(scores / config.attention_logit_cap)
        scores = jnp.where(jnp.asarray(near)[:, None], scores, config.attention_invalid_logits_value)
        weights = jax.nn.softmax(scores, axis=-1)
        out = jnp.einsum("nchqk,nckhd->ncqhd", weights, v).reshape(count, chunks * chunk, size)
        return self.post(out[:, :frames].astype(x.dtype))


def _relative_positions(size: int, most: int) -> np.ndarray:
    """Sines and cosines of `most`, most - 1, ... 0 frames back, [most + 1, size]."""
    steps = 10_000.0 ** (-np.arange(size // 2) / max(size // 2 - 1, 1))
    angles = np.arange(most, -1, -1)[:, None] * steps
    return np.concatenate([np.sin(angles), np.cos(angles)], axis=-1)


class AudioFeedForward(nnx.Module):
    """MLP between two norms, with a share of its output added."""

    def __init__(self, config: AudioConfig, *, dtype: Any, rngs: nnx.Rngs):
        size, self.config = config.hidden_size, config
        linear = functools.partial(ClippedLinear, clipped=config.use_clipped_linears, dtype=dtype, rngs=rngs)
        self.pre_layer_norm = RMSNorm(size, _EPS, dtype=dtype)
        self.ffw_layer_1, self.ffw_layer_2 = linear(size, 4 * size), linear(4 * size, size)
        self.post_layer_norm = RMSNorm(size, _EPS, dtype=dtype)

    def __call__(self, x: jax.Array) -> jax.Array:
        y = self.ffw_layer_2(jax.nn.silu(self.ffw_layer_1(self.pre_layer_norm(_bounded(x, self.config)))))
        return x + self.post_layer_norm(_bounded(y, self.config)) * self.config.residual_weight


class AudioConv(nnx.Module):
    """Gated pointwise convolution, causal depthwise one, and a pointwise one."""

    def __init__(self, config: AudioConfig, *, dtype: Any, rngs: nnx.Rngs):
        size, width, self.config = config.hidden_size, config.conv_kernel_size, config
        linear = functools.partial(ClippedLinear, clipped=config.use_clipped_linears, dtype=dtype, rngs=rngs)
        self.pre_layer_norm = RMSNorm(size, config.rms_norm_eps, dtype=dtype)
        self.linear_start, self.linear_end = linear(size, 2 * size), linear(size, size)
        depthwise = jax.random.normal(rngs.params(), (size, 1, width), dtype) * width**-0.5
        self.depthwise_conv1d = nnx.Param(depthwise.astype(dtype))
        self.conv_norm = RMSNorm(size, config.rms_norm_eps, dtype=dtype)

    def __call__(self, x: jax.Array) -> jax.Array:
        y, gate = jnp.split(self.linear_start(self.pre_layer_norm(x)), 2, axis=-1)
        y, weight = y * jax.nn.sigmoid(gate), self.depthwise_conv1d[...].astype(x.dtype)
        width, frames = weight.shape[2], x.shape[1]
        y = jnp.pad(y, [(0, 0), (width - 1, 0), (0, 0)])
        y = jnp.stack([y[:, i : i + frames] for i in range(width)], -1)
        y = jnp.einsum("nfew,ew->nfe", y, weight[:, 0])
        y = self.conv_norm(_bounded(y, self.config))
        return x + self.linear_end(jax.nn.silu(y))


def _bounded(x: jax.Array, config: AudioConfig) -> jax.Array:
    bound = min(config.gradient_clipping, float(jnp.finfo(x.dtype).max))
    return jnp.clip(x, -bound, bound)


class AudioLayer(nnx.Module):
    """Half an MLP, attention, convolution, half an MLP (arXiv 2005.08100)."""

    def __init__(self, config: AudioConfig, *, dtype: Any, rngs: nnx.Rngs):
        size, self.config = config.hidden_size, config
        self.feed_forward1 = AudioFeedForward(config, dtype=dtype, rngs=rngs)
        self.norm_pre_attn = RMSNorm(size, _EPS, dtype=dtype)
        self.self_attn = AudioAttention(config, dtype=dtype, rngs=rngs)
        self.norm_post_attn = RMSNorm(size, _EPS, dtype=dtype)
        self.lconv1d = AudioConv(config, dtype=dtype, rngs=rngs)
        self.feed_forward2 = AudioFeedForward(config, dtype=dtype, rngs=rngs)
        self.norm_out = RMSNorm(size, _EPS, dtype=dtype)

    def __call__(self, x: jax.Array) -> jax.Array:
        """x [n, F, E] -> the same shape."""
        x = self.feed_forward1(x)
        y = self.self_attn(self.norm_pre_attn(_bounded(x, self.config)))
        x = self.lconv1d(x + self.norm_post_attn(_bounded(y, self.config)))
        return self.norm_out(_bounded(self.feed_forward2(x), self.config))


class Subsample(nnx.Module):
    """A convolution that halves frames and bins, a layer norm over channels without bias, and a ReLU."""

    def __init__(self, inputs: int, outputs: int, eps: float, *, dtype: Any, rngs: nnx.Rngs):
        kernel = jax.random.normal(rngs.params(), (outputs, inputs, 3, 3), dtype) * (9 * inputs) ** -0.5
        self.conv, self.norm, self.eps = nnx.Param(kernel.astype(dtype)), nnx.Param(jnp.ones(outputs, dtype)), eps

    def __call__(self, x: jax.Array, real: jax.Array) -> jax.Array:
        """x [n, F, bins, channels], real [n, F] -> [n, ceil(F / 2), ceil(bins / 2), channels]."""
        x = jax.lax.conv_general_dilated(
            x * real[..., None, None].astype(x.dtype), self.conv[...].astype(x.dtype), (2, 2), [(1, 1), (1, 1)],
            dimension_numbers=("NHWC", "OIHW", "NHWC"),
        )  # fmt: skip
        wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
        wide = rms_norm(wide - wide.mean(-1, keepdims=True), self.eps) * self.norm[...].astype(wide.dtype)
        return jax.nn.relu(wide).astype(x.dtype)


class Audio(nnx.Module):
    """Two subsampling convolutions, conformer layers, and the projection to the text width.

    `out` is the text model's width.
    """

    def __init__(self, config: AudioConfig, out: int, *, dtype: Any, rngs: nnx.Rngs):
        self.config = config
        first, second = config.subsampling_conv_channels
        self.layer0 = Subsample(1, first, config.rms_norm_eps, dtype=dtype, rngs=rngs)
        self.layer1 = Subsample(first, second, config.rms_norm_eps, dtype=dtype, rngs=rngs)
        self.input_proj_linear = Linear(first // 4 * second, config.hidden_size, dtype=dtype, rngs=rngs)
        self.blocks = stack_layers(
            lambda rngs: AudioLayer(config, dtype=dtype, rngs=rngs), config.num_hidden_layers, rngs
        )
        self.output_proj = Linear(config.hidden_size, config.output_proj_dims, bias=True, dtype=dtype, rngs=rngs)
        self.projection = Linear(config.output_proj_dims, out, dtype=dtype, rngs=rngs)

    def __call__(self, batch: Mapping[str, jax.Array], dtype: Any, remat: Remat) -> jax.Array:
        """The features of every row, [B, A ceil(F / 4), out]; those of pads are unspecified.

        Reads audio_features and audio_frames.
        """
        sounds = batch["audio_features"]
        rows, count, frames, bins = sounds.shape
        x = sounds.reshape(rows * count, frames, bins, 1).astype(dtype)
        real = jnp.arange(frames) < batch["audio_frames"].reshape(-1, 1)
        x = self.layer0(x, real)
        x = self.layer1(x, real[:, ::2])
        x = self.input_proj_linear(x.reshape(*x.shape[:2], -1))
        x = self.output_proj(scan_layers(self.blocks, x, remat=remat))
        out = self.projection(rms_norm(x, self.config.rms_norm_eps).astype(x.dtype))
        return out.reshape(rows, -1, out.shape[-1])
