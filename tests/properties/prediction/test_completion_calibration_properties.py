"""Corrections of predicted times, for arbitrary outcomes."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from solver.prediction.calibration.completion_calibration import CompletionCalibration
from solver.prediction.time_distribution import TimeDistribution

reported = st.builds(
    lambda mean, variation: TimeDistribution.of(mean, (mean * variation) ** 2),
    st.floats(1e-3, 1e5),
    st.floats(0.0, 2.0),
)
outcomes = st.lists(st.tuples(reported, st.floats(0.0, 1e5)), min_size=3, max_size=30)


def calibrated(passed: list[tuple[TimeDistribution, float]]) -> CompletionCalibration:
    calibration = CompletionCalibration(least=3, window=20)
    for raw, actual_s in passed:
        calibration.observe(calibration.predict(raw), actual_s)
    return calibration


@settings(deadline=None)
@given(outcomes, reported, st.floats(0.05, 0.95), st.floats(0.05, 0.95))
def test_corrected_quantiles_still_rise_with_their_level(
    passed: list[tuple[TimeDistribution, float]], raw: TimeDistribution, one: float, other: float
):
    corrected = calibrated(passed).predict(raw).corrected
    low, high = sorted((one, other))

    assert 0 <= corrected.quantile(low) <= corrected.quantile(high) < np.inf


@settings(deadline=None)
@given(outcomes)
def test_reports_are_shares_and_positive_factors(passed: list[tuple[TimeDistribution, float]]):
    report = calibrated(passed).report()

    assert report is not None
    assert 0 <= report.coverage <= 1 + 1e-9
    assert 0 <= report.raw_coverage <= 1 + 1e-9
    assert report.mean_ratio > 0
    assert report.spread > 0
    assert abs(sum(report.histogram) - 1) < 1e-9
