"""Cross-entropy: values and gradients against the dense formula, across ranks, and what is never materialised."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from cpjax.loss import cross_entropy
from cpjax.shard import IGNORE, Zigzag, layout_from_name, make_batch, make_sharder


def capped(logits, softcap):
    return logits if softcap is None else softcap * jnp.tanh(logits / softcap)


@jax.jit
def dense(hidden, head, labels, softcap=None):
    """Mean loss over valid labels, from all logits at once."""
    logits = capped(hidden @ head, softcap)
    logs = jax.nn.log_softmax(logits, axis=-1)
    picked = jnp.take_along_axis(logs, jnp.maximum(labels, 0)[..., None], axis=-1)[..., 0]
    valid = labels != IGNORE
    return -jnp.where(valid, picked, 0).sum() / jnp.maximum(valid.sum(), 1)


def inputs(seed, batch, length, embed, vocabulary, dtype=np.float64, valid=0.7):
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, vocabulary, (batch, length))
    labels = np.where(rng.uniform(size=labels.shape) < valid, labels, IGNORE).astype(np.int32)
    hidden, head = rng.normal(size=(batch, length, embed)), rng.normal(size=(embed, vocabulary))
    return jnp.asarray(hidden, dtype), jnp.asarray(head, dtype), jnp.asarray(labels)


def count(labels):
    return int((np.asarray(labels) != IGNORE).sum())


def on_ranks(name, cp, hidden, head, labels):
    """(loss, correct), gradients in hidden and head: sharded inside, summed over the ranks."""
    sharder = make_sharder(hidden.shape[1], layout_from_name(name, cp))
    valid = jnp.asarray(count(labels))

    def body(hidden, head, labels, valid):
        local = sharder.shard(hidden, fill=0), head, sharder.shard(labels, fill=IGNORE)
        result = cross_entropy(*local, valid_tokens=valid, chunk_size=8)
        return jax.lax.psum(result, "cp") if cp > 1 else result

    if cp > 1:
        mesh = jax.make_mesh((cp,), ("cp",), devices=jax.devices()[:cp], axis_types=(jax.sharding.AxisType.Auto,))
        body = jax.shard_map(body, mesh=mesh, in_specs=P(), out_specs=P(), axis_names={"cp"})
    return jax.jit(jax.value_and_grad(body, (0, 1), has_aux=True))(hidden, head, labels, valid)


@pytest.mark.parametrize(("chunk_size", "softcap"), [(1, None), (7, None), (10, 1.5), (1024, None), (1024, 0.7)])
def test_float64_equals_the_dense_formula(chunk_size, softcap):
    with jax.enable_x64(True):
        hidden, head, labels = inputs(0, 2, 5, 4, 20)
        valid = count(labels)

        def loss(hidden, head):
            return cross_entropy(hidden, head, labels, valid_tokens=valid, softcap=softcap, chunk_size=chunk_size)

        (value, correct), grads = jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))(hidden, head)
        wanted, wanted_grads = jax.value_and_grad(dense, (0, 1))(hidden, head, labels, softcap)
        np.testing.assert_allclose(value, wanted, rtol=1e-13)
        for a, b in zip(grads, wanted_grads, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-11, atol=1e-14)
        assert correct == ((hidden @ head).argmax(-1) == labels).sum()


@pytest.mark.parametrize(("name", "cp"), [("identity", 1), ("contiguous", 4), ("zigzag", 4), ("striped", 8)])
@pytest.mark.parametrize("positions", ["most", "1 to 9", "last", "none"])
def test_r04_ranks_without_a_label(name, cp, positions):
    """Loss and gradients equal the dense ones; where there is no label at all they are zero, not NaN."""
    hidden, head, labels = inputs(1, 1, 64, 8, 20, np.float32)
    keep = {"most": np.arange(64) % 3 > 0, "1 to 9": np.arange(64) % 64 < 10, "last": np.arange(64) == 63}
    targets = np.random.default_rng(2).integers(0, 20, (1, 64))
    labels = jnp.asarray(np.where(keep.get(positions, np.zeros(64, bool)), targets, IGNORE), jnp.int32)
    if positions == "1 to 9":
        labels = labels.at[:, 0].set(IGNORE)
    (loss, _), grads = on_ranks(name, cp, hidden, head, labels)
    wanted, wanted_grads = jax.value_and_grad(dense, (0, 1))(hidden, head, labels)
    np.testing.assert_allclose(loss, wanted, rtol=1e-6)
    for a, b in zip(grads, wanted_grads, strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-6 * max(np.abs(b).max(), 1e-30))
    if positions == "none":
        assert loss == 0 and not any(np.asarray(x).any() for x in grads)


@pytest.mark.parametrize("cp", [1, 2, 4])
def test_r07_the_target_of_position_p_is_token_p_plus_1(cp):
    """A model whose logits are one-hot(input_ids[p + 1]) has loss 0 and every prediction right."""
    vocabulary, length = 13, 30
    ids = np.random.default_rng(3).integers(0, vocabulary, (2, length)).astype(np.int32)
    labels = np.concatenate([ids[:, 1:], np.full((2, 1), IGNORE)], axis=1).astype(np.int32)
    batch, sharder = make_batch({"input_ids": ids, "labels": labels}, layout_from_name("zigzag", cp))
    following = jnp.roll(batch["input_ids"], -1, axis=1)
    (loss, correct), _ = on_ranks(
        "zigzag", cp, 40.0 * jax.nn.one_hot(following, vocabulary), jnp.eye(vocabulary), batch["labels"]
    )
    assert loss < 1e-6 and correct == count(labels)
    assert sharder.padded_length == batch["labels"].shape[1]


@pytest.mark.parametrize("chunk_size", [1024, 8192, 262144])
def test_r12_large_vocabulary_in_bfloat16(chunk_size):
    rows, embed, vocabulary = 32, 64, 262144
    rng = np.random.default_rng(4)
    # logits are N(0, 10): up to about +-40 and beyond
    hidden = jnp.asarray(rng.normal(size=(1, rows, embed)), jnp.bfloat16)
    head = jnp.asarray(rng.standard_normal((embed, vocabulary), np.float32) * (10 / embed**0.5), jnp.bfloat16)
    labels = jnp.asarray(rng.integers(0, vocabulary, (1, rows)), jnp.int32)

    def loss(hidden, head):
        return cross_entropy(hidden, head, labels, valid_tokens=rows, chunk_size=chunk_size)

    (value, _), (dhidden, dhead) = jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))(hidden, head)

    wide_hidden, wide_head = (np.asarray(x, np.float64) for x in (hidden[0], head))
    logits = wide_hidden @ wide_head
    top = logits.max(-1, keepdims=True)
    lse = top + np.log(np.exp(logits - top).sum(-1, keepdims=True))
    target = np.asarray(labels[0])
    assert abs(value - (lse[:, 0] - logits[np.arange(rows), target]).mean()) < 1e-3
    dlogits = np.exp(logits - lse)
    dlogits[np.arange(rows), target] -= 1
    for got, wanted in ((dhidden[0], dlogits @ wide_head.T / rows), (dhead, wide_hidden.T @ dlogits / rows)):
        assert np.linalg.norm(np.asarray(got, np.float64) - wanted) < 1e-2 * np.linalg.norm(wanted)


@pytest.mark.quick
def test_i4_more_ranks_than_tokens():
    """S = 56 over 128 zigzag ranks, by index maps alone: 72 ranks without a label, and the dense loss and gradient."""
    layout = Zigzag(128)
    padded = layout.pad_length(56)
    assert padded == 256
    with jax.enable_x64(True):
        hidden, head, labels = inputs(5, 1, 56, 4, 11, valid=1.1)
        owned = layout.indices(padded, np.arange(128))  # [rank, L]
        local_labels = jnp.pad(labels, [(0, 0), (0, 200)], constant_values=IGNORE)[0, owned]
        assert (local_labels == IGNORE).all(-1).sum() == 72

        def loss(hidden, head):
            local = jnp.pad(hidden, [(0, 0), (0, 200), (0, 0)])[0, owned]
            losses, _ = jax.vmap(
                lambda hidden, labels: cross_entropy(hidden[None], head, labels[None], valid_tokens=56, chunk_size=4)
            )(local, local_labels)
            return losses.sum()

        value, grads = jax.value_and_grad(loss, (0, 1))(hidden, head)
        wanted, wanted_grads = jax.value_and_grad(dense, (0, 1))(hidden, head, labels)
        np.testing.assert_allclose(value, wanted, rtol=1e-13)
        for a, b in zip(grads, wanted_grads, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-11, atol=1e-15)


def test_i4_pad_rows_change_nothing():
    """512 rows and 200 rows of padding give what the 512 rows give."""
    with jax.enable_x64(True):
        hidden, head, labels = inputs(6, 512, 1, 4, 11)
        more = jnp.pad(hidden, [(0, 200), (0, 0), (0, 0)]), jnp.pad(labels, [(0, 200), (0, 0)], constant_values=IGNORE)
        valid = count(labels)
        alone = cross_entropy(hidden, head, labels, valid_tokens=valid)
        padded = cross_entropy(more[0], head, more[1], valid_tokens=valid)
        np.testing.assert_allclose(padded[0], alone[0], rtol=1e-13)
        assert padded[1] == alone[1]


def test_logits_of_all_classes_are_never_held():
    length, embed, vocabulary = 512, 16, 32768
    hidden, head, labels = inputs(7, 1, length, embed, vocabulary, np.float32)

    def loss(hidden, head):
        return cross_entropy(hidden, head, labels, valid_tokens=length)[0]

    program = jax.jit(jax.grad(loss, (0, 1))).lower(hidden, head).compile()
    assert f"{length},{vocabulary}]" not in program.as_text()
    assert program.memory_analysis().temp_size_in_bytes < 4 * length * vocabulary / 4


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_what_stands_where_no_label_is_reaches_nothing(value, softcap):
    """NaN and infinite hidden states at -100: loss and gradients as with zeros there."""
    with jax.enable_x64(True):
        hidden, head, labels = inputs(9, 2, 6, 4, 20)
        ignored = labels == IGNORE
        assert 0 < ignored.sum() < labels.size

        def loss(hidden, head):
            return cross_entropy(hidden, head, labels, valid_tokens=7, softcap=softcap, chunk_size=8)

        run = jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))
        got, wanted = (run(jnp.where(ignored[..., None], x, hidden), head) for x in (value, 0))
        jax.tree.map(np.testing.assert_array_equal, got, wanted)
        assert all(np.isfinite(x).all() for x in jax.tree.leaves(got))


BAD_LABELS = [-1, -99, -101, 20, 2**31 - 1, -(2**31)]


@pytest.mark.parametrize("label", BAD_LABELS)
def test_a_label_that_names_no_class_is_refused_where_it_is_at_hand(label):
    hidden, head, labels = inputs(10, 2, 5, 4, 20, np.float32)
    for kind in (np.asarray, jnp.asarray):
        with pytest.raises(ValueError, match=f"the label {label} at row 1, token 3: it must be in 0 .. 19"):
            cross_entropy(hidden, head, kind(labels.at[1, 3].set(label)), valid_tokens=4)


def test_a_label_that_names_no_class_makes_loss_and_gradients_nan_where_traced():
    """On the ranks too; the valid ones, the last class among them, do not."""
    hidden, head, labels = inputs(11, 1, 16, 4, 20, np.float32)
    labels = labels.at[0, :2].set(jnp.array([0, 19]))
    for name, cp in (("identity", 1), ("zigzag", 4)):
        (loss, _), grads = on_ranks(name, cp, hidden, head, labels)
        assert all(np.isfinite(x).all() for x in (loss, *grads))
    run = jax.jit(jax.value_and_grad(lambda h, w, labels: cross_entropy(h, w, labels, valid_tokens=9)[0], (0, 1)))
    for label in BAD_LABELS:
        loss, grads = run(hidden, head, labels.at[0, 9].set(label))
        assert np.isnan(loss) and np.isnan(grads[0][0, 9]).all() and np.isnan(grads[1]).all()
        assert np.isfinite(np.delete(grads[0], 9, axis=1)).all()
        (loss, _), grads = on_ranks("zigzag", 4, hidden, head, labels.at[0, 9].set(label))
        assert np.isnan(loss) and np.isnan(grads[1]).all()
    with jax.debug_nans(True):
        assert np.isfinite(run(hidden, head, labels)[0])


def test_narrow_labels_count_all_classes():
    """int8 holds no class above 127, and would wrap where classes are counted."""
    hidden, head, labels = inputs(12, 1, 9, 4, 300, np.float32)
    narrow = jnp.where(labels == IGNORE, IGNORE, labels % 128)
    wanted = cross_entropy(hidden, head, narrow, valid_tokens=9, chunk_size=200)
    for dtype in (jnp.int8, jnp.int16):
        np.testing.assert_array_equal(
            cross_entropy(hidden, head, narrow.astype(dtype), valid_tokens=9, chunk_size=200), wanted
        )
    for dtype in (jnp.uint8, jnp.uint32, bool, jnp.float32):  # -100 is another number there
        with pytest.raises(ValueError, match="which does not hold -100: make them int32"):
            cross_entropy(hidden, head, narrow.astype(dtype), valid_tokens=9)


def test_what_does_not_fit_is_refused():
    hidden, head, labels = inputs(8, 1, 4, 3, 5, np.float32)
    with pytest.raises(ValueError, match=r"head \(5, 3\)"):
        cross_entropy(hidden, head.T, labels, valid_tokens=4)
    with pytest.raises(ValueError, match=r"labels \(1, 3\)"):
        cross_entropy(hidden, head, labels[:, :3], valid_tokens=4)
    with pytest.raises(ValueError, match="softcap=0: give a number above 0"):
        cross_entropy(hidden, head, labels, valid_tokens=4, softcap=0)
    with pytest.raises(ValueError, match="chunk_size=0"):
        cross_entropy(hidden, head, labels, valid_tokens=4, chunk_size=0)
