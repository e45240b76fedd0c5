from itertools import pairwise

import pytest

from millionway.model.schedule import learning_rate


def test_warm_up_then_cosine_to_zero() -> None:
    rates = [learning_rate(step, 100, 10, 0.48) for step in range(100)]
    assert rates[0] == pytest.approx(0.048) and rates[9] == pytest.approx(0.48) and rates[10] == pytest.approx(0.48)
    assert all(a < b for a, b in pairwise(rates[:10])) and all(a > b for a, b in pairwise(rates[10:]))
    assert rates[55] == pytest.approx(0.24) and rates[99] < 0.001


def test_a_run_that_is_all_warm_up() -> None:
    assert [learning_rate(step, 4, 4, 1.0) for step in range(4)] == [0.25, 0.5, 0.75, 1.0]
    assert learning_rate(0, 5, 0, 1.0) == 1.0
