"""Step 3.7 goes on with prompts token for token as transformers does, which reads everything anew for each token."""

from cpjax.models.generate import generate
from cpjax.models.step3p7 import Row

from .step3p7_cases import golden, golden_model, golden_rows


def test_tokens_behind_text_and_images():
    """Rows of different length in one batch; windows shorter than what is read and what is written."""
    model, case = golden_model(), golden()
    rows = [Row(row.input_ids, media=row.media) for row in golden_rows(case, model.config)]
    assert generate(model, rows, 8) == case["generated"].tolist()
