"""Qwen3.5 against transformers, by way of golden files: positions, logits, loss and every gradient."""

import numpy as np
import pytest

from cpjax.models import to_hf_names
from cpjax.models.common.qwen3_5.prepare import mrope_positions
from cpjax.models.qwen3_5 import STREAMS, Media, prepare
from cpjax.shard import Identity, make_batch

from .qwen3_5_cases import WEIGHT, golden, golden_model, golden_rows, model_with_head, value_and_grads


@pytest.mark.parametrize(
    ("family", "name"),
    [*(("qwen3_5", name) for name in ("text", "images", "video")), ("qwen3_5_moe", "text"), ("qwen3_5_moe", "media")],
)
def test_logits_loss_and_every_gradient(family, name):
    """The loss of the mixture of experts has the balance loss of its routers in it; two cases have a head ahead."""
    case = golden(name, family)
    headed = "loss_ahead" in case
    model = model_with_head(family) if headed else golden_model(family)
    batch = prepare(model.config, golden_rows(case, model.config))
    real = case["attention_mask"] == 1
    np.testing.assert_array_equal(batch["position_ids"][:, real], case["position_ids"][:, real])
    batch, sharder = make_batch(batch, Identity(), streams=STREAMS)

    loss, grads, logits = value_and_grads(model, batch, sharder)
    np.testing.assert_allclose(np.asarray(logits[0])[real], case["logits"][real], rtol=0, atol=1e-4)
    assert case["logits"][real].std() > 0.3
    if headed:
        told = np.pad(real, [(0, 0), (0, 1)])[:, 1:]  # there is a next token
        np.testing.assert_allclose(np.asarray(logits[1])[told], case["logits_ahead"][told], rtol=0, atol=1e-4)
        assert case["logits_ahead"][told].std() > 0.3
    np.testing.assert_allclose(loss, case["loss"] + (WEIGHT * case["loss_ahead"] if headed else 0), rtol=1e-6)
    grads = to_hf_names(model, grads)
    expected = {key.removeprefix("grad."): value for key, value in case.items() if key.startswith("grad.")}
    unused = grads.keys() - expected.keys()
    assert all(key.startswith("model.visual.") for key in unused) and (not unused or name == "text")
    assert not expected.keys() - grads.keys()
    for key, value in expected.items():
        found = np.array(grads[key])
        if key.endswith("embed_tokens.weight"):
            found[model.config.text.pad_token_id] = 0  # torch skips this row
        norm = np.linalg.norm(value)
        if not norm:
            assert ".experts." in key and not found.any(), key  # no token chose it
            continue
        error = np.linalg.norm(found - value) / norm
        assert error < 1e-4, (key, error)
    for key in unused:
        assert not np.asarray(grads[key]).any(), key


@pytest.mark.quick
@pytest.mark.parametrize("name", ["first", "last", "marks_between", "image_touches_video", "touching"])
def test_r40_positions_where_images_touch_each_other_or_the_ends(name):
    case, config = golden("positions"), golden_model().config
    ids = case[f"{name}.ids"].astype(np.int32)
    grids = [tuple(grid) for grid in case[f"{name}.grids"].tolist()]
    kinds = ["image", "video" if name == "image_touches_video" else "image"]
    media = [Media(np.zeros(0), grid, kind) for grid, kind in zip(grids, kinds, strict=False)]
    np.testing.assert_array_equal(mrope_positions(config, ids, media), case[f"{name}.positions"])
