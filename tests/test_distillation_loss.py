"""Distillation: values and gradients against the dense formula, across ranks, and what is never materialised."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from cpjax.loss import cross_entropy, distillation_loss
from cpjax.shard import IGNORE, layout_from_name, make_batch, make_sharder

from .test_loss import capped, count, inputs

RATIO, TEMPERATURE = 0.3, 2.5


@jax.jit
def dense(hidden, head, teacher_hidden, teacher_head, labels, softcaps=(None, None)):
    """(loss, (ce, kl)) from all logits at once."""
    logits, targets = map(capped, (hidden @ head, teacher_hidden @ teacher_head), softcaps)
    valid = labels != IGNORE

    def mean(values):
        return jnp.where(valid, values, 0).sum() / jnp.maximum(valid.sum(), 1)

    ce = -mean(jnp.take_along_axis(jax.nn.log_softmax(logits), jnp.maximum(labels, 0)[..., None], axis=-1)[..., 0])
    p, q = (jax.nn.log_softmax(x / TEMPERATURE) for x in (targets, logits))
    kl = mean((jnp.exp(p) * (p - q)).sum(-1))
    return (1 - RATIO) * ce + RATIO * TEMPERATURE**2 * kl, (ce, kl)


def pair(seed, batch, length, vocabulary, dtype=np.float64, valid=0.7):
    """Student of width 4 and teacher of width 7, and labels."""
    hidden, head, labels = inputs(seed, batch, length, 4, vocabulary, dtype, valid)
    return hidden, head, *inputs(seed + 1, batch, length, 7, vocabulary, dtype)[:2], labels


def on_ranks(cp, hidden, head, teacher_hidden, teacher_head, labels):
    """(loss, (ce, kl, correct)), gradients in hidden and head: sharded inside, summed over the ranks."""
    sharder = make_sharder(hidden.shape[1], layout_from_name("zigzag", cp))
    valid = jnp.asarray(count(labels))

    def body(hidden, head, teacher_hidden, teacher_head, labels, valid):
        own, targets = (sharder.shard(x, fill=0) for x in (hidden, teacher_hidden))
        result = distillation_loss(
            own, head, targets, teacher_head, sharder.shard(labels, fill=IGNORE),
            valid_tokens=valid, ratio=RATIO, temperature=TEMPERATURE, chunk_size=8,
        )  # fmt: skip
        return jax.lax.psum(result, "cp") if cp > 1 else result

    if cp > 1:
        mesh = jax.make_mesh((cp,), ("cp",), devices=jax.devices()[:cp], axis_types=(jax.sharding.AxisType.Auto,))
        body = jax.shard_map(body, mesh=mesh, in_specs=P(), out_specs=P(), axis_names={"cp"})
    operands = hidden, head, teacher_hidden, teacher_head, labels, valid
    return jax.jit(jax.value_and_grad(body, (0, 1), has_aux=True))(*operands)


@pytest.mark.parametrize(("chunk_size", "softcaps"), [(1, (None, None)), (7, (1.5, 2.5)), (1024, (None, None))])
def test_float64_equals_the_dense_formula(chunk_size, softcaps):
    with jax.enable_x64(True):
        *operands, labels = pair(0, 2, 5, 20)

        def loss(*operands):
            return distillation_loss(
                *operands, labels, valid_tokens=count(labels), ratio=RATIO, temperature=TEMPERATURE,
                softcap=softcaps[0], teacher_softcap=softcaps[1], chunk_size=chunk_size,
            )  # fmt: skip

        (value, (ce, kl, correct)), grads = jax.jit(jax.value_and_grad(loss, (0, 1, 2, 3), has_aux=True))(*operands)
        (wanted, parts), wanted_grads = jax.value_and_grad(dense, (0, 1), has_aux=True)(*operands, labels, softcaps)
        np.testing.assert_allclose([value, ce, kl], [wanted, *parts], rtol=1e-12)
        for a, b in zip(grads, wanted_grads, strict=False):
            np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-13)
        assert not any(np.asarray(grad).any() for grad in grads[2:])  # the teacher's
        own_ce, own_correct = cross_entropy(*operands[:2], labels, valid_tokens=count(labels), softcap=softcaps[0])
        assert own_correct == correct and float(own_ce) == pytest.approx(float(ce), rel=1e-13)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_what_stands_where_no_label_is_reaches_nothing(value):
    """NaN and infinite hidden states of student and teacher at -100: as with zeros there."""
    with jax.enable_x64(True):
        hidden, head, teacher_hidden, teacher_head, labels = pair(5, 2, 6, 20)
        ignored = (labels == IGNORE)[..., None]
        assert 0 < ignored.sum() < labels.size

        def loss(hidden, head, teacher_hidden):
            options = {"valid_tokens": count(labels), "ratio": RATIO, "temperature": TEMPERATURE, "chunk_size": 8}
            return distillation_loss(hidden, head, teacher_hidden, teacher_head, labels, **options)

        run = jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))
        got, wanted = (
            run(jnp.where(ignored, x, hidden), head, jnp.where(ignored, x, teacher_hidden)) for x in (value, 0)
        )
        jax.tree.map(np.testing.assert_array_equal, got, wanted)
        assert all(np.isfinite(x).all() for x in jax.tree.leaves(got))


@pytest.mark.parametrize("label", [-1, 20])
def test_a_label_that_names_no_class_is_seen(label):
    *operands, labels = pair(6, 1, 6, 20, np.float32)
    labels = labels.at[0, 2].set(label)
    options = {"valid_tokens": 5, "ratio": RATIO, "temperature": TEMPERATURE}
    with pytest.raises(ValueError, match=f"distillation_loss was given the label {label} at row 0, token 2"):
        distillation_loss(*operands, labels, **options)

    @jax.jit
    def run(operands, labels):
        own = lambda hidden, head: distillation_loss(hidden, head, *operands[2:], labels, **options)[0]  # noqa: E731
        return jax.value_and_grad(own, (0, 1))(*operands[:2])

    loss, grads = run(operands, labels)
    assert np.isnan(loss) and np.isnan(grads[1]).all()


def test_a_student_that_is_the_teacher_learns_from_the_labels_alone():
    with jax.enable_x64(True):
        hidden, head, _, _, labels = pair(2, 1, 6, 20)
        valid = count(labels)

        def loss(hidden, head, ratio):
            options = {"valid_tokens": valid, "ratio": ratio, "temperature": 3.0, "chunk_size": 6}
            return distillation_loss(hidden, head, hidden, head, labels, **options)[0]

        plain = jax.grad(lambda *x: cross_entropy(*x, labels, valid_tokens=valid)[0], (0, 1))(hidden, head)
        for ratio in (0.0, 0.5, 1.0):
            grads = jax.grad(loss, (0, 1))(hidden, head, ratio)
            for a, b in zip(grads, plain, strict=True):
                np.testing.assert_allclose(a, (1 - ratio) * b, rtol=1e-12, atol=1e-14)
        assert abs(loss(hidden, head, 1.0)) < 1e-13


@pytest.mark.parametrize("cp", [1, 4])
@pytest.mark.parametrize("positions", ["last", "none"])
def test_r04_ranks_without_a_label(cp, positions):
    """Loss and gradients equal the dense ones; where there is no label at all they are zero, not NaN."""
    *operands, labels = pair(3, 1, 64, 20, np.float32)
    keep = np.arange(64) >= (61 if positions == "last" else 64)
    labels = jnp.where(keep, jnp.maximum(labels, 0), IGNORE)
    (loss, parts), grads = on_ranks(cp, *operands, labels)
    (wanted, wanted_parts), wanted_grads = jax.value_and_grad(dense, (0, 1), has_aux=True)(*operands, labels)
    np.testing.assert_allclose([loss, *parts[:2]], [wanted, *wanted_parts], rtol=1e-5)
    for a, b in zip(grads, wanted_grads, strict=True):
        assert np.isfinite(a).all()
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-6 * max(np.abs(b).max(), 1e-30))
    assert (loss == 0) == (positions == "none") == (not any(np.asarray(x).any() for x in grads))


@pytest.mark.parametrize("cp", [1, 2, 4])
def test_r07_the_target_of_position_p_is_token_p_plus_1(cp):
    """A student and a teacher whose logits are one-hot(input_ids[p + 1]) lose nothing; others do, by how far they are.

    A teacher that says input_ids[p + 2] is not agreed with: its targets are shifted no more than the labels are.
    """
    vocabulary, length = 13, 30
    ids = np.random.default_rng(3).integers(0, vocabulary, (2, length)).astype(np.int32)
    labels = np.concatenate([ids[:, 1:], np.full((2, 1), IGNORE)], axis=1).astype(np.int32)
    batch, _ = make_batch({"input_ids": ids, "labels": labels}, layout_from_name("zigzag", cp))

    def says(ahead):
        return 40 * TEMPERATURE * jax.nn.one_hot(jnp.roll(batch["input_ids"], -ahead, axis=1), vocabulary)

    head = jnp.eye(vocabulary)
    (loss, (ce, kl, correct)), _ = on_ranks(cp, says(1), head, says(1), head, batch["labels"])
    assert ce < 1e-6 and abs(kl) < 1e-5 and abs(loss) < 1e-4 and correct == count(labels)
    _, (ce, kl, correct) = on_ranks(cp, says(1), head, says(2), head, batch["labels"])[0]
    padded = np.asarray(batch["input_ids"])
    differ = (np.roll(padded, -1, 1) != np.roll(padded, -2, 1))[batch["labels"] != IGNORE].mean()
    assert ce < 1e-6 and correct == count(labels) and float(kl) == pytest.approx(40 * differ, rel=1e-5)


def test_logits_of_all_classes_are_never_held():
    length, vocabulary = 512, 32768
    *operands, labels = pair(7, 1, length, vocabulary, np.float32)

    def loss(hidden, head, teacher_hidden, teacher_head):
        operands = hidden, head, teacher_hidden, teacher_head, labels
        return distillation_loss(*operands, valid_tokens=length, ratio=0.5, temperature=2.0)[0]

    program = jax.jit(jax.grad(loss, (0, 1))).lower(*operands).compile()
    assert f"{length},{vocabulary}]" not in program.as_text()
    assert program.memory_analysis().temp_size_in_bytes < 4 * length * vocabulary / 4


def test_what_does_not_fit_is_refused():
    hidden, head, teacher_hidden, teacher_head, labels = pair(8, 1, 4, 5, np.float32)
    options = {"valid_tokens": 4, "ratio": 0.5, "temperature": 2.0}

    def refused(match, *operands, **changed):
        with pytest.raises(ValueError, match=match):
            distillation_loss(*operands, labels, **options | changed)

    refused("head of 5 classes, the teacher's of 4", hidden, head, teacher_hidden, teacher_head[:, :4])
    refused(r"of the teacher was given hidden \(1, 3, 7\)", hidden, head, teacher_hidden[:, :3], teacher_head)
    refused(r"distillation_loss was given hidden .*head \(5, 4\)", hidden, head.T, teacher_hidden, teacher_head)
    refused(r"ratio=1.5", hidden, head, teacher_hidden, teacher_head, ratio=1.5)
    refused(r"temperature=0", hidden, head, teacher_hidden, teacher_head, temperature=0.0)
