"""A leader finds the existing work queues in their list, and counts no other queues."""

import asyncio

import pytest

from services.planner.leader.leader import Leader
from shared.broker import topology
from shared.broker.protocol import OutMessage
from shared.broker.queue_list import list_queue, rewriting
from shared.contracts.base import encode
from shared.contracts.errors import BrokerUnavailableError
from shared.contracts.lanes import LaneKey, inbox_name
from shared.contracts.telemetry import LanesObserved, LeaderTick
from tests.deliveries import UnreliableBroker
from tests.queued import BATCH, CHAT, a_request
from tests.unit.planner.leader_rig import LeaderRig, drop, status

LANES = tuple(sorted(a_request(slo=slo).lane for slo in (CHAT, BATCH)))
TICK = LeaderTick(sender="t", at=0.0)


async def elected(cluster: LeaderRig) -> Leader:
    """A new leader after its first audit; each earlier leader is dead."""
    for earlier in cluster.leaders:
        await earlier.broker.close()
    leader = await cluster.leader()
    await cluster.hear(TICK, "tick.planner")
    await leader.plan()
    return leader


async def wait_in_lanes(cluster: LeaderRig) -> None:
    await cluster.wait_in_lane(a_request(slo=CHAT), a_request(slo=BATCH))


async def audited(cluster: LeaderRig, leader: Leader) -> None:
    cluster.clock.advance(leader.settings.audit_period_s)
    await leader.plan()


def counted(leader: Leader) -> list[str]:
    """Queues that the leader has counted since the last call."""
    assert isinstance(leader.broker, UnreliableBroker)
    queues = sorted(leader.broker.counted)
    leader.broker.counted.clear()
    return queues


async def contents(cluster: LeaderRig) -> tuple[int, set[str], bool]:
    """Number of messages of the list, and the names in them."""
    num_messages = await cluster.far.ready(topology.WORK_QUEUES)
    async with rewriting(cluster.far) as listed:
        return num_messages, set(listed.queues), listed.complete


async def test_only_the_first_leader_of_a_broker_counts_every_possible_queue(cluster: LeaderRig):
    first = await elected(cluster)
    scanned = counted(first)
    assert set(LANES) <= set(scanned)
    assert any(queue.startswith("lane.1.") for queue in scanned)
    assert await contents(cluster) == (1, set(), True)

    second = await elected(cluster)
    assert counted(second) == []
    assert second.state.counts.queues == set()


async def test_new_leader_counts_the_listed_queues(cluster: LeaderRig):
    await elected(cluster)
    await wait_in_lanes(cluster)
    leader = await elected(cluster)
    assert counted(leader) == list(LANES)
    assert leader.state.counts.waiting() == dict.fromkeys(LANES, 1)


async def test_first_leader_finds_queues_of_which_only_some_are_listed(cluster: LeaderRig):
    """After an upgrade, publishers may list new queues before a leader lists the earlier ones."""
    await topology.declare_work_queue(cluster.far, LANES[0])
    await topology.declare_work_queue(cluster.far, LANES[1])
    await list_queue(cluster.far, LANES[1])
    leader = await elected(cluster)
    assert leader.state.counts.queues == set(LANES)
    assert await contents(cluster) == (1, set(LANES), True)


async def test_each_audit_makes_one_message_of_the_list(cluster: LeaderRig):
    leader = await elected(cluster)
    await wait_in_lanes(cluster)
    await list_queue(cluster.far, LANES[0])
    await audited(cluster, leader)
    assert await contents(cluster) == (1, set(LANES), True)


async def test_queue_is_found_at_the_next_audit_if_its_notices_were_lost(cluster: LeaderRig):
    leader = await elected(cluster)
    await topology.declare_work_queue(cluster.far, LANES[0])
    await list_queue(cluster.far, LANES[0])
    await audited(cluster, leader)
    assert leader.state.counts.queues == {LANES[0]}


async def test_absent_queue_is_counted_once(cluster: LeaderRig):
    """A leader may die between a deletion and the change of the list."""
    await elected(cluster)
    await list_queue(cluster.far, LANES[0])
    leader = await elected(cluster)
    assert counted(leader) == [LANES[0]]
    assert await contents(cluster) == (1, set(), True)
    await audited(cluster, leader)
    assert counted(leader) == []


async def test_queue_created_after_it_was_counted_stays_listed(
    cluster: LeaderRig, monkeypatch: pytest.MonkeyPatch
):
    leader = await elected(cluster)
    await list_queue(cluster.far, LANES[0])
    count = leader.broker.depth

    async def overtaken(queue: str) -> object:
        depth = await count(queue)
        await topology.declare_work_queue(cluster.far, queue)
        await list_queue(cluster.far, queue)
        return depth

    monkeypatch.setattr(leader.broker, "depth", overtaken)
    await audited(cluster, leader)
    assert (await elected(cluster)).state.counts.queues == {LANES[0]}


async def test_deleted_queues_in_first_reports_are_not_counted(cluster: LeaderRig):
    """Totals of a process name each queue that it has ever used."""
    await elected(cluster)
    await wait_in_lanes(cluster)
    deleted = LaneKey.parse(LANES[0]).resume_name
    leader = await elected(cluster)
    counted(leader)
    observed = LanesObserved(
        sender="g", incarnation="i", seq=1, at=0.0, layout=2, put={LANES[0]: 3, deleted: 5}
    )
    await cluster.hear(observed, topology.LANES_KEY)
    await leader.plan()
    assert counted(leader) == [LANES[0]]
    assert leader.state.counts.due == set()


async def test_purged_list_causes_a_scan_even_if_new_queues_are_listed_meanwhile(
    cluster: LeaderRig,
):
    leader = await elected(cluster)
    await wait_in_lanes(cluster)
    await audited(cluster, leader)
    await cluster.far.purge(topology.WORK_QUEUES)
    await list_queue(cluster.far, LANES[1])
    counted(leader)
    await audited(cluster, leader)
    assert len(counted(leader)) > 500
    assert await contents(cluster) == (1, set(LANES), True)


async def test_no_name_is_lost_if_the_leader_dies_before_it_acknowledges(
    cluster: LeaderRig, monkeypatch: pytest.MonkeyPatch
):
    leader = await elected(cluster)
    await wait_in_lanes(cluster)
    publish = leader.broker.publish

    async def last(*arguments: object) -> object:
        outcome = await publish(*arguments)  # type: ignore[arg-type]
        drop(leader)
        return outcome

    monkeypatch.setattr(leader.broker, "publish", last)
    await audited(cluster, leader)
    assert (await contents(cluster))[0] == 4
    assert (await elected(cluster)).state.counts.queues == set(LANES)


async def test_no_name_is_lost_if_the_leader_dies_before_it_publishes(
    cluster: LeaderRig, monkeypatch: pytest.MonkeyPatch
):
    leader = await elected(cluster)
    await wait_in_lanes(cluster)

    async def never(*_: object) -> object:
        raise asyncio.CancelledError

    monkeypatch.setattr(leader.broker, "publish", never)
    with pytest.raises(asyncio.CancelledError):
        await audited(cluster, leader)
    assert (await elected(cluster)).state.counts.queues == set(LANES)


async def test_scan_is_repeated_if_it_fails(cluster: LeaderRig, monkeypatch: pytest.MonkeyPatch):
    leader = await cluster.leader()
    await topology.declare_work_queue(cluster.far, LANES[0])
    await cluster.hear(TICK, "tick.planner")

    async def unavailable(queue: str) -> object:
        raise BrokerUnavailableError(queue)

    with monkeypatch.context() as patched:
        patched.setattr(leader.broker, "depth", unavailable)
        with pytest.raises(BrokerUnavailableError):
            await leader.plan()
    assert await contents(cluster) == (0, set(), False)
    await leader.plan()
    assert leader.state.counts.queues == {LANES[0]}


async def test_new_leader_returns_the_requests_of_a_listed_inbox_whose_owner_is_dead(
    cluster: LeaderRig,
):
    """Its owner had renewed a request there, so that no other process knows of the inbox."""
    inbox, request = inbox_name("dead"), a_request("r")
    await topology.declare_work_queue(cluster.far, inbox)
    await list_queue(cluster.far, inbox)
    await cluster.far.publish(topology.LANES, inbox, OutMessage(body=encode(request)))
    leader = await elected(cluster)
    cluster.clock.advance(leader.settings.instance_timeout_s)
    await leader.plan()

    assert await cluster.far.ready(inbox) == 0
    assert await cluster.far.ready(LaneKey.parse(request.lane).resume_name) == 1
    assert inbox not in leader.state.counts.queues


async def test_inboxes_of_present_instances_are_listed_and_not_counted(cluster: LeaderRig):
    leader = await elected(cluster)
    inbox = inbox_name("i1")
    await topology.declare_work_queue(cluster.far, inbox)
    for _ in range(2):
        counted(leader)
        cluster.clock.advance(leader.settings.audit_period_s)
        await cluster.hear(status("i1"))
        await leader.plan()

    assert inbox in (await contents(cluster))[1]
    assert inbox not in counted(leader)


async def test_absent_inbox_of_a_dead_instance_leaves_the_list(cluster: LeaderRig):
    await list_queue(cluster.far, inbox_name("dead"))
    leader = await elected(cluster)
    cluster.clock.advance(leader.settings.instance_timeout_s)
    await leader.plan()
    await audited(cluster, leader)
    await audited(cluster, leader)
    assert inbox_name("dead") not in (await contents(cluster))[1]
