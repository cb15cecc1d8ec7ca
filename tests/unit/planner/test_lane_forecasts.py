"""What groupers are told of lanes, each round."""

from itertools import count
from typing import Any

import pytest

from services.planner import forecasting
from services.planner import leader as leading
from services.planner.lane_counter import LaneCounter
from services.planner.leader import Leader
from services.planner.policies import GENERATOR, Planner
from shared.broker import topology
from shared.contracts.base import Decoder
from shared.contracts.plans import LaneForecast, LanesForecast
from shared.contracts.requests import QueuedRequest
from shared.contracts.telemetry import LanesObserved, PullState
from solver.planning.building import ClusterSnapshot
from solver.planning.review import Basis, Review, ReviewOptions, review
from tests.queued import BATCH, OTHER, a_request
from tests.unit.planner.leader_rig import SETTINGS, LeaderRig, settled, status
from tests.unit.planner.rig import listen

decode: Decoder[LanesForecast] = Decoder(LanesForecast)
_reports = count(1)


class HereAndNow:
    """A plan worker in this process, whose clock goes a millisecond each time it is looked at."""

    restarts = 0

    async def review(self, snapshot: ClusterSnapshot, basis: Basis | None) -> Review:
        ticks = count()
        options = ReviewOptions(tier_weight=SETTINGS.tier_weight, budget_s=0.01)
        return review(snapshot, basis, options=options, clock=lambda: 0.001 * next(ticks), seed=1)


async def generator(cluster: LeaderRig) -> Leader:
    leader = await settled(cluster)
    worker: Any = HereAndNow()
    leader.planner = Planner(GENERATOR, SETTINGS.tier_weight, worker)
    return leader


async def grouped(cluster: LeaderRig, *requests: QueuedRequest, sender: str = "g1") -> None:
    """Tell of *requests* that have gone into lanes."""
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
async def told(cluster: LeaderRig) -> str:
    """A queue that gets forecasts."""
    return await listen(cluster.far, topology.TELEMETRY, topology.FORECAST_KEY)


async def test_lanes_are_foretold_each_round_also_while_the_plan_stays(
    cluster: LeaderRig, told: str
):
    leader = await generator(cluster)
    request = a_request(slo=BATCH)
    for rounds in range(3):
        await cluster.wait_in_lane(a_request(slo=BATCH))
        await grouped(cluster, *[request] * (rounds + 1))
        leader.noticed(request.lane)
        await leader.plan()
        cluster.clock.advance(0.5)
        await cluster.hear(status())
    seen = await forecasts(cluster, told)

    assert [each.at - each.age_s for each in seen] == [
        cluster.clock.now() - left for left in (1.5, 1.0, 0.5)
    ]
    waits = [each.lanes[0].wait_s or 0.0 for each in seen]
    assert [lane.lane for each in seen for lane in each.lanes] == [request.lane] * 3
    assert 0 < waits[0] < waits[1] < waits[2]


async def test_a_leader_that_is_deposed_while_it_forecasts_tells_nothing(
    cluster: LeaderRig, told: str, monkeypatch: pytest.MonkeyPatch
):
    leader = await generator(cluster)
    await cluster.hear(status())

    async def meanwhile(*arguments: Any, **named: Any) -> tuple[LaneForecast, ...]:
        leader.deposed()
        return await forecasting.forecasts_of(*arguments, **named)

    monkeypatch.setattr(leading, "forecasts_of", meanwhile)
    await leader.plan()
    assert not leader.state.leads
    assert await forecasts(cluster, told) == []

    leader.activated()
    monkeypatch.undo()
    cluster.clock.advance(SETTINGS.settle_s)
    await leader.plan()
    assert len(await forecasts(cluster, told)) == 1


async def test_who_comes_to_an_empty_lane_is_foretold_what_was_pulled_before(
    cluster: LeaderRig, told: str
):
    """One request of ten prompt and 24 answer tokens takes 28 of 500 tokens a second."""
    leader = await generator(cluster)
    await grouped(cluster, request := a_request(slo=BATCH))
    await cluster.hear(status(backlog_s=9.0, pull=PullState(backlog_s=1.0, whole_backlog_s=3.0)))
    await leader.plan()
    (seen,) = await forecasts(cluster, told)

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
async def test_who_comes_to_an_empty_lane_is_due_later_than_who_came_long_ago_was(
    cluster: LeaderRig, told: str, ago_s: float
):
    """What waits in sooner lanes goes before, however long nothing has come to this one."""
    leader = await generator(cluster)
    now = cluster.clock.now()
    for _ in range(40):
        await cluster.wait_in_lane(a_request())
    sooner = [a_request(arrived_at=now - 1.0)] * 40
    await grouped(cluster, *sooner, later := a_request(slo=BATCH, arrived_at=now - ago_s))
    leader.noticed(sooner[0].lane)
    await leader.plan()
    (seen,) = await forecasts(cluster, told)
    waits = {lane.lane: lane.wait_s for lane in seen.lanes}

    assert waits[later.lane] == pytest.approx(waits[sooner[0].lane])


async def test_an_empty_lane_of_a_model_that_nobody_has_active_is_not_foretold(
    cluster: LeaderRig, told: str
):
    leader = await generator(cluster)
    await grouped(cluster, a_request(slo=BATCH, base=OTHER))
    await leader.plan()
    (seen,) = await forecasts(cluster, told)

    assert seen.lanes == ()


async def test_groupers_are_told_how_many_they_are(cluster: LeaderRig, told: str):
    leader = await generator(cluster)
    for sender in ("g1", "g2", "g3"):
        await grouped(cluster, sender=sender)
    await leader.plan()
    cluster.clock.advance(5.5)
    await cluster.hear(status())
    await grouped(cluster, sender="g1")
    await leader.plan()

    assert [each.groupers for each in await forecasts(cluster, told)] == [3, 1]
