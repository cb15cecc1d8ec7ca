"""The leader: its activation, its state, and its publications."""

import asyncio

import pytest
from msgspec.structs import replace

from services.planner.handlers import leader_state_handler
from services.planner.lane_totals import LaneCounter
from services.planner.leader.leader import GROUPER_MEMORY_S
from services.planner.leader.orphaned_inboxes import GRACE_S
from services.planner.leader.policies import Planned
from shared.broker import topology
from shared.broker.protocol import OutMessage, PublishOutcome, QueueDepth, Settlement
from shared.broker.queue_list import list_queue
from shared.contracts.base import InstanceId, encode
from shared.contracts.control import LaneNonempty
from shared.contracts.estimates import Profile
from shared.contracts.lanes import LaneKey, inbox_name
from shared.contracts.telemetry import InboxUsed, LanesObserved, LaneTotal, LeaderTick
from solver.planning.problem.snapshot import ClusterSnapshot
from tests.clocks import NOW
from tests.deliveries import LooseDelivery, UnreliableBroker
from tests.queued import BATCH, BEST_EFFORT, CHAT, MODEL, OTHER, a_request
from tests.unit.planner.leader_rig import (
    SETTINGS,
    LeaderRig,
    drop,
    lanes_of,
    notices_of,
    settled,
    status,
)
from tests.unit.planner.rig import queued_bytes

TICK = LeaderTick(sender="t", at=0.0)


def totals_of(sender: str, seq: int, cluster: LeaderRig) -> LanesObserved:
    """A grouper's current totals, without requests."""
    return LanesObserved(sender=sender, incarnation="i", seq=seq, at=cluster.clock.now(), layout=1)


async def test_process_without_a_delivery_is_not_the_leader(cluster: LeaderRig):
    leader = await cluster.leader()
    cluster.clock.advance(100)
    await leader.plan()
    assert leader.state.active_since is None
    assert await cluster.published() == []


async def test_delivery_makes_the_leader(cluster: LeaderRig):
    leader = await cluster.leader()
    await cluster.hear(TICK, "tick.planner")
    assert leader.state.active_since == NOW


async def test_leader_whose_consumer_is_ended_by_the_broker_is_deposed(cluster: LeaderRig):
    leader = await cluster.leader()
    await cluster.hear(TICK, "tick.planner")
    await cluster.far.delete_queue(topology.LEADER)
    assert leader.state.active_since is None


async def test_new_leader_collects_statuses_before_it_plans(cluster: LeaderRig):
    leader = await cluster.leader()
    await cluster.hear(status())
    cluster.clock.advance(1.4)
    await leader.plan()
    assert await cluster.published() == []
    cluster.clock.advance(0.2)
    await leader.plan()
    assert [plan.queue.instance_id for plan in await cluster.published()] == ["i1"]


async def test_without_instances_there_is_no_plan(cluster: LeaderRig):
    leader = await cluster.leader()
    await cluster.hear(TICK, "tick.planner")
    cluster.clock.advance(10)
    await leader.plan()
    assert await cluster.published() == []


async def test_unchanged_plan_is_published_at_the_refresh_period_only(cluster: LeaderRig):
    leader = await settled(cluster)
    counts = []
    for _ in range(9):
        await leader.plan()
        counts.append(len(await cluster.published()))
        cluster.clock.advance(0.5)
        await cluster.hear(status())
    assert counts == [1, 0, 0, 0, 1, 0, 0, 0, 1]
    assert leader.state.epoch == 1


async def test_more_requests_of_the_same_lane_are_not_a_new_plan(cluster: LeaderRig):
    await cluster.wait_in_lane(a_request())
    leader = await settled(cluster)
    await leader.plan()
    await cluster.wait_in_lane(a_request())
    await leader.plan()
    assert [plan.epoch for plan in await cluster.published()] == [1]


async def test_changed_plan_is_published_at_once_with_the_next_epoch(cluster: LeaderRig):
    leader = await settled(cluster)
    await leader.plan()
    await cluster.wait_in_lane(request := a_request())
    leader.noticed(LaneNonempty(queue=request.lane))
    await leader.plan()
    assert [plan.epoch for plan in await cluster.published()] == [1, 2]


async def test_first_epoch_is_one_above_the_highest_seen(cluster: LeaderRig):
    leader = await settled(cluster)
    await cluster.hear(status("i2", plan_epoch=41))
    await leader.plan()
    assert {plan.epoch for plan in await cluster.published()} == {42}


async def test_delivery_of_a_lost_connection_makes_no_leader(cluster: LeaderRig):
    """Its handler may begin after the loss; another process is the active consumer then."""
    leader = await settled(cluster)
    leader.deposed()
    late = LooseDelivery(body=encode(TICK), has_returned=lambda: True)
    await leader_state_handler(leader)(late)
    assert not leader.state.leads

    await cluster.hear(TICK, "tick.planner")
    assert leader.state.leads


async def test_reactivated_leader_restarts_the_silence_of_instances(
    cluster: LeaderRig,
):
    leader = await settled(cluster)
    await cluster.hear(status())
    await topology.declare_work_queue(cluster.far, inbox_name("i1"))
    leader.deposed()
    cluster.clock.advance(60)
    await cluster.hear(TICK, "tick.planner")
    await leader.plan()
    assert list(leader.state.instances) == ["i1"]
    routed = OutMessage(body=b"routed")
    inbox = inbox_name("i1")
    assert await cluster.far.publish(topology.LANES, inbox, routed) is PublishOutcome.CONFIRMED

    cluster.clock.advance(SETTINGS.instance_timeout_s + 0.1)
    await leader.plan()
    assert not leader.state.instances
    assert await cluster.far.publish(topology.LANES, inbox, routed) is PublishOutcome.UNROUTABLE


async def test_reactivated_leader_restarts_the_grace_of_inboxes(
    cluster: LeaderRig,
):
    leader = await settled(cluster)
    inbox = inbox_name("i9")
    await topology.declare_work_queue(cluster.far, inbox)
    leader.claims.add("i9", cluster.clock.now())
    leader.deposed()
    cluster.clock.advance(2 * GRACE_S)
    await cluster.hear(TICK, "tick.planner")
    await leader.plan()
    cluster.clock.advance(SETTINGS.instance_timeout_s)
    await leader.plan()
    assert await cluster.far.depth(inbox) is not None

    cluster.clock.advance(GRACE_S)
    await leader.plan()
    assert await cluster.far.depth(inbox) is None


async def test_new_leader_empties_the_inbox_of_an_instance_that_it_never_saw(cluster: LeaderRig):
    request, inbox = a_request(), inbox_name("i9")
    await cluster.wait_in_lane(request, queue=inbox)
    leader = await settled(cluster)
    report = replace(
        totals_of("g", 1, cluster),
        inboxes=(
            InboxUsed(instance_id=InstanceId("i9"), idle_s=3.0),
            InboxUsed(instance_id=InstanceId("i1"), idle_s=3.0),
        ),
    )
    await cluster.hear(report, topology.LANES_KEY)
    await leader.plan()
    depth = await cluster.far.depth(inbox)
    assert depth is not None
    assert depth.ready == 1  # the owner of the inbox may be about to publish its first status

    cluster.clock.advance(SETTINGS.instance_timeout_s)
    await cluster.hear(status())
    await leader.plan()
    assert leader.claims.lost == ("i9",)
    assert await cluster.far.get(LaneKey.parse(request.lane).resume_name) is not None


async def test_request_of_a_lost_instance_returns_to_a_queue_that_is_being_retired(
    cluster: LeaderRig,
):
    """The leader holds the lock of the queue, for which its own publish waits."""
    request, inbox = a_request(), inbox_name("i9")
    resume = LaneKey.parse(request.lane).resume_name
    await topology.declare_work_queue(cluster.far, resume)
    await list_queue(cluster.far, resume)
    leader = await settled(cluster, retire_idle_s=100.0)
    await leader.plan()
    cluster.clock.advance(100.0)
    await cluster.hear(status())
    await leader.plan()
    assert leader.queues.released == (resume,)

    await cluster.wait_in_lane(request, queue=inbox)
    leader.claims.add("i9", cluster.clock.now())
    await asyncio.wait_for(leader.plan(), 10)
    assert leader.queues.released == ()
    assert await cluster.far.ready(resume) == 1


async def test_leader_deposed_while_counting_makes_no_plan(
    cluster: LeaderRig, monkeypatch: pytest.MonkeyPatch
):
    leader = await settled(cluster)
    await cluster.wait_in_lane(request := a_request())
    leader.noticed(LaneNonempty(queue=request.lane))
    count = leader.broker.depth

    async def meanwhile(queue: str) -> QueueDepth | None:
        leader.deposed()
        return await count(queue)

    monkeypatch.setattr(leader.broker, "depth", meanwhile)
    await leader.plan()
    assert await cluster.published() == []


async def test_one_leader_is_active_and_another_takes_over(cluster: LeaderRig):
    first, second = await cluster.leader(), await cluster.leader()
    await cluster.hear(status())
    assert [leader.state.active_since for leader in (first, second)] == [NOW, None]
    cluster.clock.advance(2)
    await first.plan()
    (plan,) = await cluster.published()
    assert (plan.leader_id, plan.epoch) == (first.leader_id, 1)
    drop(first)
    await cluster.hear(status(plan_epoch=1))
    assert [leader.state.active_since for leader in (first, second)] == [None, NOW + 2]
    cluster.clock.advance(2)
    await cluster.hear(status(plan_epoch=1))
    for leader in (first, second):
        await leader.plan()
    (plan,) = await cluster.published()
    assert (plan.leader_id, plan.epoch) == (second.leader_id, 2)


async def test_reactivated_leader_uses_a_new_epoch(cluster: LeaderRig):
    """Two leaders made equal plans; agents must still be able to order them by epoch."""
    first, second = await cluster.leader(), await cluster.leader()
    await cluster.hear(status())
    cluster.clock.advance(2)
    await first.plan()
    drop(first)
    await cluster.hear(status(plan_epoch=1))
    cluster.clock.advance(2)
    await second.plan()
    drop(second)
    await cluster.hear(status(plan_epoch=2))
    cluster.clock.advance(2)
    await first.plan()
    plans = await cluster.published()
    assert [(plan.leader_id, plan.epoch) for plan in plans] == [
        (first.leader_id, 1),
        (second.leader_id, 2),
        (first.leader_id, 3),
    ]


async def test_silent_instance_gets_no_work(cluster: LeaderRig):
    leader = await settled(cluster)
    await cluster.hear(status("i2"))
    cluster.clock.advance(4.9)
    await cluster.hear(status("i2"))
    await leader.plan()
    assert {plan.queue.instance_id for plan in await cluster.published()} == {"i2"}


async def test_no_plan_is_made_while_all_instances_drain(
    cluster: LeaderRig, monkeypatch: pytest.MonkeyPatch
):
    """The generator needs at least one instance."""
    leader = await settled(cluster)
    plan, snapshots = leader.planner.plan, []

    async def planned(snapshot: ClusterSnapshot) -> Planned:
        snapshots.append(snapshot)
        return await plan(snapshot)

    monkeypatch.setattr(leader.planner, "plan", planned)
    await cluster.wait_in_lane(request := a_request())
    leader.noticed(LaneNonempty(queue=request.lane))
    await cluster.hear(status(draining=True))
    await leader.plan()
    assert snapshots == []

    await cluster.hear(status())
    await leader.plan()
    assert len(snapshots) == 1


async def test_draining_instance_gets_no_work(cluster: LeaderRig):
    leader = await settled(cluster)
    await cluster.hear(status("i2", draining=True))
    await leader.plan()
    assert {plan.queue.instance_id for plan in await cluster.published()} == {"i1"}


async def test_status_older_than_the_latest_is_ignored(cluster: LeaderRig):
    leader = await settled(cluster)
    older, latest = status(active=MODEL), status(active=OTHER)
    await cluster.hear(latest)
    await cluster.hear(older)
    assert leader.state.instances["i1"].model == OTHER


async def test_statuses_of_a_restarted_instance_count_from_one_again(cluster: LeaderRig):
    leader = await settled(cluster)
    await cluster.hear(status())
    await cluster.hear(status(seq=1, incarnation="second", active=OTHER))
    assert leader.state.instances["i1"].model == OTHER


async def test_requests_of_a_restarted_instance_are_counted_again(cluster: LeaderRig):
    """A restarted instance is not silent for long enough to count as lost."""
    leader = await settled(cluster)
    request = a_request()
    await leader.plan()
    await cluster.wait_in_lane(request)
    delivery = await cluster.far.get(request.lane)
    assert delivery is not None
    await cluster.hear(status("i2"))
    await cluster.hear(status("i2", pulled_by_lane={request.lane: 1}))
    await delivery.settle(Settlement.REQUEUE)
    await cluster.hear(status("i2", incarnation="second"))
    assert leader.state.counts.due == {request.lane}


async def test_a_lanes_deadlines_follow_its_waiting_requests(cluster: LeaderRig):
    """The other model's lane has a wider band, but its requests have waited longer."""
    chat, batch = a_request(), a_request(slo=BATCH, base=OTHER)
    await cluster.wait_in_lane(chat, batch)
    leader = await settled(cluster)
    totals = tuple(
        LaneTotal(
            lane=lane,
            requests=1,
            prompt_tokens=4,
            expected_tokens=24,
            time_left_s=60.0,
            arrivals=((at, 1),),
        )
        for lane, at in ((chat.lane, NOW), (batch.lane, NOW - 90.0))
    )
    observed = LanesObserved(sender="g", incarnation="i", seq=1, at=NOW, layout=1, lanes=totals)
    await cluster.hear(observed, "lanes.g")
    await leader.plan()
    (plan,) = await cluster.published()
    assert [model for model, _ in lanes_of(plan)] == [OTHER, MODEL]


async def test_best_effort_is_planned_last(cluster: LeaderRig):
    await cluster.wait_in_lane(a_request(slo=BEST_EFFORT), a_request(slo=BATCH, base=OTHER))
    leader = await settled(cluster)
    await leader.plan()
    (plan,) = await cluster.published()
    assert [model for model, _ in lanes_of(plan)] == [OTHER, MODEL]


async def test_totals_of_a_lost_grouper_are_forgotten(cluster: LeaderRig):
    leader = await settled(cluster)
    for sender in ("gone", "here"):
        await cluster.hear(totals_of(sender, 1, cluster), topology.LANES_KEY)
    cluster.clock.advance(GROUPER_MEMORY_S + 1.0)
    await cluster.hear(totals_of("here", 2, cluster), topology.LANES_KEY)
    await leader.plan()
    assert [sender for sender, _ in leader.state.lanes] == ["here"]


async def test_highest_version_of_a_profile_is_used(cluster: LeaderRig):
    leader = await cluster.leader()
    for version in (2, 3, 1):
        profile = Profile(model=MODEL, engine="e", device="d", version=version, at=0.0)
        await notices_of(leader).handle(LooseDelivery(body=encode(profile)))
    assert [profile.version for profile in leader.state.profiles.values()] == [3]


def test_lane_counter_provides_inputs_of_plans():
    counter = LaneCounter()
    for second in range(40):
        request = a_request(slo=BATCH if second % 4 else CHAT, arrived_at=NOW)
        counter.add(request, at=NOW + second)
    total = counter.total("lane")
    assert (total.requests, total.prompt_tokens, total.expected_tokens) == (40, 160, 960)
    assert (total.squared_prompt_tokens, total.interactive) == (640.0, 10)
    assert total.arrivals[-3:] == tuple((NOW + second, second + 1) for second in (37, 38, 39))


async def test_queues_are_counted_at_audits_only(cluster: LeaderRig):
    leader = await settled(cluster, audit_period_s=60.0)
    assert isinstance(leader.broker, UnreliableBroker)
    request = a_request()
    await leader.plan()

    leader.broker.counted.clear()
    await cluster.wait_in_lane(request)
    for _ in range(3):
        cluster.clock.advance(1.0)
        await leader.plan()
    assert leader.state.waiting == {request.lane: 1}
    assert leader.broker.counted == []

    cluster.clock.advance(60.0)
    await cluster.hear(status())
    await leader.plan()
    assert leader.broker.counted == [request.lane]


async def test_queue_of_a_notice_without_a_source_is_counted(cluster: LeaderRig):
    leader = await settled(cluster)
    await leader.plan()
    request = a_request()
    await topology.declare_work_queue(cluster.far, request.lane)
    await cluster.far.publish(topology.LANES, request.lane, queued_bytes(request))
    leader.noticed(LaneNonempty(queue=request.lane))
    await leader.plan()
    assert leader.state.waiting == {request.lane: 1}


async def test_a_lane_created_while_it_is_counted_is_known(
    cluster: LeaderRig, monkeypatch: pytest.MonkeyPatch
):
    leader = await settled(cluster)
    request = a_request()
    count = leader.broker.depth

    async def overtaken(queue: str) -> QueueDepth | None:
        depth = await count(queue)
        if queue == request.lane and depth is None:
            await cluster.wait_in_lane(request)
        return depth

    monkeypatch.setattr(leader.broker, "depth", overtaken)
    await leader.plan()
    assert leader.state.waiting[request.lane] == 1


async def test_requests_of_a_lost_instance_are_counted_again(cluster: LeaderRig):
    leader = await settled(cluster, audit_period_s=1e6)
    request = a_request()
    await leader.plan()
    await cluster.wait_in_lane(request)
    delivery = await cluster.far.get(request.lane)
    assert delivery is not None
    await cluster.hear(status("i2", pulled_by_lane={}))
    await cluster.hear(status("i2", pulled_by_lane={request.lane: 1}))
    await leader.plan()
    assert leader.state.waiting[request.lane] == 0

    await delivery.settle(Settlement.REQUEUE)
    cluster.clock.advance(6.0)
    await cluster.hear(status())
    await leader.plan()
    for _ in range(2):
        cluster.clock.advance(1.0)
        await cluster.hear(status())
        await cluster.hear(totals_of("g", 1, cluster), topology.LANES_KEY)
    await leader.plan()
    assert leader.state.waiting[request.lane] == 1


async def test_each_round_knows_how_long_a_lane_has_not_been_served(cluster: LeaderRig):
    leader = await settled(cluster)
    request = a_request(slo=CHAT)
    await cluster.wait_in_lane(request, a_request(slo=BEST_EFFORT))
    await leader.plan()
    cluster.clock.advance(3.0)
    await cluster.hear(status())
    await leader.plan()

    best_effort = next(queue for queue in leader.state.unserved_s if queue != request.lane)
    assert leader.state.unserved_s == {request.lane: 3.0, best_effort: 3.0}
    edge_s = leader.layout.first_band_s * leader.layout.band_ratio**3
    assert leader.state.deadline_s == {request.lane: pytest.approx(edge_s)}
