"""Quality of quantiles on held-out requests."""

import numpy as np
import pytest

from solver.prediction.prefill.quantile_judgement import (
    Judged,
    judge,
    num_training_of,
    pinball_loss_s,
    relative_loss,
)


def test_the_latest_fifth_is_held_out():
    assert [num_training_of(count) for count in (0, 4, 5, 500, 503)] == [0, 4, 4, 400, 403]


def test_pinball_loss_prefers_a_high_quantile_that_is_too_high():
    actual_s = np.array([1.0])

    assert pinball_loss_s(np.array([3.0]), actual_s, 0.9) == pytest.approx(0.2)
    assert pinball_loss_s(np.array([0.0]), actual_s, 0.9) == pytest.approx(0.9)
    assert pinball_loss_s(actual_s, actual_s, 0.9) == 0.0


def test_each_level_is_judged_by_its_own_column():
    quantiles_s = np.array([[1.0, 2.0], [1.0, 4.0]])
    low, high = judge(quantiles_s, np.array([1.5, 3.0]), (0.5, 0.9))

    assert (low.level, high.level) == (0.5, 0.9)
    assert (low.coverage, high.coverage) == (0.0, 1.0)
    assert low.loss_s == pytest.approx((0.25 + 1.0) / 2)
    assert high.loss_s == pytest.approx((0.05 + 0.1) / 2)


def test_one_row_of_quantiles_is_judged_on_all_samples():
    (judged,) = judge(np.array([[0.9]]), np.array([0.85, 0.95]), (0.9,))

    assert judged.coverage == 0.5
    assert judged.loss_s == pytest.approx((0.1 * 0.05 + 0.9 * 0.05) / 2)


def test_losses_are_compared_level_by_level():
    new = (Judged(0.5, 2.0, 0.5), Judged(0.9, 3.0, 0.9), Judged(0.99, 9.0, 0.9))
    old = (Judged(0.5, 1.0, 0.5), Judged(0.9, 3.0, 0.9))

    assert relative_loss(new, old) == pytest.approx((2.0 + 1.0) / 2)


def test_without_a_common_level_the_comparison_is_none():
    assert relative_loss((Judged(0.5, 2.0, 0.5),), ()) is None


def test_perfect_quantiles_do_not_divide_by_zero():
    perfect, other = (Judged(0.5, 0.0, 1.0),), (Judged(0.5, 0.1, 1.0),)

    assert relative_loss(perfect, perfect) == 1.0
    assert relative_loss(other, perfect) == np.inf
