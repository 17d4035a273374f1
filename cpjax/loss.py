"""Cross-entropy over a large vocabulary that never holds the logits of all classes at once."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from cpjax.shard import IGNORE
from cpjax.varying import vary_over, varying_axes


def cross_entropy(
    hidden: jax.Array, head: jax.Array, labels: jax.Array, *, valid_tokens: Any, chunk_size: int = 1024
) -> tuple[jax.Array, jax.Array]:
    """This rank's share of the mean cross-entropy of softmax(hidden @ head), and its number of correct predictions.

    The sum of the first result over all ranks, rows and microbatches of a global step is that step's loss, whoever
    holds the labels. The labels are the targets of their own positions: nothing is shifted here.

    The vocabulary is visited `chunk_size` classes at a time with a running log-sum-exp, and once more, recomputed, in
    the backward pass. Sums and exponentials are in float32 or wider; products take the operands' dtype.

    Args:
        hidden: [B, L, E].
        head: [E, V]. Under `shard_map` it may be the same on all ranks; its gradient is then summed over them.
        labels: int [B, L], 0 .. V-1, or -100 for no loss.
        valid_tokens: number of labels other than -100 in the whole global step, counted before sharding. Zero is
            allowed: the loss and its gradients are then zero.
        chunk_size: classes per chunk; it does not change the result.

    Returns:
        loss, a scalar: local sum / valid_tokens; correct, an int32 scalar: local valid labels that are the argmax.

    Raises:
        ValueError: shapes that do not fit, or chunk_size < 1.
    """
    if hidden.ndim != 3 or head.ndim != 2 or head.shape[0] != hidden.shape[2] or labels.shape != hidden.shape[:2]:
        raise ValueError(
            f"cross_entropy was given hidden {hidden.shape}, head {head.shape}, labels {labels.shape}: "
            "it needs hidden [B, L, E], head [E, V] and labels [B, L]"
        )
    if chunk_size < 1:
        raise ValueError(f"cross_entropy was given chunk_size={chunk_size}: it must be at least 1")
    # All alike: the transpose of this marking is what sums the gradient of a replicated head over the ranks.
    axes = varying_axes(hidden) | varying_axes(head) | varying_axes(labels)
    total, correct = _total(vary_over(hidden, axes), vary_over(head, axes), vary_over(labels, axes), chunk_size)
    return total / jnp.maximum(valid_tokens, 1), correct


def _over_classes(
    step: Callable[[Any, Any, jax.Array], Any], carry: Any, head: jax.Array, chunk_size: int, axes: frozenset[Any]
) -> Any:
    """carry = step(carry, first class, head[:, chunk]) over chunks of classes, the last one shorter."""
    vocabulary = head.shape[1]
    size = min(chunk_size, vocabulary)

    def body(carry: Any, start: jax.Array) -> tuple[Any, None]:
        return step(carry, start, jax.lax.dynamic_slice_in_dim(head, start, size, axis=1)), None

    whole = vocabulary - vocabulary % size
    carry = jax.tree.map(lambda x: vary_over(x, axes), carry)
    carry, _ = jax.lax.scan(body, carry, jnp.arange(0, whole, size, dtype=jnp.int32))
    return step(carry, whole, head[:, whole:]) if whole < vocabulary else carry


def _logits(hidden: jax.Array, head: jax.Array) -> jax.Array:
    dtype = jnp.promote_types(jnp.result_type(hidden, head), jnp.float32)
    return jnp.einsum("ble,ev->blv", hidden, head, preferred_element_type=dtype)


def _is_label(labels: jax.Array, start: Any, size: int) -> jax.Array:
    """bool [B, L, size]: whether a class of the chunk is the token's label."""
    return labels[..., None] == start + jnp.arange(size, dtype=labels.dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _total(hidden: jax.Array, head: jax.Array, labels: jax.Array, chunk_size: int) -> tuple[jax.Array, jax.Array]:
    """Sum of the losses of valid tokens, and the number of correct ones."""
    return _total_fwd(hidden, head, labels, chunk_size)[0]


def _total_fwd(hidden: jax.Array, head: jax.Array, labels: jax.Array, chunk_size: int) -> Any:
    dtype = jnp.promote_types(jnp.result_type(hidden, head), jnp.float32)

    def step(carry: Any, start: Any, columns: jax.Array) -> Any:
        top, scale, label_logit, best = carry
        logits = _logits(hidden, columns)
        chunk_top = logits.max(-1)
        best = jnp.where(chunk_top > top, start + jnp.argmax(logits, -1).astype(jnp.int32), best)
        new_top = jnp.maximum(top, chunk_top)
        scale = scale * jnp.exp(top - new_top) + jnp.exp(logits - new_top[..., None]).sum(-1)
        label_logit += jnp.where(_is_label(labels, start, columns.shape[1]), logits, 0).sum(-1)
        return new_top, scale, label_logit, best

    zero = jnp.zeros(labels.shape, dtype)
    carry = (zero - jnp.inf, zero, zero, jnp.zeros(labels.shape, jnp.int32))
    top, scale, label_logit, best = _over_classes(step, carry, head, chunk_size, varying_axes(hidden))
    lse = top + jnp.log(scale)
    valid = labels != IGNORE
    total = jnp.where(valid, lse - label_logit, 0).sum()
    correct = (valid & (best == labels)).sum(dtype=jnp.int32)
    return (total, correct), (hidden, head, labels, lse)


def _total_bwd(chunk_size: int, residuals: Any, cotangents: Any) -> Any:
    hidden, head, labels, lse = residuals
    weight = jnp.where(labels != IGNORE, cotangents[0], 0)

    def step(carry: Any, start: Any, columns: jax.Array) -> Any:
        dhidden, dhead = carry
        probabilities = jnp.exp(_logits(hidden, columns) - lse[..., None])
        dlogits = (probabilities - _is_label(labels, start, columns.shape[1])) * weight[..., None]
        dlogits = dlogits.astype(hidden.dtype)
        dhidden += jnp.einsum("blv,ev->ble", dlogits, columns, preferred_element_type=dhidden.dtype)
        dcolumns = jnp.einsum("ble,blv->ev", hidden, dlogits, preferred_element_type=dhidden.dtype)
        return dhidden, jax.lax.dynamic_update_slice_in_dim(dhead, dcolumns.astype(dhead.dtype), start, axis=1)

    carry = (jnp.zeros(hidden.shape, lse.dtype), jnp.zeros(head.shape, head.dtype))
    dhidden, dhead = _over_classes(step, carry, head, chunk_size, varying_axes(hidden))
    return dhidden.astype(hidden.dtype), dhead, None


_total.defvjp(_total_fwd, _total_bwd)
