"""Generated answers against what the records say."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def count_exact(answers: Sequence[str], references: Sequence[str]) -> np.ndarray:
    """[right, asked]: an answer is right if it is the reference, blanks at either end aside."""
    right = sum(answer.strip() == reference.strip() for answer, reference in zip(answers, references, strict=True))
    return np.array([right, len(references)])
