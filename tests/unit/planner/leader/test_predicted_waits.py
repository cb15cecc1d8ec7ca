"""Counts correct lane forecasts, and operators see the forecasts' accuracy."""

from services.planner import plan_views
from services.planner.leader.plan_report import corrected_forecasts, waits_of
from services.planner.leader.snapshot_builder import cluster_snapshot, lane_counts
from shared.contracts.control import LaneNonempty
from shared.contracts.lanes import LaneKey, LaneLayout
from shared.contracts.plans import LaneForecast, PlanExplained, WaitAccuracy
from shared.contracts.telemetry import LanesObserved, LaneTotal, PullState
from solver.prediction.calibration.completion_calibration import CompletionCalibration
from solver.prediction.calibration.lane_waits import LaneCount, LaneWaits
from tests.queued import OTHER, a_request
from tests.unit.planner.leader_rig import SETTINGS, LeaderRig, settled, status

FORECAST = LaneForecast(lane="lane.a", wait_s=10.0, wait_sd_s=1.0, late_probability=0.25)


def slow_lane() -> LaneWaits:
    """Five requests waited for 20 s with a forecast of 10 s."""
    waits = LaneWaits(CompletionCalibration(least=5))
    for number in range(5):
        now = 100.0 * number
        waits.counted({"lane.a": LaneCount(number + 1, 1)}, now)
        corrected_forecasts(waits, [FORECAST], now)
        waits.counted({"lane.a": LaneCount(number + 1, 0)}, now + 20.0)
    return waits


def test_forecasts_are_scaled_by_the_actual_waits():
    (reported,) = corrected_forecasts(slow_lane(), [FORECAST], 1000.0)

    assert reported.wait_s is not None
    assert reported.wait_s > 10.5
    assert (reported.lane, reported.late_probability) == ("lane.a", 0.25)


def test_unknown_waits_stay_unknown():
    unserved = LaneForecast(lane="lane.a", late_probability=1.0)

    reported = corrected_forecasts(slow_lane(), [unserved, FORECAST, unserved], 1000.0)

    assert reported[0] is reported[2] is unserved
    assert reported[1] == corrected_forecasts(slow_lane(), [FORECAST], 1000.0)[0]
    assert not corrected_forecasts(slow_lane(), [], 1000.0)


def test_explanations_have_the_accuracy_of_forecasts():
    reported = waits_of(slow_lane())

    assert waits_of(LaneWaits()) is None
    assert reported is not None
    assert (reported.count, reported.raw_coverage) == (5, 0.0)
    assert reported.mean_ratio > 1


def test_summary_has_the_accuracy_of_forecasts():
    plan = PlanExplained(
        epoch=1,
        at=0.0,
        leader_id="p",
        policy="qlm",
        waits=WaitAccuracy(count=200, mean_ratio=1.125, coverage=0.91, raw_coverage=0.8),
    )

    assert plan_views.summary(plan).splitlines()[1] == (
        "waits of lanes: 1.12 times the predictions, 91% of the last 200 in their 90 % interval"
    )


async def test_lane_counts_combine_reports_and_queue_depths(cluster: LeaderRig):
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
                        lane=request.lane,
                        requests=8,
                        prompt_tokens=50,
                        expected_tokens=50,
                        routed=3,
                    ),
                ),
            ),
            "lanes.g",
        )
    await cluster.wait_in_lane(request, a_request())
    leader.noticed(LaneNonempty(queue=request.lane))
    await leader.plan()

    assert lane_counts(leader.state) == {request.lane: LaneCount(arrived=10, waiting=2)}

    overflow = LaneKey.parse(request.lane).overflow_name
    await cluster.wait_in_lane(request, queue=overflow)
    leader.noticed(LaneNonempty(queue=overflow))
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
