"""Counting of right answers."""

import pytest

from cpjax.train.answers import count_exact


def test_an_answer_is_right_as_a_whole():
    references = ["a red cat", "12", "", "Yes"]
    assert count_exact([" a red cat\n", "1 2", "", "yes"], references).tolist() == [2, 4]
    assert count_exact([], []).tolist() == [0, 0]
    with pytest.raises(ValueError, match="argument 2 is longer"):
        count_exact(["12"], references)
