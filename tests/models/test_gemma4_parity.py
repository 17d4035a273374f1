"""Gemma 4 against transformers, by way of golden files, and under context parallelism against itself (I1, I2)."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cpjax.mesh import make_mesh
from cpjax.models import to_hf_names
from cpjax.models.gemma4 import STREAMS, prepare
from cpjax.shard import Identity, layout_from_name, make_batch

from .gemma4_cases import golden, golden_model, golden_rows, value_and_grads

FAMILIES = ("gemma4", "gemma4_e", "gemma4_moe")
BUFFERS = ("layer_scalar", "std_bias", "std_scale", "put_min", "put_max")


@functools.cache
def host_batch(family):
    config = golden_model(family).config
    return prepare(config, golden_rows(golden(f"{family}-media"), config))


def run(family, layout, mesh=None, transport="ring"):
    """In float64: loss, every gradient by name, and the local logits."""
    with jax.enable_x64(True):
        model = golden_model(family, jnp.float64)
        batch, sharder = make_batch(host_batch(family), layout, streams=STREAMS)
        loss, grads, logits = value_and_grads(model, batch, sharder, mesh, transport)
    named = {name: np.asarray(grad) for name, grad in to_hf_names(model, grads).items() if not name.endswith(BUFFERS)}
    return float(loss), named, np.asarray(logits)


@functools.cache
def dense(family):
    return run(family, Identity())


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_loss_and_every_gradient_are_those_of_transformers(family):
    case = golden(f"{family}-media")
    real = case["attention_mask"] == 1
    loss, grads, logits = dense(family)
    assert case["logits"][real].std() > 0.3 and 1.5 < np.abs(case["logits"]).max() < 2  # the cap is felt
    np.testing.assert_allclose(logits[real], case["logits"][real], rtol=0, atol=1e-4)
    np.testing.assert_allclose(loss, case["loss"].item(), rtol=1e-6)
    expected = {name.removeprefix("grad."): value for name, value in case.items() if name.startswith("grad.")}
    assert grads.keys() == expected.keys()
    for name, value in expected.items():
        found, norm = grads[name].copy(), np.linalg.norm(value)
        if name.endswith("embed_tokens_per_layer.weight"):
            found[golden_model(family).config.text.pad_token_id] = 0  # torch skips this row
        assert norm > 0, name
        error = np.linalg.norm(found - value) / norm
        assert error < 1e-4, (name, error)


def test_the_batch_holds_the_hard_cases():
    """Blocks of tokens that see each other both ways over the boundary of two chunks and over three ranks, first, last
    and longer than the window, which is longer than the chunks of some layouts and shorter than those of others."""
    batch, window = host_batch("gemma4"), golden_model("gemma4").config.text.sliding_window
    groups = batch["vision_group_ids"][0]
    assert groups[0] == 0 and groups[-1] == groups.max() == 3
    sizes = np.bincount(groups[groups >= 0])
    assert sizes.tolist() == [9, 12, 6, 6] and (sizes[:2] > window).all()
    lengths = []
    for name, cp in (("contiguous", 2), ("contiguous", 8), ("zigzag", 4), ("zigzag", 8)):
        _, sharder = make_batch(batch, layout_from_name(name, cp), streams=STREAMS)
        owner = sharder.layout.inverse(sharder.padded_length) // sharder.local_length
        lengths.append(sharder.local_length // max(sharder.layout.runs, 1))
        assert any(
            len(set(owner[np.flatnonzero(groups == group)].tolist())) > (2 if cp == 8 else 1) for group in (1, 2)
        )
    assert min(lengths) < window < max(lengths)


@pytest.mark.parametrize(
    ("family", "name", "cp", "transport"),
    [
        ("gemma4", "contiguous", 8, "ring"),
        ("gemma4", "zigzag", 4, "ring_ulysses:2"),
        ("gemma4_e", "zigzag", 2, "ulysses"),
        ("gemma4_e", "zigzag", 4, "ring"),  # rings that do not need each other
        ("gemma4_moe", "contiguous", 4, "allgather"),
    ],
)
def test_loss_and_every_gradient_equal_the_dense_ones(family, name, cp, transport):
    found, expected = run(family, layout_from_name(name, cp), make_mesh(cp=cp), transport), dense(family)
    np.testing.assert_allclose(found[0], expected[0], rtol=1e-13)
    assert found[1].keys() == expected[1].keys()
    for key, grad in expected[1].items():
        largest = np.abs(grad).max()
        assert largest > 0, key
        error = np.abs(found[1][key] - grad).max() / largest
        assert error < 1e-11, (key, error)
