"""Waiting work in the snapshot from which the leader plans."""

import pytest

from shared.broker.protocol import Settlement
from shared.contracts.base import encode
from shared.contracts.control import LaneNonempty
from shared.contracts.lanes import LaneKey, LaneLayout, relegated_name
from shared.contracts.qos import Importance
from shared.contracts.telemetry import LeaderTick
from tests.deliveries import LooseDelivery
from tests.queued import BATCH, MODEL, OTHER, a_request, lane_of
from tests.unit.planner.leader_rig import LeaderRig, lanes_of, notices_of, settled, status

TICK = LeaderTick(sender="t", at=0.0)


async def test_waiting_work_is_found_without_reports(cluster: LeaderRig):
    """A leader that has just started has lanes with work, but no groupers' reports."""
    request = a_request()
    await cluster.wait_in_lane(request)
    leader = await settled(cluster)
    await leader.plan()
    (plan,) = await cluster.published()
    assert lanes_of(plan) == [(MODEL, {request.lane})]


async def test_companion_queues_count_for_their_lane(cluster: LeaderRig):
    key = lane_of(BATCH)
    await cluster.wait_in_lane(a_request(slo=BATCH), queue=key.overflow_name)
    leader = await settled(cluster)
    await leader.plan()
    (plan,) = await cluster.published()
    assert lanes_of(plan) == [(MODEL, {key.queue_name})]


async def test_evicted_work_is_planned_in_its_band(cluster: LeaderRig):
    key = lane_of(BATCH, model=OTHER)
    await cluster.wait_in_lane(a_request(slo=BATCH, base=OTHER), queue=key.resume_name)
    leader = await settled(cluster)
    await leader.plan()
    (plan,) = await cluster.published()
    ((model, lanes),) = lanes_of(plan)
    assert model == OTHER
    assert {LaneKey.parse(lane).resume_name for lane in lanes} == {key.resume_name}


async def test_relegated_work_is_planned_as_best_effort(cluster: LeaderRig):
    request = a_request(base=OTHER, relegated=True)
    await cluster.wait_in_lane(request, queue=relegated_name(OTHER))
    leader = await settled(cluster)
    await leader.plan()
    (plan,) = await cluster.published()
    ((model, lanes),) = lanes_of(plan)
    assert model == OTHER
    assert {LaneKey.parse(lane).band for lane in lanes} == {LaneLayout().best_effort_band}


async def test_lane_of_an_older_layout_drains(cluster: LeaderRig):
    old = LaneKey.of(
        LaneLayout(version=1, num_bands=30),
        model=MODEL,
        importance=Importance.HIGH,
        band=29,
        work=0,
    )
    leader = await cluster.leader(layout=LaneLayout(version=2))
    await cluster.hear(status(pulled_by_lane={old.queue_name: 1, old.resume_name: 1}))
    for queue in (old.queue_name, old.resume_name):
        await cluster.wait_in_lane(a_request(lane=old.queue_name), queue=queue)
    cluster.clock.advance(1.5)
    await leader.plan()
    (plan,) = await cluster.published()
    ((_, lanes),) = lanes_of(plan)
    assert old.queue_name in lanes
    assert old.resume_name in {LaneKey.parse(lane).resume_name for lane in lanes}


@pytest.mark.parametrize("queue", ["lane.nonsense", "lane.1.m.high.x.short", "other", ""])
async def test_queues_that_are_not_lanes_are_ignored(cluster: LeaderRig, queue: str):
    leader = await settled(cluster)
    notice = LooseDelivery(body=encode(LaneNonempty(queue=queue)))
    await notices_of(leader).handle(notice)
    await cluster.hear(status(pulled_by_lane={queue: 1}))
    await leader.plan()
    assert notice.settlements == [Settlement.ACK]
    assert len(await cluster.published()) == 1


async def test_notice_adds_a_missing_lane_to_the_next_plan(cluster: LeaderRig):
    leader = await settled(cluster)
    await leader.plan()
    request = a_request()
    await cluster.wait_in_lane(request)
    await notices_of(leader).handle(LooseDelivery(body=encode(LaneNonempty(queue=request.lane))))
    await cluster.published()
    await leader.plan()
    (plan,) = await cluster.published()
    assert lanes_of(plan) == [(MODEL, {request.lane})]
