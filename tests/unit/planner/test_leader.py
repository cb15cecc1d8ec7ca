"""The leader: whose turn it is, what it sees, what it publishes and when."""

import pytest

from services.planner.inboxes import GRACE_S
from services.planner.lane_counter import LaneCounter
from services.planner.leader import GROUPER_MEMORY_S
from services.planner.policies import Planned
from shared.broker import topology
from shared.broker.protocol import OutMessage, PublishOutcome, QueueDepth
from shared.contracts.base import encode
from shared.contracts.estimates import Profile
from shared.contracts.lanes import inbox_name
from shared.contracts.telemetry import LanesObserved, LaneTotal, LeaderTick
from solver.planning.building import ClusterSnapshot
from tests.clocks import NOW
from tests.deliveries import LooseDelivery
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

TICK = LeaderTick(sender="t", at=0.0)


def totals_of(sender: str, seq: int, cluster: LeaderRig) -> LanesObserved:
    """A grouper's report, now, of nothing."""
    return LanesObserved(sender=sender, incarnation="i", seq=seq, at=cluster.clock.now(), layout=1)


async def test_who_was_given_nothing_is_no_leader(cluster: LeaderRig):
    leader = await cluster.leader()
    cluster.clock.advance(100)
    await leader.plan()
    assert leader.state.active_since is None
    assert await cluster.published() == []


async def test_a_delivery_makes_the_leader(cluster: LeaderRig):
    leader = await cluster.leader()
    await cluster.hear(TICK, "tick.planner")
    assert leader.state.active_since == NOW


async def test_a_new_leader_listens_before_it_plans(cluster: LeaderRig):
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


async def test_an_unchanged_plan_is_published_at_the_refresh_period_only(cluster: LeaderRig):
    leader = await settled(cluster)
    counts = []
    for _ in range(9):
        await leader.plan()
        counts.append(len(await cluster.published()))
        cluster.clock.advance(0.5)
        await cluster.hear(status())
    assert counts == [1, 0, 0, 0, 1, 0, 0, 0, 1]
    assert leader.state.epoch == 1


async def test_more_of_the_same_is_no_new_plan(cluster: LeaderRig):
    await cluster.wait_in_lane(a_request())
    leader = await settled(cluster)
    await leader.plan()
    await cluster.wait_in_lane(a_request())
    await leader.plan()
    assert [plan.epoch for plan in await cluster.published()] == [1]


async def test_a_changed_plan_is_published_at_once_under_the_next_epoch(cluster: LeaderRig):
    leader = await settled(cluster)
    await leader.plan()
    await cluster.wait_in_lane(request := a_request())
    leader.noticed(request.lane)
    await leader.plan()
    assert [plan.epoch for plan in await cluster.published()] == [1, 2]


async def test_the_first_epoch_is_the_highest_seen_and_one(cluster: LeaderRig):
    leader = await settled(cluster)
    await cluster.hear(status("i2", plan_epoch=41))
    await leader.plan()
    assert {plan.epoch for plan in await cluster.published()} == {42}


async def test_a_leader_that_comes_back_does_not_take_what_it_did_not_hear_for_silence(
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


async def test_an_inbox_that_was_claimed_before_another_led_has_its_grace_again(
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


async def test_a_leader_that_is_deposed_while_it_counts_plans_nothing(
    cluster: LeaderRig, monkeypatch: pytest.MonkeyPatch
):
    leader = await settled(cluster)
    await cluster.wait_in_lane(request := a_request())
    leader.noticed(request.lane)
    count = leader.broker.depth

    async def meanwhile(queue: str) -> QueueDepth | None:
        leader.deposed()
        return await count(queue)

    monkeypatch.setattr(leader.broker, "depth", meanwhile)
    await leader.plan()
    assert await cluster.published() == []


async def test_one_leader_is_active_and_the_other_takes_over(cluster: LeaderRig):
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


async def test_a_leader_that_comes_back_has_an_epoch_of_its_own(cluster: LeaderRig):
    """Both have planned the same; agents must still be able to tell who spoke last."""
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


async def test_a_silent_instance_gets_no_work(cluster: LeaderRig):
    leader = await settled(cluster)
    await cluster.hear(status("i2"))
    cluster.clock.advance(4.9)
    await cluster.hear(status("i2"))
    await leader.plan()
    assert {plan.queue.instance_id for plan in await cluster.published()} == {"i2"}


async def test_while_all_instances_drain_nothing_is_planned(
    cluster: LeaderRig, monkeypatch: pytest.MonkeyPatch
):
    """The generator needs at least one."""
    leader = await settled(cluster)
    plan, snapshots = leader.planner.plan, []

    async def planned(snapshot: ClusterSnapshot) -> Planned:
        snapshots.append(snapshot)
        return await plan(snapshot)

    monkeypatch.setattr(leader.planner, "plan", planned)
    await cluster.wait_in_lane(request := a_request())
    leader.noticed(request.lane)
    await cluster.hear(status(draining=True))
    await leader.plan()
    assert snapshots == []

    await cluster.hear(status())
    await leader.plan()
    assert len(snapshots) == 1


async def test_a_draining_instance_gets_no_work(cluster: LeaderRig):
    leader = await settled(cluster)
    await cluster.hear(status("i2", draining=True))
    await leader.plan()
    assert {plan.queue.instance_id for plan in await cluster.published()} == {"i1"}


async def test_an_old_heartbeat_changes_nothing(cluster: LeaderRig):
    leader = await settled(cluster)
    await cluster.hear(status(active=OTHER, seq=10_000))
    await cluster.hear(status(active=MODEL, seq=9_999))
    assert leader.state.instances["i1"].model == OTHER


async def test_a_restarted_instance_counts_from_one_again(cluster: LeaderRig):
    leader = await settled(cluster)
    await cluster.hear(status(seq=10_000))
    await cluster.hear(status(seq=1, incarnation="second", active=OTHER))
    assert leader.state.instances["i1"].model == OTHER


async def test_deadlines_are_those_of_the_requests_that_wait(cluster: LeaderRig):
    """The lane of the other model has the wider band, but has been waiting for longer."""
    chat, batch = a_request(), a_request(slo=BATCH, base=OTHER)
    await cluster.wait_in_lane(chat, batch)
    leader = await settled(cluster)
    totals = tuple(
        LaneTotal(
            lane=lane,
            requests=1,
            prompt_tokens=4,
            max_tokens=24,
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


async def test_best_effort_comes_last(cluster: LeaderRig):
    await cluster.wait_in_lane(a_request(slo=BEST_EFFORT), a_request(slo=BATCH, base=OTHER))
    leader = await settled(cluster)
    await leader.plan()
    (plan,) = await cluster.published()
    assert [model for model, _ in lanes_of(plan)] == [OTHER, MODEL]


async def test_totals_of_a_grouper_that_is_gone_are_forgotten(cluster: LeaderRig):
    leader = await settled(cluster)
    for sender in ("gone", "here"):
        await cluster.hear(totals_of(sender, 1, cluster), topology.LANES_KEY)
    cluster.clock.advance(GROUPER_MEMORY_S + 1.0)
    await cluster.hear(totals_of("here", 2, cluster), topology.LANES_KEY)
    await leader.plan()
    assert [sender for sender, _ in leader.state.lanes] == ["here"]


async def test_the_highest_version_of_a_profile_counts(cluster: LeaderRig):
    leader = await cluster.leader()
    for version in (2, 3, 1):
        profile = Profile(model=MODEL, engine="e", device="d", version=version, at=0.0)
        await notices_of(leader).handle(LooseDelivery(body=encode(profile)))
    assert [profile.version for profile in leader.state.profiles.values()] == [3]


def test_a_lane_counts_what_plans_need():
    counter = LaneCounter()
    for second in range(40):
        request = a_request(slo=BATCH if second % 4 else CHAT, arrived_at=NOW)
        counter.add(request, at=NOW + second)
    total = counter.total("lane")
    assert (total.requests, total.prompt_tokens, total.max_tokens) == (40, 160, 960)
    assert (total.squared_prompt_tokens, total.interactive) == (640.0, 10)
    assert total.arrivals[-3:] == tuple((NOW + second, second + 1) for second in (37, 38, 39))
