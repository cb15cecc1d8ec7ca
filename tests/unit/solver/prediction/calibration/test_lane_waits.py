"""Lanes' actual waits, derived from counts."""

import numpy as np
import pytest

from solver.prediction.calibration.completion_calibration import CompletionCalibration
from solver.prediction.calibration.lane_waits import LaneCount, LaneWaits
from solver.prediction.time_distribution import TimeDistribution

LANE = "lane.a"
REPORTED = TimeDistribution.of([10.0], 1.0)


def waits() -> LaneWaits:
    return LaneWaits(CompletionCalibration(least=5))


def queued_for(waits: LaneWaits, wait_s: float, *, rounds: int = 40, start: float = 0.0) -> None:
    """
    Count and predict a lane that gets a request every 2 s; each request waits for *wait_s*, and 10
    s are predicted.
    """
    for number in range(rounds):
        now = start + 2.0 * number
        arrived = number + 1
        left = max(0, int((now - start - wait_s) / 2.0) + 1)
        waits.counted({LANE: LaneCount(arrived, arrived - min(arrived, left))}, now)
        waits.predict([LANE], REPORTED, now)


def test_a_turn_comes_when_as_many_requests_have_left_as_had_arrived():
    followed = waits()
    followed.counted({LANE: LaneCount(arrived=8, waiting=8)}, 0.0)
    followed.predict([LANE], REPORTED, 0.0)
    followed.counted({LANE: LaneCount(arrived=20, waiting=13)}, 9.0)
    before = followed.report()
    followed.counted({LANE: LaneCount(arrived=20, waiting=12)}, 12.0)
    after = followed.report()

    assert before is None
    assert after is not None
    assert after.count == 1
    assert after.raw_coverage == 0.0


def test_work_pulled_before_is_part_of_the_wait():
    """The request leaves after 7 s with 3 s of pulled work before it: 10 s, as predicted."""
    followed = waits()
    followed.counted({LANE: LaneCount(arrived=8, waiting=8)}, 0.0)
    followed.predict([LANE], REPORTED, 0.0)
    followed.counted({LANE: LaneCount(arrived=20, waiting=12, pulled_s=3.0)}, 7.0)
    report = followed.report()

    assert report is not None
    assert report.raw_coverage == 1.0
    assert report.mean_ratio == pytest.approx(1.0, abs=0.01)


def test_waits_longer_than_predicted_lengthen_predictions():
    followed = waits()
    queued_for(followed, 20.0, rounds=300)
    corrected = followed.predict([LANE], REPORTED, 1e4)
    report = followed.report()

    assert report is not None
    assert report.mean_ratio > 1.5
    assert corrected.mean_s[0] == pytest.approx(REPORTED.mean_s[0] * report.mean_ratio, rel=0.05)


def test_close_forecasts_and_short_waits_are_not_tracked():
    followed = waits()
    followed.counted({LANE: LaneCount(5, 5)}, 0.0)
    for now in (0.0, 0.5, 1.0, 1.5):
        followed.predict([LANE], REPORTED, now)
    followed.predict([LANE], TimeDistribution.of([9.0], 0.1), 10.0)
    followed.counted({LANE: LaneCount(5, 0)}, 12.0)
    report = followed.report()

    assert report is not None
    assert report.count == 1


def test_a_lane_with_a_restarted_count_drops_its_forecasts():
    followed = waits()
    followed.counted({LANE: LaneCount(500, 100)}, 0.0)
    followed.predict([LANE], REPORTED, 0.0)
    followed.counted({LANE: LaneCount(3, 3)}, 5.0)
    followed.counted({LANE: LaneCount(600, 0)}, 9.0)

    assert followed.report() is None


def test_an_uncounted_lane_still_has_a_forecast():
    assert waits().predict(["lane.b"], REPORTED, 0.0) is REPORTED


def test_a_few_of_many_lanes_are_tracked_at_a_time_in_turn():
    lanes = [f"lane.{number}" for number in range(20)]
    followed = waits()
    reported = TimeDistribution.of(np.full(len(lanes), 20.0), 4.0)
    counted: list[int] = []
    for number in range(6):
        now = 10.0 * number
        followed.counted({lane: LaneCount(number + 1, 1) for lane in lanes}, now)
        followed.predict(lanes, reported, now)
        followed.counted({lane: LaneCount(number + 1, 0) for lane in lanes}, now + 5.0)
        report = followed.report()
        assert report is not None
        counted.append(report.count)

    assert counted == [8, 16, 24, 32, 40, 48]
    assert [bool(lane.predicted_at >= 0) for lane in followed._lanes.values()] == [True] * 20


def test_forecasts_before_a_gap_in_counting_are_dropped():
    waits = LaneWaits()
    waits.counted({LANE: LaneCount(5, 5)}, 0.0)
    waits.predict([LANE], REPORTED, 0.0)
    waits.give_up()
    waits.counted({LANE: LaneCount(5, 0)}, 300.0)

    assert waits.report() is None


def test_a_lane_with_overflow_is_not_learned_from():
    followed = waits()
    followed.counted({LANE: LaneCount(5, 5)}, 0.0)
    followed.predict([LANE], REPORTED, 0.0)
    followed.counted({LANE: LaneCount(25, 25, overflow=20)}, 5.0)
    followed.predict([LANE], REPORTED, 5.0)
    followed.counted({LANE: LaneCount(25, 0)}, 300.0)
    assert followed.report() is None

    followed.predict([LANE], REPORTED, 300.0)
    followed.counted({LANE: LaneCount(25, 0)}, 310.0)
    assert followed.report() is not None
