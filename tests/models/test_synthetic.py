"""Narrow stand-ins for models, and rows that stand in for data."""

import numpy as np
import pytest

from cpjax.models import FAMILIES, family
from cpjax.shard import IGNORE

from .families import CONFIGS
from .test_gemma4_folders import RELEASED
from .test_step3p7_model import released


def test_the_narrow_step3p7_has_a_layer_of_each_kind():
    module = family("step3p7")
    config = module.Config.from_dict(released())
    text = module.reduced(config).text
    assert [(layer.sliding, layer.sparse) for layer in text.layers] == [
        (False, False), (True, False), (True, True), (False, True)
    ]  # fmt: skip
    assert [layer.limit for layer in text.layers] == [None, None, 7.0, 7.0] and len(text.mtp_layers) == 1
    assert [text.heads(layer) for layer in text.layers] == [64, 96, 96, 64] and text.n_routed_experts == 288


def test_the_narrow_gemma4_has_a_layer_of_each_kind():
    module = family("gemma4")
    parts = RELEASED["E2B"]
    source = {"model_type": "gemma4", "text_config": parts["text"], "vision_config": parts["vision"]}
    small = module.reduced(module.Config.from_dict({**source, "audio_config": {"hidden_size": 1024}}))
    text, sliding, full = small.text, "sliding_attention", "full_attention"
    assert text.stacks == ((0, (sliding, full), 1), (2, (sliding, full), 1))
    assert text.use_double_wide_mlp and text.hidden_size_per_layer_input and small.audio
    assert module.reduced(module.Config()).text.stacks == ((0, (sliding, full), 1),)


@pytest.mark.parametrize("name", FAMILIES)
def test_rows_are_as_asked_for(name):
    """Every run of placeholders fits its image, whatever there is room for: `prepare` refuses it otherwise."""
    module, rng = family(name), np.random.default_rng(0)
    small = module.reduced(CONFIGS[name])
    images = set()
    for length in (9, 40, 61, 200):
        for patches in (0, 20, 128, 1000):
            for documents in (1, 2):
                row = module.synthetic_row(small, length, patches, rng, documents)
                assert len(row.input_ids) == length and set(row.document_ids) == set(range(1, documents + 1))
                assert sum(len(media.patches) for media in row.media) <= patches
                batch = module.prepare(small, [row])
                assert (batch["labels"] != IGNORE).any() and (batch["input_ids"] > 0).all()
                images.add(len(row.media))
    assert 0 in images and max(images) > 1
