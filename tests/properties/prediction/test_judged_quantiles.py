"""Judgements for arbitrary predictions and measurements."""

import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from solver.prediction.prefill.features import FEATURES
from solver.prediction.prefill.quantile_judgement import (
    judge,
    num_training_of,
    pinball_loss_s,
    relative_loss,
)
from solver.prediction.prefill.samples import fault_of

times = st.lists(st.floats(1e-4, 100.0), min_size=1, max_size=40).map(np.array)
levels = st.floats(0.05, 0.95)
anything = st.floats(allow_nan=True, allow_infinity=True)


@given(actual_s=times, level=levels, other_s=st.floats(0.0, 200.0))
def test_no_constant_is_better_than_the_quantile(
    actual_s: np.ndarray, level: float, other_s: float
):
    """An order statistic of the sample has the least loss of all constant predictions."""
    best = min(pinball_loss_s(np.array([each]), actual_s, level) for each in actual_s)

    assert best <= pinball_loss_s(np.array([other_s]), actual_s, level) + 1e-9


@given(actual_s=times, level=levels, quantile_s=st.floats(0.0, 200.0))
def test_losses_are_never_negative(actual_s: np.ndarray, level: float, quantile_s: float):
    assert pinball_loss_s(np.array([quantile_s]), actual_s, level) >= 0.0


@given(learnt_s=times, actual_s=times)
def test_higher_levels_never_cover_less(learnt_s: np.ndarray, actual_s: np.ndarray):
    levels = (0.5, 0.9)
    low, high = judge(np.quantile(learnt_s, levels)[np.newaxis], actual_s, levels)

    assert 0.0 <= low.coverage <= high.coverage <= 1.0
    assert relative_loss((low, high), (low, high)) == 1.0


@given(count=st.integers(0, 10_000))
def test_most_samples_are_for_training_and_with_five_or_more_some_are_held_out(count: int):
    learnt = num_training_of(count)

    assert 0.8 * count <= learnt <= count
    assert (learnt < count) == (count >= 5)


@given(features=st.lists(anything, max_size=len(FEATURES) + 1), prefill_s=anything)
def test_nan_is_never_learned_from(features: list[float], prefill_s: float):
    if fault_of(features, prefill_s) is None:
        assert len(features) == len(FEATURES)
        assert all(math.isfinite(each) and each >= 0 for each in (*features, prefill_s))
