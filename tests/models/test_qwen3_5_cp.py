"""Qwen3.5 under context parallelism: loss and every gradient equal the unsharded ones (I1, I2; tower included, R43)."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cpjax.mesh import make_mesh
from cpjax.models import to_hf_names
from cpjax.models.qwen3_5 import STREAMS, Media, Row, prepare
from cpjax.shard import IGNORE, Identity, layout_from_name, make_batch

from .qwen3_5_cases import golden_model, small_model, value_and_grads

UNLABELLED = range(11, 30)


@functools.cache
def host_batch():
    """41 tokens, which no layout divides: two documents, images across boundaries, a short row, and no label midway."""
    config, rng = golden_model().config, np.random.default_rng(1)

    def image(grid):
        return Media(rng.normal(size=(np.prod(grid), config.vision.patch_dim)).astype(np.float32), grid)

    def ids(length, images):
        out = rng.integers(1, 90, length)
        for start, count in images:
            out[start : start + count] = config.image_token_id
        return out

    rows = []
    for length, images, grids, documents in (
        (41, [(4, 4), (20, 9)], [(1, 4, 4), (1, 6, 6)], [1] * 16 + [2] * 25),
        (17, [(0, 3), (3, 2)], [(1, 2, 6), (1, 4, 2)], None),
    ):
        tokens = ids(length, images)
        labels = np.where(tokens < 90, tokens, IGNORE)
        labels[UNLABELLED.start + 1 : UNLABELLED.stop + 1] = IGNORE  # a label is the target of the position before it
        rows.append(Row(tokens, labels, documents, [image(grid) for grid in grids]))
    return prepare(config, rows)


def run(family, layout, transport="ring", mesh=None, dtype=jnp.float64):
    """Loss, and every gradient by name."""
    with jax.enable_x64(dtype == jnp.float64):
        model = small_model(family, dtype)
        batch, sharder = make_batch(host_batch(), layout, streams=STREAMS)
        loss, grads, _ = value_and_grads(model, batch, sharder, mesh, transport)
    return float(loss), {name: np.asarray(grad) for name, grad in to_hf_names(model, grads).items()}


@functools.cache
def dense(family, dtype=jnp.float64):
    return run(family, Identity(), dtype=dtype)


def assert_equal(found, expected, loss_tolerance, tolerance):
    np.testing.assert_allclose(found[0], expected[0], rtol=loss_tolerance)
    assert found[1].keys() == expected[1].keys()
    for name, grad in expected[1].items():
        largest = np.abs(grad).max()
        if not largest:
            assert ".experts." in name and not found[1][name].any(), name  # no token chose it
            continue
        error = np.abs(found[1][name] - grad).max() / largest
        assert error < tolerance, (name, error)


def test_the_batch_holds_the_hard_cases():
    batch = host_batch()
    assert batch["input_ids"].shape[1] == 41
    for name, cp in (("contiguous", 4), ("contiguous", 8), ("zigzag", 4)):
        padded, sharder = make_batch(batch, layout_from_name(name, cp), streams=STREAMS)
        where = sharder.layout.indices(sharder.padded_length, np.arange(cp))
        assert (padded["labels"][:, where] == IGNORE).all((0, 2)).any(), "a rank without a label"
        if cp == 8:
            assert padded["padding_mask"][:, where].all((0, 2)).any(), "a rank of pads alone"
        owner = sharder.layout.inverse(sharder.padded_length) // sharder.local_length
        for start, count in ((4, 4), (20, 9)):
            assert len(set(owner[start : start + count].tolist())) > 1 or cp < 8, "an image over a boundary"


@pytest.mark.parametrize(
    ("family", "name", "cp", "transport"),
    [
        ("qwen3_5", "contiguous", 2, "ulysses"),
        ("qwen3_5", "zigzag", 4, "ring"),
        ("qwen3_5", "contiguous", 8, "ring_ulysses:2"),
        ("qwen3_5", "zigzag", 8, "allgather"),
        ("qwen3_5_moe", "zigzag", 4, "ring_ulysses:2"),
        ("qwen3_5_moe", "contiguous", 8, "ring"),
    ],
)
def test_loss_and_every_gradient_equal_the_dense_ones(family, name, cp, transport):
    """With experts: their balance loss too; some experts have nearly all tokens of a rank, some none."""
    found, expected = run(family, layout_from_name(name, cp), transport, make_mesh(cp=cp)), dense(family)
    assert expected[1]["lm_head.weight"].dtype == np.float64
    assert_equal(found, expected, 1e-13, 1e-11)


def test_float32():
    found = run("qwen3_5", layout_from_name("zigzag", 4), "ring", make_mesh(cp=4), jnp.float32)
    assert_equal(found, dense("qwen3_5", jnp.float32), 1e-6, 1e-5)
