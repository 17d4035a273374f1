"""Generation of Gemma 4 with a cache, token for token that of transformers."""

import pytest

from cpjax.models.generate import generate

from .gemma4_cases import golden, golden_model, golden_rows


@pytest.mark.parametrize("family", ["gemma4", "gemma4_e"])
def test_greedy_tokens_equal_those_of_transformers(family):
    """Behind images and sound, with windows, and keys and inputs of layers shared and their own; beside another row."""
    model, wanted = golden_model(family), golden("gemma4-generated")[family].tolist()
    rows = golden_rows(golden(f"{family}-media"), model.config)
    assert len(set(wanted)) > 2
    assert generate(model, rows, len(wanted))[0] == wanted
