"""Residuals and coverage of predictions."""

import pytest

from solver.prediction.calibration.running_calibration import LEAST_JUDGED, RunningCalibration


def judged_levels(seen: RunningCalibration) -> list[float]:
    value = seen.value()
    return [] if value is None else [level for level, _ in value.coverage]


def test_bias_is_signed_and_spread_is_around_it():
    seen = RunningCalibration(memory=1e9)
    for at, residual in enumerate([-3.0, -1.0] * 20):
        seen.observe(residual, at=float(at))
    value = seen.value()

    assert value is not None
    assert (value.count, value.bias, value.at) == (40, pytest.approx(-2), 39.0)
    assert value.spread == pytest.approx(1)


def test_coverage_is_by_level_and_not_reported_for_few_outcomes():
    seen = RunningCalibration(memory=1e9, levels=(0.5, 0.9))
    seen.observe(0.0, at=1.0)
    for share in (1.0, 0.0, 1.0, 1.0) * (LEAST_JUDGED // 4):
        assert judged_levels(seen) == []
        seen.covered(0.9, share)
    value = seen.value()

    assert value is not None
    assert value.coverage == ((0.9, pytest.approx(0.75)),)


def test_old_outcomes_are_forgotten():
    seen = RunningCalibration(memory=10)
    for residual in [100.0] * 50 + [1.0] * 100:
        seen.observe(residual, at=0.0)
    value = seen.value()

    assert value is not None
    assert value.bias == pytest.approx(1.0, abs=0.01)


def test_the_latest_outcome_counts_even_if_it_comes_first():
    seen = RunningCalibration(memory=10)
    for at in (5.0, 3.0):
        seen.observe(0.0, at=at)
    value = seen.value()

    assert value is not None
    assert value.at == 5.0


def test_before_the_first_outcome_there_is_no_value():
    assert RunningCalibration(memory=10).value() is None
