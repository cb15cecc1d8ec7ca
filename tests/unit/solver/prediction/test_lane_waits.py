"""Waits of lanes are followed up by counts."""

import numpy as np
import pytest

from solver.prediction.completion_calibration import CompletionCalibration
from solver.prediction.lane_waits import LaneCount, LaneWaits
from solver.prediction.time_distribution import TimeDistribution

LANE = "lane.a"
TOLD = TimeDistribution.of([10.0], 1.0)


def waits() -> LaneWaits:
    return LaneWaits(CompletionCalibration(least=5))


def queued_for(waits: LaneWaits, wait_s: float, *, rounds: int = 40, start: float = 0.0) -> None:
    """A lane that gets one request every 2 s, each of which waits for *wait_s*, told as 10 s."""
    for number in range(rounds):
        now = start + 2.0 * number
        arrived = number + 1
        left = max(0, int((now - start - wait_s) / 2.0) + 1)
        waits.counted({LANE: LaneCount(arrived, arrived - min(arrived, left))}, now)
        waits.foretell([LANE], TOLD, now)


def test_a_turn_has_come_when_as_many_have_left_as_had_arrived():
    followed = waits()
    followed.counted({LANE: LaneCount(arrived=8, waiting=8)}, 0.0)
    followed.foretell([LANE], TOLD, 0.0)
    followed.counted({LANE: LaneCount(arrived=20, waiting=13)}, 9.0)
    before = followed.report()
    followed.counted({LANE: LaneCount(arrived=20, waiting=12)}, 12.0)
    after = followed.report()

    assert before is None
    assert after is not None
    assert after.count == 1
    assert after.raw_coverage == 0.0


def test_what_was_pulled_before_is_still_to_be_waited_for():
    """Left after 7 s, and 3 s of work were pulled before: 10 s, as foretold."""
    followed = waits()
    followed.counted({LANE: LaneCount(arrived=8, waiting=8)}, 0.0)
    followed.foretell([LANE], TOLD, 0.0)
    followed.counted({LANE: LaneCount(arrived=20, waiting=12, pulled_s=3.0)}, 7.0)
    report = followed.report()

    assert report is not None
    assert report.raw_coverage == 1.0
    assert report.mean_ratio == pytest.approx(1.0, abs=0.01)


def test_waits_that_are_longer_than_foretold_are_foretold_longer():
    followed = waits()
    queued_for(followed, 20.0, rounds=300)
    corrected = followed.foretell([LANE], TOLD, 1e4)
    report = followed.report()

    assert report is not None
    assert report.mean_ratio > 1.5
    assert corrected.mean_s[0] == pytest.approx(TOLD.mean_s[0] * report.mean_ratio, rel=0.05)


def test_forecasts_that_follow_at_once_and_short_ones_are_not_followed_up():
    followed = waits()
    followed.counted({LANE: LaneCount(5, 5)}, 0.0)
    for now in (0.0, 0.5, 1.0, 1.5):
        followed.foretell([LANE], TOLD, now)
    followed.foretell([LANE], TimeDistribution.of([9.0], 0.1), 10.0)
    followed.counted({LANE: LaneCount(5, 0)}, 12.0)
    report = followed.report()

    assert report is not None
    assert report.count == 1


def test_a_lane_that_is_counted_anew_gives_up_what_was_foretold():
    followed = waits()
    followed.counted({LANE: LaneCount(500, 100)}, 0.0)
    followed.foretell([LANE], TOLD, 0.0)
    followed.counted({LANE: LaneCount(3, 3)}, 5.0)
    followed.counted({LANE: LaneCount(600, 0)}, 9.0)

    assert followed.report() is None


def test_a_lane_that_nobody_counted_is_foretold_all_the_same():
    assert waits().foretell(["lane.b"], TOLD, 0.0) is TOLD


def test_of_many_lanes_a_few_are_followed_up_at_a_time_and_all_in_turn():
    lanes = [f"lane.{number}" for number in range(20)]
    followed = waits()
    told = TimeDistribution.of(np.full(len(lanes), 20.0), 4.0)
    counted: list[int] = []
    for number in range(6):
        now = 10.0 * number
        followed.counted({lane: LaneCount(number + 1, 1) for lane in lanes}, now)
        followed.foretell(lanes, told, now)
        followed.counted({lane: LaneCount(number + 1, 0) for lane in lanes}, now + 5.0)
        report = followed.report()
        assert report is not None
        counted.append(report.count)

    assert counted == [8, 16, 24, 32, 40, 48]
    assert [bool(lane.told_at >= 0) for lane in followed._lanes.values()] == [True] * 20


def test_what_came_while_nobody_counted_teaches_nothing():
    waits = LaneWaits()
    waits.counted({LANE: LaneCount(5, 5)}, 0.0)
    waits.foretell([LANE], TOLD, 0.0)
    waits.give_up()
    waits.counted({LANE: LaneCount(5, 0)}, 300.0)

    assert waits.report() is None


def test_a_lane_some_of_which_lets_others_pass_teaches_nothing():
    followed = waits()
    followed.counted({LANE: LaneCount(5, 5)}, 0.0)
    followed.foretell([LANE], TOLD, 0.0)
    followed.counted({LANE: LaneCount(25, 25, overflow=20)}, 5.0)
    followed.foretell([LANE], TOLD, 5.0)
    followed.counted({LANE: LaneCount(25, 0)}, 300.0)
    assert followed.report() is None

    followed.foretell([LANE], TOLD, 300.0)
    followed.counted({LANE: LaneCount(25, 0)}, 310.0)
    assert followed.report() is not None
