"""Forecasts of lanes are corrected by counts, and operators are told how they came true."""

from services.planner import plan_views
from services.planner.explaining import corrected_forecasts, waits_of
from services.planner.view import cluster_snapshot, lane_counts
from shared.contracts.lanes import LaneKey, LaneLayout
from shared.contracts.plans import ForetoldWaits, LaneForecast, PlanExplained
from shared.contracts.telemetry import LanesObserved, LaneTotal, PullState
from solver.prediction.completion_calibration import CompletionCalibration
from solver.prediction.lane_waits import LaneCount, LaneWaits
from tests.queued import OTHER, a_request
from tests.unit.planner.leader_rig import SETTINGS, LeaderRig, settled, status

FORECAST = LaneForecast(lane="lane.a", wait_s=10.0, wait_sd_s=1.0, late_probability=0.25)


def slow_lane() -> LaneWaits:
    """Five requests waited for 20 s that were told 10."""
    waits = LaneWaits(CompletionCalibration(least=5))
    for number in range(5):
        now = 100.0 * number
        waits.counted({"lane.a": LaneCount(number + 1, 1)}, now)
        corrected_forecasts(waits, [FORECAST], now)
        waits.counted({"lane.a": LaneCount(number + 1, 0)}, now + 20.0)
    return waits


def test_waits_are_told_as_long_as_they_came_to_be():
    (told,) = corrected_forecasts(slow_lane(), [FORECAST], 1000.0)

    assert told.wait_s is not None
    assert told.wait_s > 10.5
    assert (told.lane, told.late_probability) == ("lane.a", 0.25)


def test_a_wait_that_is_not_known_is_told_as_it_is():
    unserved = LaneForecast(lane="lane.a", late_probability=1.0)

    told = corrected_forecasts(slow_lane(), [unserved, FORECAST, unserved], 1000.0)

    assert told[0] is told[2] is unserved
    assert told[1] == corrected_forecasts(slow_lane(), [FORECAST], 1000.0)[0]
    assert not corrected_forecasts(slow_lane(), [], 1000.0)


def test_operators_are_told_how_forecasts_came_true():
    told = waits_of(slow_lane())

    assert waits_of(LaneWaits()) is None
    assert told is not None
    assert (told.count, told.raw_coverage) == (5, 0.0)
    assert told.mean_ratio > 1


def test_the_summary_has_them():
    plan = PlanExplained(
        epoch=1,
        at=0.0,
        leader_id="p",
        policy="qlm",
        waits=ForetoldWaits(count=200, mean_ratio=1.125, coverage=0.91, raw_coverage=0.8),
    )

    assert plan_views.summary(plan).splitlines()[1] == (
        "waits of lanes: 1.12 times what plans had, 91% of the last 200 in their 90 % interval"
    )


async def test_lanes_are_counted_by_what_groupers_tell_and_what_waits(cluster: LeaderRig):
    request = a_request()
    leader = await settled(cluster)
    for sender in ("g1", "g2"):
        await cluster.hear(
            LanesObserved(
                sender=sender,
                incarnation="i",
                seq=1,
                at=cluster.clock.now(),
                layout=1,
                lanes=(
                    LaneTotal(
                        lane=request.lane, requests=8, prompt_tokens=50, max_tokens=50, routed=3
                    ),
                ),
            ),
            "lanes.g",
        )
    await cluster.wait_in_lane(request, a_request())
    leader.noticed(request.lane)
    await leader.plan()

    assert lane_counts(leader.state) == {request.lane: LaneCount(arrived=10, waiting=2)}

    overflow = LaneKey.parse(request.lane).overflow_name
    await cluster.wait_in_lane(request, queue=overflow)
    leader.noticed(overflow)
    await leader.plan()
    assert lane_counts(leader.state) == {request.lane: LaneCount(arrived=10, waiting=3, overflow=1)}
    snapshot = cluster_snapshot(
        leader.state, layout=LaneLayout(), settings=SETTINGS, now=cluster.clock.now()
    )
    assert snapshot.overflow == {request.lane: 1}

    await cluster.hear(status("i1", pull=PullState(backlog_s=3.0)))
    await cluster.hear(status("i2", pull=PullState(backlog_s=1.0)))
    await cluster.hear(status("i3", active=OTHER, pull=PullState(backlog_s=9.0)))
    assert lane_counts(leader.state)[request.lane].pulled_s == 2.0
