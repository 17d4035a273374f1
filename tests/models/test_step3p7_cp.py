"""Step 3.7 under context parallelism: losses and every gradient equal the unsharded ones (I1, I2, I3)."""

import jax
import numpy as np
import pytest

from cpjax.mesh import make_mesh
from cpjax.models.step3p7 import STREAMS
from cpjax.shard import IGNORE, Dispatched, Identity, SliceKind, dispatch, layout_from_name, make_batch

from .step3p7_cases import CONFIG, dense, documents, host_batch, program, run


def test_the_batch_holds_the_hard_cases():
    batch = host_batch(documents())
    ids = batch["input_ids"][0]
    assert ids[0] == ids[-1] == CONFIG.image_token_id and len(ids) == 41
    padded, sharder = make_batch(batch, layout_from_name("contiguous", 8), streams=STREAMS)
    where = sharder.layout.indices(sharder.padded_length, np.arange(8))
    assert sharder.local_length < CONFIG.text.sliding_window < 41 // 2
    assert (padded["labels"][:, where] == IGNORE).all((0, 2)).any(), "a rank without a label"
    crosses = (padded["vision_index"][0, where[:-1, -1]] >= 0) & (padded["vision_index"][0, where[1:, 0]] >= 0)
    assert crosses.any(), "an image over a boundary"


@pytest.mark.parametrize(
    ("name", "cp", "transport"),
    [
        ("packed", 2, "ulysses"), ("zigzag", 4, "allgather"), ("contiguous", 8, "ring"),
        ("striped", 4, "ring_ulysses:2"), ("dispatched", 2, "ring"),
    ],
)  # fmt: skip
def test_losses_and_every_gradient_equal_the_dense_ones(name, cp, transport):
    with jax.enable_x64(True):
        layout, length = layout_from_name(name, cp), 72 if name == "packed" else None
        if name == "dispatched":
            layout, _ = dispatch([[0, 41, 0, 41, SliceKind.CAUSAL]], 41, Dispatched(cp, chunk_size=2))
        found, expected = run(program(make_mesh(cp=cp), transport), documents(), layout, length), dense()
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        largest = np.abs(value).max()
        assert largest > 0, key
        assert np.abs(found[key] - value).max() < 1e-11 * largest, key


def test_documents_have_the_losses_and_gradients_of_one_by_one():
    """Losses are sums over the valid tokens of each batch, so these are undone; shapes are those of the dense run."""
    with jax.enable_x64(True):
        expected = dense()
        total, count = {}, 0
        for row in documents():
            for alone in row:
                valid = int((host_batch([[alone], [alone]])["labels"][0] != IGNORE).sum())
                twice = run(program(), [[alone], [alone]], Identity())
                total = {key: total.get(key, 0) + valid * value for key, value in twice.items()}
                count += valid
    for key, value in expected.items():
        assert np.abs(total[key] / count - value).max() < 1e-11 * np.abs(value).max(), key
