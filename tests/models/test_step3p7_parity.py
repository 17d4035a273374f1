"""Step 3.7 against transformers, by way of golden files: logits, losses and every gradient, the heads' among them."""

import numpy as np
from flax import nnx

from cpjax.models import to_hf_names
from cpjax.models.step3p7 import STREAMS, prepare
from cpjax.shard import Identity, make_batch

from .step3p7_cases import golden, golden_model, golden_rows, value_and_grads


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
