"""Trust in predictions is lost soon after a change, and regained when the change ends."""

import numpy as np
import pytest

from solver.prediction.calibration.buckets import Bucket
from solver.prediction.calibration.coverage import (
    ALL,
    CoverageMonitor,
    CoverageOptions,
    RegimeResiduals,
)

BUCKET = Bucket(0, 0, 0)


def trust_after(
    monitor: CoverageMonitor, miss_share: float, count: int, *, seed: int
) -> list[bool]:
    """Trust after each of *count* requests."""
    random = np.random.default_rng(seed)
    trusted = []
    for missed in random.random(count) < miss_share:
        monitor.observe(BUCKET, 1.0, 2.0 if missed else 0.5)
        trusted.append(monitor.trusted)
    return trusted


def test_predictions_are_trusted_from_the_start():
    assert CoverageMonitor().trusted
    assert CoverageMonitor().residuals() == {}


def test_a_few_misses_at_the_start_are_chance():
    monitor = CoverageMonitor()
    for _ in range(15):
        monitor.observe(BUCKET, 1.0, 2.0)

    assert monitor.trusted
    assert monitor.residuals()[ALL].covered == 0.0


@pytest.mark.parametrize(("miss_share", "within"), [(1.0, 20), (0.6, 50), (0.35, 150)])
def test_misses_in_excess_of_delta_end_trust(miss_share: float, within: int):
    monitor = CoverageMonitor()
    trust_after(monitor, 0.1, 400, seed=1)

    assert not all(trust_after(monitor, miss_share, within, seed=2))


def test_correct_coverage_is_trusted_throughout():
    """The expected rate of false alarms is one in a million requests."""
    assert all(trust_after(CoverageMonitor(), 0.1, 20_000, seed=3))


def test_trust_returns_one_window_after_coverage_and_stays():
    monitor = CoverageMonitor()
    trust_after(monitor, 1.0, 50, seed=4)
    trusted = trust_after(monitor, 0.1, 2000, seed=5)

    assert 150 <= trusted.index(True) <= 400
    assert all(trusted[trusted.index(True) :])


def test_trust_does_not_return_while_delta_is_exceeded():
    monitor = CoverageMonitor()
    trust_after(monitor, 1.0, 50, seed=6)

    assert not any(trust_after(monitor, 0.25, 1000, seed=7))


def test_the_watched_level_is_an_option():
    lenient = CoverageMonitor(CoverageOptions(level=0.5))

    assert all(trust_after(lenient, 0.5, 5000, seed=8))


def test_requests_without_time_are_not_counted():
    monitor = CoverageMonitor()
    for actual_s in (0.0, float("nan"), float("inf")):
        monitor.observe(BUCKET, 1.0, actual_s)

    assert monitor.residuals() == {}


def test_residuals_are_signed_and_reported_by_regime():
    monitor = CoverageMonitor()
    other = Bucket(1, 0, 0)
    monitor.observe(BUCKET, 1.0, 1.5)
    monitor.observe(BUCKET, 1.0, 0.7)
    monitor.observe(other, 2.0, 1.0)

    assert monitor.residuals() == {
        ALL: RegimeResiduals(3, pytest.approx(2 / 3), pytest.approx(0.8 / 3)),
        BUCKET: RegimeResiduals(2, 0.5, pytest.approx(-0.1)),
        other: RegimeResiduals(1, 1.0, 1.0),
    }
