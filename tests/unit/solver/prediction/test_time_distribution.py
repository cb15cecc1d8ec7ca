"""Times by mean and variance: quantiles, probabilities, sums."""

import math
from statistics import NormalDist

import numpy as np
import pytest

from solver.prediction.time_distribution import TimeDistribution, normal_quantile


def test_samples_of_a_lognormal_time_have_its_quantiles():
    time = TimeDistribution.of(10.0, 25.0)
    random = np.random.default_rng(0)
    samples = np.exp(time.log_median + time.log_sd * random.standard_normal(200_000))

    assert np.mean(samples) == pytest.approx(10.0, rel=0.01)
    assert np.var(samples) == pytest.approx(25.0, rel=0.05)
    for level in (0.05, 0.5, 0.95):
        assert time.quantile(level) == pytest.approx(np.quantile(samples, level), rel=0.02)


def test_quantiles_of_many_terms_are_normal():
    """The sum of 10,000 answers with mean and deviation 338 tokens is nearly normal."""
    mean, variance = 10_000 * 338.0, 10_000 * 338.0**2
    normal = NormalDist(mean, math.sqrt(variance))

    for level in (0.05, 0.5, 0.95):
        assert TimeDistribution.of(mean, variance).quantile(level) == pytest.approx(
            normal.inv_cdf(level), rel=1e-3
        )


def test_quantile_and_cdf_are_inverse():
    times = TimeDistribution.of([1.0, 20.0], [0.5, 3.0])

    assert times.cdf(times.quantile(0.9)) == pytest.approx([0.9, 0.9])


def test_the_interval_holds_its_share():
    time = TimeDistribution.of(10.0, 9.0)
    low, high = time.interval(0.9)

    assert time.cdf(high) - time.cdf(low) == pytest.approx(0.9)


def test_a_certain_time_is_a_step():
    time = TimeDistribution.of(3.0)

    assert [float(time.cdf(each)) for each in (2.9, 3.0, 3.1)] == [0.0, 1.0, 1.0]
    assert float(time.quantile(0.05)) == float(time.quantile(0.95)) == 3.0


def test_a_zero_wait_is_certain_regardless_of_its_variance():
    assert float(TimeDistribution.of(0.0, 4.0).quantile(0.99)) == 0.0


def test_sums_have_the_sums_of_the_moments():
    both = TimeDistribution.of(2.0, 3.0).plus(TimeDistribution.of([1.0, 5.0], [0.5, 0.0]))

    np.testing.assert_allclose(both.mean_s, [3.0, 7.0])
    np.testing.assert_allclose(both.variance, [3.5, 3.0])


@pytest.mark.parametrize(("mean_s", "variance"), [(-1.0, 0.0), (math.inf, 0.0), (1.0, math.nan)])
def test_impossible_moments_are_rejected(mean_s: float, variance: float):
    with pytest.raises(ValueError, match="of a time must be finite and 0 or more"):
        TimeDistribution.of(mean_s, variance)


@pytest.mark.parametrize("level", [0.0, 1.0, -0.1])
def test_levels_of_zero_and_one_are_rejected(level: float):
    with pytest.raises(ValueError, match=r"above 0 and below 1, not"):
        normal_quantile(level)
