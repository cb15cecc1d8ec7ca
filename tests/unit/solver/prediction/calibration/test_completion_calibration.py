"""Outcomes correct later predictions of completion times."""

import math

import numpy as np
import pytest

from solver.prediction.calibration.completion_calibration import CompletionCalibration
from solver.prediction.time_distribution import TimeDistribution

REPORTED = TimeDistribution.of(20.0, 4.0)


def taught(
    calibration: CompletionCalibration,
    count: int,
    *,
    slower: float = 1.0,
    wider: float = 1.0,
    seed: int = 0,
) -> list[bool]:
    """
    Observe *count* distorted times; return for each time whether its predicted interval contained
    it.
    """
    random = np.random.default_rng(seed)
    held = []
    for mean_s in random.uniform(5.0, 500.0, count):
        reported = calibration.predict(TimeDistribution.of(mean_s, (0.1 * mean_s) ** 2))
        log_sd = wider * float(reported.raw.log_sd)
        actual_s = slower * math.exp(reported.raw.log_median + log_sd * random.standard_normal())
        low_s, high_s = reported.corrected.interval(0.9)
        held.append(bool(low_s <= actual_s <= high_s))
        calibration.observe(reported, actual_s)
    return held


def test_a_few_outcomes_cause_no_correction():
    calibration = CompletionCalibration(least=20)
    taught(calibration, 19, slower=3.0)

    assert calibration.predict(REPORTED).corrected is REPORTED


def test_the_median_follows_times_slower_than_predicted():
    calibration = CompletionCalibration()
    taught(calibration, 300, slower=1.5)

    corrected = calibration.predict(REPORTED).corrected
    assert corrected.quantile(0.5) == pytest.approx(1.5 * REPORTED.quantile(0.5), rel=0.1)


@pytest.mark.parametrize(("slower", "wider"), [(1.0, 1.0), (1.3, 2.5), (0.6, 0.4)])
def test_intervals_hold_their_share_for_any_kind_of_error(slower: float, wider: float):
    calibration = CompletionCalibration()
    held = taught(calibration, 800, slower=slower, wider=wider)[100:]

    assert np.mean(held) == pytest.approx(0.9, abs=0.02)


def test_corrections_follow_a_change():
    calibration = CompletionCalibration()
    taught(calibration, 200)
    taught(calibration, 400, slower=2.0, seed=1)
    held = taught(calibration, 200, slower=2.0, seed=2)

    report = calibration.report()
    assert report is not None
    assert report.mean_ratio == pytest.approx(2.0, rel=0.25)
    assert np.mean(held) > 0.86


def test_the_report_shows_the_gain_of_corrections():
    calibration = CompletionCalibration()
    taught(calibration, 700, slower=1.5)
    report = calibration.report()

    assert report is not None
    assert report.count == 700
    assert report.raw_coverage < 0.1
    assert report.coverage == pytest.approx(0.9, abs=0.05)
    assert sum(report.histogram) == pytest.approx(1.0)


def test_calibrated_forecasts_fill_all_tenths_equally():
    calibration = CompletionCalibration()
    taught(calibration, 700)
    report = calibration.report()

    assert report is not None
    assert report.mean_ratio == pytest.approx(1.0, abs=0.02)
    assert report.spread == pytest.approx(1.0, abs=0.1)
    assert report.histogram == pytest.approx([0.1] * 10, abs=0.05)


def test_a_certain_forecast_is_widened():
    calibration = CompletionCalibration()
    for number in range(100):
        reported = calibration.predict(TimeDistribution.of(10.0))
        calibration.observe(reported, 8.0 if number % 2 else 12.0)
    low_s, high_s = calibration.predict(TimeDistribution.of(10.0)).corrected.interval(0.9)

    assert low_s <= 8.0 + 1e-6
    assert high_s >= 12.0 - 1e-6


def test_missed_times_widen_intervals_beyond_the_window():
    """60 diverging times before the window widen intervals, compared with 60 exact times."""

    def width(growth: float) -> float:
        calibration = CompletionCalibration(least=5, window=40)
        for number in range(60):
            calibration.observe(calibration.predict(REPORTED), 20.0 * growth**number)
        for number in range(40):
            calibration.observe(calibration.predict(REPORTED), 18.0 + 0.1 * number)
        low_s, high_s = calibration.predict(REPORTED).corrected.interval(0.9)
        return float(high_s - low_s)

    assert width(1.0) < width(1.1)


def test_neighbours_with_equal_errors_move_the_median_little():
    """Twenty times that are 10 % late for one reason move the median by only 3 %."""
    calibration = CompletionCalibration()
    for _ in range(20):
        calibration.observe(calibration.predict(REPORTED), 1.1 * float(REPORTED.quantile(0.5)))

    moved = float(calibration.predict(REPORTED).corrected.quantile(0.5) / REPORTED.quantile(0.5))
    assert moved == pytest.approx(1.1 ** (19.4 / 69.4), rel=0.002)


@pytest.mark.parametrize("actual_s", [math.nan, math.inf, -1.0])
def test_impossible_actual_times_are_ignored(actual_s: float):
    calibration = CompletionCalibration(least=1)
    calibration.observe(calibration.predict(REPORTED), actual_s)

    assert calibration.report() is None


@pytest.mark.parametrize("actual_s", [0.0, 1e300])
def test_no_actual_time_breaks_later_forecasts(actual_s: float):
    calibration = CompletionCalibration(least=1)
    calibration.observe(calibration.predict(REPORTED), actual_s)

    assert np.isfinite(calibration.predict(REPORTED).raw.quantile(0.9))
    assert calibration.predict(REPORTED).corrected.quantile(0.9) > 0


def test_all_times_of_an_array_are_corrected_equally():
    calibration = CompletionCalibration()
    taught(calibration, 100, slower=2.0)
    both = calibration.predict(TimeDistribution.of([10.0, 20.0], [1.0, 4.0])).corrected

    assert both.mean_s[1] == pytest.approx(float(calibration.predict(REPORTED).corrected.mean_s))


def test_parameters_out_of_their_limits_are_rejected():
    with pytest.raises(ValueError, match="least must be 1 or more and at most window"):
        CompletionCalibration(least=50, window=20)
