"""Lane forecasts that groupers receive in each round."""

from itertools import count
from typing import Any

import pytest

from services.planner.lane_totals import LaneCounter
from services.planner.leader import lane_forecasts as forecasting
from services.planner.leader import leader as leading
from services.planner.leader.leader import Leader
from services.planner.leader.policies import GENERATOR, Planner
from shared.broker import topology
from shared.contracts.base import Decoder
from shared.contracts.control import LaneNonempty
from shared.contracts.plans import LaneForecast, LanesForecast
from shared.contracts.requests import QueuedRequest
from shared.contracts.telemetry import LanesObserved, PullState
from solver.planning.problem.snapshot import ClusterSnapshot
from solver.planning.review import Basis, Review, ReviewOptions, review
from tests.queued import BATCH, OTHER, a_request
from tests.unit.planner.leader_rig import SETTINGS, LeaderRig, settled, status
from tests.unit.planner.rig import listen

decode: Decoder[LanesForecast] = Decoder(LanesForecast)
_reports = count(1)


class HereAndNow:
    """A plan worker in this process, whose clock advances by a millisecond at each read."""

    restarts = 0

    async def review(self, snapshot: ClusterSnapshot, basis: Basis | None) -> Review:
        ticks = count()
        options = ReviewOptions(importance_weight=SETTINGS.importance_weight, budget_s=0.01)
        return review(snapshot, basis, options=options, clock=lambda: 0.001 * next(ticks), seed=1)


async def generator(cluster: LeaderRig) -> Leader:
    leader = await settled(cluster)
    worker: Any = HereAndNow()
    leader.planner = Planner(GENERATOR, SETTINGS.importance_weight, worker)
    return leader


async def grouped(cluster: LeaderRig, *requests: QueuedRequest, sender: str = "g1") -> None:
    """Publish a grouper's totals after it has grouped *requests*."""
    counters: dict[str, LaneCounter] = {}
    for request in requests:
        counters.setdefault(request.lane, LaneCounter()).add(request, at=request.arrived_at)
    observed = LanesObserved(
        sender=sender,
        incarnation="i",
        seq=next(_reports),
        at=cluster.clock.now(),
        layout=1,
        lanes=tuple(counter.total(lane) for lane, counter in counters.items()),
    )
    await cluster.hear(observed, "lanes.g")


async def forecasts(cluster: LeaderRig, queue: str) -> list[LanesForecast]:
    found = []
    while (delivery := await cluster.far.get(queue)) is not None:
        found.append(decode(delivery.body))
    return found


@pytest.fixture
async def reported(cluster: LeaderRig) -> str:
    """A queue that receives the leader's forecasts."""
    return await listen(cluster.far, topology.TELEMETRY, topology.FORECAST_KEY)


async def test_forecasts_are_published_each_round_with_an_unchanged_plan(
    cluster: LeaderRig, reported: str
):
    leader = await generator(cluster)
    request = a_request(slo=BATCH)
    for rounds in range(3):
        await cluster.wait_in_lane(a_request(slo=BATCH))
        await grouped(cluster, *[request] * (rounds + 1))
        leader.noticed(LaneNonempty(queue=request.lane))
        await leader.plan()
        cluster.clock.advance(0.5)
        await cluster.hear(status())
    seen = await forecasts(cluster, reported)

    assert [each.at - each.age_s for each in seen] == [
        cluster.clock.now() - left for left in (1.5, 1.0, 0.5)
    ]
    waits = [each.lanes[0].wait_s or 0.0 for each in seen]
    assert [lane.lane for each in seen for lane in each.lanes] == [request.lane] * 3
    assert 0 < waits[0] < waits[1] < waits[2]


async def test_leader_deposed_during_a_forecast_publishes_no_forecast(
    cluster: LeaderRig, reported: str, monkeypatch: pytest.MonkeyPatch
):
    leader = await generator(cluster)
    await cluster.hear(status())

    async def meanwhile(*arguments: Any, **named: Any) -> tuple[LaneForecast, ...]:
        leader.deposed()
        return await forecasting.forecasts_of(*arguments, **named)

    monkeypatch.setattr(leading, "forecasts_of", meanwhile)
    await leader.plan()
    assert not leader.state.leads
    assert await forecasts(cluster, reported) == []

    leader.activated()
    monkeypatch.undo()
    cluster.clock.advance(SETTINGS.settle_s)
    await leader.plan()
    assert len(await forecasts(cluster, reported)) == 1


async def test_forecast_of_an_empty_lane_includes_pulled_work(cluster: LeaderRig, reported: str):
    """A pulled request is 28 tokens of work; the instance serves 500 tokens per second."""
    leader = await generator(cluster)
    await grouped(cluster, request := a_request(slo=BATCH))
    await cluster.hear(status(backlog_s=9.0, pull=PullState(backlog_s=1.0, whole_backlog_s=3.0)))
    await leader.plan()
    (seen,) = await forecasts(cluster, reported)

    assert seen.lanes == (
        LaneForecast(
            lane=request.lane,
            wait_s=pytest.approx(3.0),
            wait_sd_s=pytest.approx(0.3),
            request_s=pytest.approx(28 / 500, rel=0.1),
            tail_s=seen.lanes[0].tail_s,
            tail_sd_s=seen.lanes[0].tail_sd_s,
        ),
    )


@pytest.mark.parametrize("ago_s", [0.0, 600.0])
async def test_forecast_of_an_empty_lane_is_for_a_request_arriving_now(
    cluster: LeaderRig, reported: str, ago_s: float
):
    """
    Work in lanes with earlier deadlines counts, even if this lane's last request is old.
    """
    leader = await generator(cluster)
    now = cluster.clock.now()
    for _ in range(40):
        await cluster.wait_in_lane(a_request())
    sooner = [a_request(arrived_at=now - 1.0)] * 40
    await grouped(cluster, *sooner, later := a_request(slo=BATCH, arrived_at=now - ago_s))
    leader.noticed(LaneNonempty(queue=sooner[0].lane))
    await leader.plan()
    (seen,) = await forecasts(cluster, reported)
    waits = {lane.lane: lane.wait_s for lane in seen.lanes}

    assert waits[later.lane] == pytest.approx(waits[sooner[0].lane])


async def test_empty_lane_of_an_inactive_model_has_no_forecast(cluster: LeaderRig, reported: str):
    leader = await generator(cluster)
    await grouped(cluster, a_request(slo=BATCH, base=OTHER))
    await leader.plan()
    (seen,) = await forecasts(cluster, reported)

    assert seen.lanes == ()


async def test_forecasts_have_the_number_of_groupers(cluster: LeaderRig, reported: str):
    leader = await generator(cluster)
    for sender in ("g1", "g2", "g3"):
        await grouped(cluster, sender=sender)
    await leader.plan()
    cluster.clock.advance(5.5)
    await cluster.hear(status())
    await grouped(cluster, sender="g1")
    await leader.plan()

    assert [each.groupers for each in await forecasts(cluster, reported)] == [3, 1]
