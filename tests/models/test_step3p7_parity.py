"""Step 3.7 against transformers, by way of golden files: logits, losses and every gradient, the heads' among them."""

import jax
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file

from cpjax.models import to_hf_names
from cpjax.models.step3p7 import STREAMS, Row, patchify, prepare
from cpjax.shard import Identity, make_batch

from .step3p7_cases import GOLDENS, golden, golden_model, golden_rows, value_and_grads


@pytest.mark.quick
def test_logits_losses_and_every_gradient():
    case, model = golden(), golden_model()
    batch = prepare(model.config, golden_rows(case, model.config))
    batch, sharder = make_batch(batch, Identity(), streams=STREAMS)
    graph, params, buffers = nnx.split(model, nnx.Param, ...)
    losses, logits, grads = value_and_grads(graph, buffers)(params, batch, sharder)

    real = case["attention_mask"] == 1
    np.testing.assert_allclose(losses, [case["loss"].item(), case["loss_ahead"].item()], rtol=1e-6)
    np.testing.assert_allclose(logits[0][real], case["logits"][real], rtol=0, atol=1e-4)
    assert case["logits"][real].std() > 0.3
    for depth in (1, 2):
        told = np.pad(real, [(0, 0), (0, depth)])[:, depth:]  # there is a token so far ahead
        np.testing.assert_allclose(logits[depth][told], case["logits_ahead"][depth - 1][told], rtol=0, atol=1e-4)

    grads = to_hf_names(model, grads)
    expected = {key.removeprefix("grad."): value for key, value in case.items() if key.startswith("grad.")}
    assert grads.keys() == expected.keys()
    for key, value in expected.items():
        found = np.array(grads[key])
        if key.endswith("embed_tokens.weight"):
            found[model.config.text.pad_token_id] = 0  # torch skips this row
        norm = np.linalg.norm(value)
        assert norm > 0, key
        error = np.linalg.norm(found - value) / norm
        assert error < 1e-4, (key, error)


def test_features_of_views_of_any_size():
    """Sides of 5 x 9, 11 x 6 and 1 x 4 patches, packed together; half a patch is left out."""
    case, model = load_file(GOLDENS / "step3p7-views.safetensors"), golden_model()
    sizes = sorted({name.split(".")[0] for name in case})
    pairs = [(np.moveaxis(case[f"{size}.pixels"], 1, -1), case[f"{size}.features"]) for size in sizes]
    media = patchify(model.config.vision, [view for views, _ in pairs for view in views])
    wanted = np.concatenate([own for _, features in pairs for own in features])
    assert sizes == ["10x18", "23x13", "2x8"] and len(media.patches) == 16 * len(wanted) == 16 * 26
    row = Row([2, *[model.config.image_token_id] * len(wanted)], media=[media])
    batch = prepare(model.config, [row], num_patches=len(media.patches) + 32)
    features = jax.jit(lambda batch: model.projector(model.visual(batch, np.float32, "none", "auto"))[0])(batch)
    assert wanted.std() > 0.1
    np.testing.assert_allclose(np.asarray(features)[batch["vision_index"][0, 1:]], wanted, rtol=0, atol=2e-5)
