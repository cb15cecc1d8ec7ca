"""Running means and variances."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.contracts.estimates import Moments
from solver.prediction.calibration.moments import RunningMoments, over_approximation


def moments_of(values: list[float], *, memory: float) -> RunningMoments:
    moments = RunningMoments(memory=memory)
    for value in values:
        moments.observe(value)
    return moments


@given(values=st.lists(st.floats(-1e4, 1e4), min_size=1, max_size=50))
def test_without_forgetting_moments_are_ordinary(values: list[float]):
    value = moments_of(values, memory=1e15).value()
    assert value is not None
    assert value.count == len(values)
    assert value.mean == pytest.approx(np.mean(values), abs=1e-6, rel=1e-9)
    assert value.sd == pytest.approx(np.std(values), abs=1e-4, rel=1e-6)


def test_with_forgetting_moments_are_weighted():
    values = np.random.default_rng(3).normal(5.0, 2.0, 300)
    weights = np.exp(-np.arange(300)[::-1] / 20.0)
    mean = np.average(values, weights=weights)
    value = moments_of(list(values), memory=20.0).value()
    assert value is not None
    assert value.mean == pytest.approx(mean)
    assert value.sd == pytest.approx(np.sqrt(np.average((values - mean) ** 2, weights=weights)))


def test_old_lengths_are_forgotten():
    value = moments_of([1000.0] * 100 + [1.0] * 200, memory=10.0).value()
    assert value is not None
    assert value.mean == pytest.approx(1.0, abs=1e-3)


def test_before_the_first_sample_there_is_no_value():
    assert RunningMoments().value() is None


def test_the_over_approximation_is_two_deviations_above_the_mean():
    assert over_approximation(Moments(mean=20.0, sd=10.0, count=9)) == 40.0
