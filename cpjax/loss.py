"""Cross-entropy and distillation over a large vocabulary that never hold the logits of all classes at once."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from cpjax.shard import IGNORE
from cpjax.varying import vary_over, varying_axes


def cross_entropy(
    hidden: jax.Array,
    head: jax.Array,
    labels: jax.Array,
    *,
    valid_tokens: Any,
    softcap: float | None = None,
    chunk_size: int = 1024,
) -> tuple[jax.Array, jax.Array]:
    """This rank's share of the mean cross-entropy of softmax(hidden @ head), and its number of correct predictions.

    The sum of the first result over all ranks, rows and microbatches of a global step is that step's loss, whoever
    holds the labels. The labels are the targets of their own positions: nothing is shifted here.

    The vocabulary is visited `chunk_size` classes at a time with a running log-sum-exp, and once more, recomputed, in
    the backward pass. Sums and exponentials are in float32 or wider; products take the operands' dtype.

    What a position with the label -100 holds, NaN or infinite, reaches neither the loss nor a gradient.

    Args:
        hidden: [B, L, E].
        head: [E, V]. Under `shard_map` it may be the same on all ranks; its gradient is then summed over them.
        labels: int [B, L], 0 .. V-1, or -100 for no loss. Any other label makes the loss and its gradients NaN where
            values are traced, under `jax.jit` and `shard_map`; where they are at hand it is refused.
        valid_tokens: number of labels other than -100 in the whole global step, counted before sharding. Zero is
            allowed: the loss and its gradients are then zero.
        softcap: static c: the logits become c tanh(logit / c).
        chunk_size: classes per chunk; it does not change the result.

    Returns:
        loss, a scalar: local sum / valid_tokens; correct, an int32 scalar: local valid labels that are the argmax.

    Raises:
        ValueError: shapes that do not fit, labels that are no signed integers, a label outside 0 .. V-1 (unless
            traced), softcap <= 0, or chunk_size < 1.
    """
    _check("cross_entropy", hidden, head, labels, softcap, chunk_size)
    labels = _as_labels("cross_entropy", labels, head.shape[1])
    total, correct = _total(*_alike(hidden, head, labels), softcap, chunk_size)
    return total / jnp.maximum(valid_tokens, 1), correct


def distillation_loss(
    hidden: jax.Array,
    head: jax.Array,
    teacher_hidden: jax.Array,
    teacher_head: jax.Array,
    labels: jax.Array,
    *,
    valid_tokens: Any,
    ratio: float,
    temperature: float,
    softcap: float | None = None,
    teacher_softcap: float | None = None,
    chunk_size: int = 1024,
) -> tuple[jax.Array, tuple[jax.Array, jax.Array, jax.Array]]:
    """(1 - r) CE + r T^2 KL(teacher || student): this rank's share of its mean over the valid labels.

    CE is `cross_entropy`; KL is that of softmax(teacher_logits / T) and softmax(logits / T) at the positions with a
    label, and T^2 keeps its gradient at the size of CE's (arXiv 1503.02531). Both are computed as `cross_entropy` is:
    by chunks of classes, of student and teacher at once, and anew in the backward pass. The teacher gets no gradient.

    Args:
        hidden, head, labels, valid_tokens, softcap, chunk_size: as for `cross_entropy`.
        teacher_hidden: [B, L, F], of the same tokens.
        teacher_head: [F, V], of the same vocabulary.
        ratio: r, in [0, 1].
        temperature: T > 0, which divides capped logits.
        teacher_softcap: of the teacher's logits.

    Returns:
        loss, and (ce, kl, correct): the two parts without their factors, and the number of valid labels that are the
        student's argmax; all are scalars, to be added over ranks, rows and microbatches.

    Raises:
        ValueError: what `cross_entropy` refuses, vocabularies of different size, ratio or temperature out of range.
    """
    _check("distillation_loss", hidden, head, labels, softcap, chunk_size)
    _check("distillation_loss of the teacher", teacher_hidden, teacher_head, labels, teacher_softcap, chunk_size)
    if head.shape[1] != teacher_head.shape[1]:
        raise ValueError(
            f"distillation_loss was given a head of {head.shape[1]} classes, the teacher's of {teacher_head.shape[1]}: "
            "both must have the same vocabulary"
        )
    if not 0 <= ratio <= 1 or not temperature > 0:
        raise ValueError(
            f"distillation_loss was given ratio={ratio} and temperature={temperature}: ratio must be in [0, 1], "
            "temperature above 0"
        )
    labels = _as_labels("distillation_loss", labels, head.shape[1])
    operands = _alike(hidden, head, *jax.lax.stop_gradient((teacher_hidden, teacher_head)), labels)
    ce, kl, correct = _totals(*operands, float(temperature), (softcap, teacher_softcap), chunk_size)
    ce, kl = (total / jnp.maximum(valid_tokens, 1) for total in (ce, kl))
    return (1 - ratio) * ce + ratio * temperature**2 * kl, (ce, kl, correct)


def _check(
    name: str, hidden: jax.Array, head: jax.Array, labels: jax.Array, softcap: float | None, chunk_size: int
) -> None:
    if hidden.ndim != 3 or head.ndim != 2 or head.shape[0] != hidden.shape[2] or labels.shape != hidden.shape[:2]:
        raise ValueError(
            f"{name} was given hidden {hidden.shape}, head {head.shape}, labels {labels.shape}: "
            "it needs hidden [B, L, E], head [E, V] and labels [B, L]"
        )
    if softcap is not None and not softcap > 0:
        raise ValueError(f"{name} was given softcap={softcap}: give a number above 0, or None")
    if chunk_size < 1:
        raise ValueError(f"{name} was given chunk_size={chunk_size}: it must be at least 1")


def _as_labels(name: str, labels: Any, vocabulary: int) -> jax.Array:
    """The labels as int32 or wider; refused where one is at hand that names no class."""
    if not jnp.issubdtype(labels.dtype, jnp.signedinteger):
        raise ValueError(f"{name} was given labels of dtype {labels.dtype}, which does not hold -100: make them int32")
    if not isinstance(labels, jax.core.Tracer) and getattr(labels, "is_fully_addressable", True):
        values = np.asarray(labels).astype(np.int64)
        for row, token in np.argwhere(outside_classes(values, vocabulary))[:1]:
            raise ValueError(
                f"{name} was given the label {values[row, token]} at row {row}, token {token}: it must be in 0 .. "
                f"{vocabulary - 1}, the classes of the head, or {IGNORE} for no loss"
            )
    return jnp.asarray(labels, jnp.promote_types(labels.dtype, jnp.int32))  # int8 does not count classes


def outside_classes(labels: Any, vocabulary: int) -> Any:
    """Which labels name no class, and are not -100 either: bool, like the labels."""
    return (labels != IGNORE) & ((labels < 0) | (labels >= vocabulary))


def _alike(*arrays: jax.Array) -> list[jax.Array]:
    """All varying over the same axes: the transpose of this sums the gradient of a replicated head over the ranks."""
    axes: frozenset[Any] = frozenset().union(*map(varying_axes, arrays))
    return [vary_over(x, axes) for x in arrays]


def _over_classes(
    step: Callable[..., Any], carry: Any, heads: Sequence[jax.Array], chunk_size: int, axes: frozenset[Any]
) -> Any:
    """carry = step(carry, first class, head[:, chunk] of each head) over chunks of classes, the last one shorter."""
    vocabulary = heads[0].shape[1]
    size = min(chunk_size, vocabulary)

    def body(carry: Any, start: jax.Array) -> tuple[Any, None]:
        return step(carry, start, *(jax.lax.dynamic_slice_in_dim(head, start, size, axis=1) for head in heads)), None

    whole = vocabulary - vocabulary % size
    carry = jax.tree.map(lambda x: vary_over(x, axes), carry)
    carry, _ = jax.lax.scan(body, carry, jnp.arange(0, whole, size, dtype=jnp.int32))
    return step(carry, whole, *(head[:, whole:] for head in heads)) if whole < vocabulary else carry


def _wide(*arrays: jax.Array) -> Any:
    return jnp.promote_types(jnp.result_type(*arrays), jnp.float32)


def _logits(hidden: jax.Array, head: jax.Array, softcap: float | None) -> jax.Array:
    logits = jnp.einsum("ble,ev->blv", hidden, head, preferred_element_type=_wide(hidden, head))
    return logits if softcap is None else softcap * jnp.tanh(logits / softcap)


def _uncapped(dlogits: jax.Array, logits: jax.Array, softcap: float | None) -> jax.Array:
    """The gradient in hidden @ head from that in the `logits` made of it."""
    return dlogits if softcap is None else dlogits * (1 - jnp.square(logits / softcap))


def _is_label(labels: jax.Array, start: Any, size: int) -> jax.Array:
    """bool [B, L, size]: whether a class of the chunk is the token's label."""
    return labels[..., None] == start + jnp.arange(size, dtype=labels.dtype)


def _labelled(hidden: jax.Array, labels: jax.Array) -> jax.Array:
    """The hidden states, 0 where there is no label: a NaN there would come through products with 0."""
    return jnp.where((labels != IGNORE)[..., None], hidden, 0)


def _weights(labels: jax.Array, vocabulary: int, cotangent: jax.Array) -> jax.Array:
    """[B, L, 1]: the cotangent of each token's loss, 0 where there is no label, NaN where it names no class."""
    valid = jnp.where(outside_classes(labels, vocabulary), jnp.nan, cotangent)
    return jnp.where(labels != IGNORE, valid, 0)[..., None]


def _start_ce(labels: jax.Array, vocabulary: int, dtype: Any) -> Any:
    """Before any class was seen: largest logit, sum of exp(logit - largest), the label's logit, the best class.

    The logit of a label that names no class is NaN, so that its loss is.
    """
    zero = jnp.zeros(labels.shape, dtype)
    label_logit = jnp.where(outside_classes(labels, vocabulary), jnp.asarray(jnp.nan, dtype), zero)
    return zero - jnp.inf, zero, label_logit, jnp.zeros(labels.shape, jnp.int32)


def _next_ce(carry: Any, start: Any, logits: jax.Array, labels: jax.Array) -> Any:
    """The same after one more chunk of logits."""
    top, scale, label_logit, best = carry
    chunk_top = logits.max(-1)
    best = jnp.where(chunk_top > top, start + jnp.argmax(logits, -1).astype(jnp.int32), best)
    new_top = jnp.maximum(top, chunk_top)
    scale = scale * jnp.exp(top - new_top) + jnp.exp(logits - new_top[..., None]).sum(-1)
    label_logit += jnp.where(_is_label(labels, start, logits.shape[2]), logits, 0).sum(-1)
    return new_top, scale, label_logit, best


def _end_ce(carry: Any, labels: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Log-sum-exp of each token, sum of the losses of valid tokens, and the number of correct ones."""
    top, scale, label_logit, best = carry
    lse = top + jnp.log(scale)
    valid = labels != IGNORE
    return lse, jnp.where(valid, lse - label_logit, 0).sum(), (valid & (best == labels)).sum(dtype=jnp.int32)


def _backward(
    dlogits_of: Callable[..., jax.Array], hidden: jax.Array, heads: Sequence[jax.Array], chunk_size: int, dtype: Any
) -> tuple[jax.Array, jax.Array]:
    """Gradients in hidden and heads[0] from those in the logits, dlogits_of(first class, columns of each head)."""

    def step(carry: Any, start: Any, columns: jax.Array, *others: jax.Array) -> Any:
        dhidden, dhead = carry
        dlogits = dlogits_of(start, columns, *others).astype(hidden.dtype)
        dhidden += jnp.einsum("blv,ev->ble", dlogits, columns, preferred_element_type=dhidden.dtype)
        dcolumns = jnp.einsum("ble,blv->ev", hidden, dlogits, preferred_element_type=dhidden.dtype)
        return dhidden, jax.lax.dynamic_update_slice_in_dim(dhead, dcolumns.astype(dhead.dtype), start, axis=1)

    carry = (jnp.zeros(hidden.shape, dtype), jnp.zeros(heads[0].shape, heads[0].dtype))
    dhidden, dhead = _over_classes(step, carry, heads, chunk_size, varying_axes(hidden))
    return dhidden.astype(hidden.dtype), dhead


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _total(
    hidden: jax.Array, head: jax.Array, labels: jax.Array, softcap: float | None, chunk_size: int
) -> tuple[jax.Array, jax.Array]:
    """Sum of the losses of valid tokens, and the number of correct ones."""
    return _total_fwd(hidden, head, labels, softcap, chunk_size)[0]


def _total_fwd(hidden: jax.Array, head: jax.Array, labels: jax.Array, softcap: float | None, chunk_size: int) -> Any:
    states = _labelled(hidden, labels)

    def step(carry: Any, start: Any, columns: jax.Array) -> Any:
        return _next_ce(carry, start, _logits(states, columns, softcap), labels)

    carry = _start_ce(labels, head.shape[1], _wide(hidden, head))
    carry = _over_classes(step, carry, (head,), chunk_size, varying_axes(hidden))
    lse, total, correct = _end_ce(carry, labels)
    return (total, correct), (hidden, head, labels, lse)


def _total_bwd(softcap: float | None, chunk_size: int, residuals: Any, cotangents: Any) -> Any:
    hidden, head, labels, lse = residuals
    hidden, weight = _labelled(hidden, labels), _weights(labels, head.shape[1], cotangents[0])

    def dlogits(start: Any, columns: jax.Array) -> jax.Array:
        logits = _logits(hidden, columns, softcap)
        probabilities = jnp.exp(logits - lse[..., None])
        return _uncapped((probabilities - _is_label(labels, start, columns.shape[1])) * weight, logits, softcap)

    return *_backward(dlogits, hidden, (head,), chunk_size, lse.dtype), None


_total.defvjp(_total_fwd, _total_bwd)


Softcaps = tuple[float | None, float | None]
"""Of the student's and of the teacher's logits."""


@functools.partial(jax.custom_vjp, nondiff_argnums=(5, 6, 7))
def _totals(
    hidden: jax.Array, head: jax.Array, teacher_hidden: jax.Array, teacher_head: jax.Array, labels: jax.Array,
    temperature: float, softcaps: Softcaps, chunk_size: int,
) -> tuple[jax.Array, jax.Array, jax.Array]:  # fmt: skip
    """Sums of the cross-entropies and of the divergences at a temperature, and the number of correct tokens."""
    return _totals_fwd(hidden, head, teacher_hidden, teacher_head, labels, temperature, softcaps, chunk_size)[0]


def _totals_fwd(
    hidden: jax.Array, head: jax.Array, teacher_hidden: jax.Array, teacher_head: jax.Array, labels: jax.Array,
    temperature: float, softcaps: Softcaps, chunk_size: int,
) -> Any:  # fmt: skip
    dtype = _wide(hidden, head)
    states, teacher_states = _labelled(hidden, labels), _labelled(teacher_hidden, labels)

    def step(carry: Any, start: Any, columns: jax.Array, teacher_columns: jax.Array) -> Any:
        ce, soft_scale, (top, scale, gap) = carry
        logits = _logits(states, columns, softcaps[0])
        targets = _logits(teacher_states, teacher_columns, softcaps[1]).astype(dtype)
        new_ce = _next_ce(ce, start, logits, labels)
        # Softmax at the temperature, under the same largest logits.
        soft_scale *= jnp.exp((ce[0] - new_ce[0]) / temperature)
        soft_scale += jnp.exp((logits - new_ce[0][..., None]) / temperature).sum(-1)
        new_top = jnp.maximum(top, targets.max(-1))
        shrink = jnp.exp((top - new_top) / temperature)
        weights = jnp.exp((targets - new_top[..., None]) / temperature)
        scale = scale * shrink + weights.sum(-1)
        gap = gap * shrink + (weights * (targets - logits)).sum(-1)
        return new_ce, soft_scale, (new_top, scale, gap)

    zero = jnp.zeros(labels.shape, dtype)
    carry = (_start_ce(labels, head.shape[1], dtype), zero, (zero - jnp.inf, zero, zero))
    ce, soft_scale, (top, scale, gap) = _over_classes(
        step, carry, (head, teacher_head), chunk_size, varying_axes(hidden)
    )
    lse, total, correct = _end_ce(ce, labels)
    soft_lse = ce[0] / temperature + jnp.log(soft_scale)
    teacher_lse = top / temperature + jnp.log(scale)
    # KL = sum p (log p - log q) with p = exp(targets / T - teacher_lse), q = exp(logits / T - soft_lse).
    divergence = gap / scale / temperature - (teacher_lse - soft_lse)
    divergence = jnp.where(labels != IGNORE, divergence, 0).sum()
    residuals = (hidden, head, teacher_hidden, teacher_head, labels, lse, soft_lse, teacher_lse)
    return (total, divergence, correct), residuals


def _totals_bwd(temperature: float, softcaps: Softcaps, chunk_size: int, residuals: Any, cotangents: Any) -> Any:
    hidden, head, teacher_hidden, teacher_head, labels, lse, soft_lse, teacher_lse = residuals
    hidden, teacher_hidden = _labelled(hidden, labels), _labelled(teacher_hidden, labels)
    ce_weight, kl_weight = (_weights(labels, head.shape[1], x) for x in cotangents[:2])

    def dlogits(start: Any, columns: jax.Array, teacher_columns: jax.Array) -> jax.Array:
        logits = _logits(hidden, columns, softcaps[0])
        targets = _logits(teacher_hidden, teacher_columns, softcaps[1]).astype(logits.dtype)
        hard = jnp.exp(logits - lse[..., None]) - _is_label(labels, start, columns.shape[1])
        soft = jnp.exp(logits / temperature - soft_lse[..., None])
        soft -= jnp.exp(targets / temperature - teacher_lse[..., None])
        return _uncapped(ce_weight * hard + kl_weight / temperature * soft, logits, softcaps[0])

    grads = _backward(dlogits, hidden, (head, teacher_head), chunk_size, lse.dtype)
    return *grads, None, None, None


_totals.defvjp(_totals_fwd, _totals_bwd)
