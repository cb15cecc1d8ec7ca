"""Creation and retirement of work queues on every `Broker`."""

import asyncio

import pytest

from services.planner.leader import retirement
from services.planner.leader.retirement import Retirement
from shared.broker import topology
from shared.broker.protocol import (
    BindingSpec,
    Broker,
    Delivery,
    OutMessage,
    PublishOutcome,
    QueueDepth,
    Settlement,
)
from shared.broker.queue_list import list_queue, rewriting
from shared.broker.work_queues import NOTICE_SPACING_S, WorkQueues
from shared.contracts.base import Decoder
from shared.contracts.control import LaneNonempty, QueuesRetired, QueuesRetiring
from solver.planning.problem.queue_counts import SETTLE_S, QueueCounts, QueueTotal
from tests.brokers import BrokerRig, eventually

LANE = "lane.2.m.high.3.w0"
SOURCE = "grouper/first"
IDLE_S = 100.0
decode_nonempty: Decoder[LaneNonempty] = Decoder(LaneNonempty)
decode_retiring: Decoder[QueuesRetiring] = Decoder(QueuesRetiring)


def message(request_id: str) -> OutMessage:
    return OutMessage(body=request_id.encode(), message_id=request_id)


class Leader:
    """A leader's retirement, with its counts of two lanes that one grouper fills."""

    def __init__(self, broker: Broker) -> None:
        self.broker = broker
        self.now = 0.0
        self.counts = QueueCounts()
        self.retirement = Retirement(broker, WorkQueues(broker, "leader"), IDLE_S)
        self.counts.observe(SOURCE, {}, self.now)

    async def hear(self, queues: WorkQueues, *, pulled: int = 0, after_s: float = 1.0) -> None:
        """Process a report of the grouper, and execute one round."""
        self.now += after_s
        totals = {queue: QueueTotal(put) for queue, put in queues.put.items()}
        if pulled:
            totals[LANE] = QueueTotal(queues.put[LANE], pulled)
        self.counts.observe(SOURCE, totals, self.now)
        self.retirement.reported(SOURCE, queues.released, self.now)
        await self.retirement.work(self.counts, self.now)

    async def audit(self) -> None:
        audit = self.counts.begin_audit([LANE], self.now)
        depth = await self.broker.depth(LANE)
        self.counts.counted(audit, {LANE: depth.ready if depth else None}, self.now)
        self.now += SETTLE_S

    async def count_served(self, queues: WorkQueues) -> None:
        """Count the lane, whose only request was served."""
        for _ in range(2):  # the second audit is exact, as nothing moves during it
            await self.audit()
            await self.hear(queues, pulled=1)
        assert (self.counts.waiting(), self.counts.due) == ({LANE: 0}, set())


async def served(broker_rig: BrokerRig) -> tuple[Leader, WorkQueues, Broker]:
    """A lane whose only request has been served, and all processes that use the lane."""
    broker, far = await broker_rig.connect(), await broker_rig.connect()
    await topology.declare(broker)
    leader, queues = Leader(broker), WorkQueues(far, SOURCE)
    assert await queues.publish(LANE, message("a")) is PublishOutcome.CONFIRMED
    await (await taken(far)).settle(Settlement.ACK)
    await eventually(lambda: is_empty(far))
    await leader.count_served(queues)
    return leader, queues, far


async def taken(broker: Broker) -> Delivery:
    delivery: Delivery | None = None

    async def got() -> bool:
        nonlocal delivery
        delivery = await broker.get(LANE)
        return delivery is not None

    await eventually(got)
    assert delivery is not None
    return delivery


async def is_empty(broker: Broker) -> bool:
    depth = await broker.depth(LANE)
    return depth is not None and (depth.ready, depth.consumers) == (0, 0)


async def exists(broker: Broker) -> bool:
    return await broker.depth(LANE) is not None


async def test_queue_is_created_by_its_first_request(broker_rig: BrokerRig):
    broker = await broker_rig.connect()
    await topology.declare(broker)
    queues = WorkQueues(broker, SOURCE)
    outcomes = await asyncio.gather(*(queues.publish(LANE, message(str(n))) for n in range(8)))
    assert outcomes == [PublishOutcome.CONFIRMED] * 8
    assert queues.put[LANE] == 8


async def test_notice_of_a_request_counts_it_and_does_not_precede_it(broker_rig: BrokerRig):
    """The notice leaves with the request; a pull that follows it finds the request."""
    broker, far = await broker_rig.connect(), await broker_rig.connect()
    await topology.declare(broker)
    queues = WorkQueues(broker, SOURCE)
    await queues.publish(LANE, message("first"))
    await (await taken(far)).settle(Settlement.ACK)
    notices = topology.temporary_queue("notices")
    await far.declare_queue(notices)
    await far.bind(
        BindingSpec(
            exchange=topology.CONTROL, queue=notices.name, routing_key=topology.CONTROL_LANE
        )
    )
    await asyncio.sleep(NOTICE_SPACING_S)
    for number in range(2, 12):
        asked = asyncio.create_task(queues.publish(LANE, message(str(number))))
        notice: Delivery | None = None
        while notice is None:
            notice = await far.get(notices.name)
        request = await far.get(LANE)
        assert request is not None
        assert decode_nonempty(notice.body) == LaneNonempty(queue=LANE, source=SOURCE, put=number)
        await request.settle(Settlement.ACK)
        await notice.settle(Settlement.ACK)
        assert await asked is PublishOutcome.CONFIRMED
        await asyncio.sleep(NOTICE_SPACING_S)


async def test_request_that_the_broker_does_not_take_is_not_counted(broker_rig: BrokerRig):
    broker = await broker_rig.connect()
    await topology.declare(broker)
    queues = WorkQueues(broker, SOURCE)
    await queues.publish(LANE, message("first"))
    await broker.delete_queue(LANE)
    await queues.publish(LANE, message("second"))

    assert queues.put[LANE] == 2


async def test_two_processes_create_a_queue_at_the_same_time(broker_rig: BrokerRig):
    brokers = [await broker_rig.connect() for _ in range(3)]
    await topology.declare(brokers[0])
    processes = [WorkQueues(broker, f"grouper-{n}") for n, broker in enumerate(brokers)]
    await asyncio.gather(*(each.publish(LANE, message(each.source)) for each in processes))

    async def has_all() -> bool:
        depth = await brokers[0].depth(LANE)
        return depth is not None and depth.ready == 3

    await eventually(has_all)


async def listed(broker: Broker) -> set[str]:
    async with rewriting(broker) as contents:
        return set(contents.queues)


async def test_queue_is_listed_before_its_first_request(
    broker_rig: BrokerRig, monkeypatch: pytest.MonkeyPatch
):
    """If the process or the broker stops at any time, each queue with requests is in the list."""
    broker, far = await broker_rig.connect(), await broker_rig.connect()
    await topology.declare(broker)
    queues = WorkQueues(broker, SOURCE)
    publish, before = broker.publish, list[set[str]]()

    async def recorded(exchange: str, routing_key: str, out: OutMessage) -> PublishOutcome:
        if routing_key == LANE:
            before.append(await listed(far))
        return await publish(exchange, routing_key, out)

    monkeypatch.setattr(broker, "publish", recorded)
    for request_id in "ab":
        assert await queues.publish(LANE, message(request_id)) is PublishOutcome.CONFIRMED
    assert before == [{LANE}, {LANE}]


async def test_list_that_was_deleted_is_created_again(broker_rig: BrokerRig):
    broker = await broker_rig.connect()
    await topology.declare(broker)
    await broker.delete_queue(topology.WORK_QUEUES)
    async with rewriting(broker) as contents:
        assert (contents.queues, contents.complete) == (set(), False)
    assert await WorkQueues(broker, SOURCE).publish(LANE, message("a")) is PublishOutcome.CONFIRMED
    assert await listed(broker) == {LANE}


async def test_list_is_one_message_after_it_was_rewritten(broker_rig: BrokerRig):
    broker = await broker_rig.connect()
    await topology.declare(broker)
    for queue in ("lane.a", "lane.b", "lane.a"):
        await list_queue(broker, queue)
    async with rewriting(broker) as contents:
        contents.complete = True
        contents.queues.discard("lane.b")
        await list_queue(broker, "lane.c")

    async def has_two() -> bool:
        depth = await broker.depth(topology.WORK_QUEUES)
        return depth is not None and depth.ready == 2

    await eventually(has_two)
    async with rewriting(broker) as contents:
        assert (contents.queues, contents.complete) == ({"lane.a", "lane.c"}, True)


async def test_list_is_complete_only_with_each_message(broker_rig: BrokerRig):
    """A leader that has lost its connection may still hold messages of the list."""
    broker, other = await broker_rig.connect(), await broker_rig.connect()
    await topology.declare(broker)
    async with rewriting(broker) as contents:
        contents.queues, contents.complete = {"lane.a"}, True
    async with rewriting(other) as held:
        assert held.complete
        await list_queue(broker, "lane.b")
        async with rewriting(broker) as contents:
            assert (contents.queues, contents.complete) == ({"lane.b"}, False)
    assert await listed(broker) == {"lane.a", "lane.b"}


async def test_rewriting_that_fails_changes_nothing(broker_rig: BrokerRig):
    broker, far = await broker_rig.connect(), await broker_rig.connect()
    await topology.declare(broker)
    await list_queue(broker, "lane.a")

    async def fail() -> None:
        async with rewriting(broker) as contents:
            contents.queues.clear()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await fail()
    assert await listed(far) == {"lane.a"}


async def test_names_return_to_the_list_if_the_connection_is_lost_while_it_is_rewritten(
    broker_rig: BrokerRig,
):
    broker, far = await broker_rig.connect(), await broker_rig.connect()
    await topology.declare(broker)
    await list_queue(broker, "lane.a")
    async with rewriting(broker) as contents:
        contents.queues = {"lane.b"}
        await broker_rig.drop(broker)

    async def has_both() -> bool:
        return await listed(far) == {"lane.a", "lane.b"}

    await eventually(has_both)


async def test_illegible_message_makes_the_list_incomplete(broker_rig: BrokerRig):
    broker = await broker_rig.connect()
    await topology.declare(broker)
    async with rewriting(broker) as contents:
        contents.queues, contents.complete = {"lane.a"}, True
    await broker.publish(topology.LANES, topology.WORK_QUEUES, OutMessage(body=b"{}"))
    async with rewriting(broker) as contents:
        assert (contents.queues, contents.complete) == ({"lane.a"}, False)


async def test_idle_queue_is_retired_and_created_again(broker_rig: BrokerRig):
    leader, queues, far = await served(broker_rig)
    assert await listed(far) == {LANE}
    await leader.hear(queues, pulled=1, after_s=IDLE_S)
    queues.release((LANE,))
    await leader.hear(queues, pulled=1, after_s=retirement.SETTLE_S)

    assert not await exists(far)
    assert leader.counts.queues == set()
    assert leader.counts.num_removed == 1
    assert await listed(far) == set()

    assert await queues.publish(LANE, message("b")) is PublishOutcome.CONFIRMED
    assert (await taken(far)).message_id == "b"
    assert await listed(far) == {LANE}


async def test_queue_is_kept_until_every_process_releases_it(broker_rig: BrokerRig):
    leader, queues, far = await served(broker_rig)
    for number in range(20):
        # A process that has just started, or one of an earlier version, releases nothing.
        leader.retirement.reported("another", (), leader.now + 1)
        await leader.hear(queues, pulled=1, after_s=IDLE_S if number == 0 else 1.0)
        queues.release((LANE,))
    assert await exists(far)


async def test_queue_with_an_unsettled_request_stays(broker_rig: BrokerRig):
    """A queue that is deleted drops unsettled requests, which are lost if their agent dies."""
    leader, queues, far = await served(broker_rig)
    agent = await broker_rig.connect()
    await queues.publish(LANE, message("held"))
    held = await taken(agent)
    await leader.hear(queues, pulled=2)
    await leader.hear(queues, pulled=2, after_s=IDLE_S)
    queues.release((LANE,))
    await leader.hear(queues, pulled=2, after_s=retirement.SETTLE_S)
    assert await exists(far)
    assert leader.counts.queues == {LANE}

    await held.settle(Settlement.ACK)
    await eventually(lambda: is_empty(far))
    await leader.hear(queues, pulled=2, after_s=IDLE_S + 1)
    queues.release((LANE,))
    await leader.hear(queues, pulled=2, after_s=retirement.SETTLE_S)
    assert not await exists(far)


async def test_request_for_a_queue_under_retirement_waits_for_its_end(
    broker_rig: BrokerRig, monkeypatch: pytest.MonkeyPatch
):
    """The request is not lost with the queue, and waits for at most one round of the leader."""
    leader, queues, far = await served(broker_rig)
    await leader.hear(queues, pulled=1, after_s=IDLE_S)
    queues.release((LANE,))
    depth = leader.broker.depth
    late: list[asyncio.Task[PublishOutcome]] = []

    async def counted(queue: str) -> QueueDepth | None:
        found = await depth(queue)
        if queue == LANE and not late:
            late.append(asyncio.create_task(queues.publish(LANE, message("late"))))
            await asyncio.sleep(0.2)
        return found

    monkeypatch.setattr(leader.broker, "depth", counted)
    await leader.hear(queues, pulled=1, after_s=retirement.SETTLE_S)
    assert await late[0] is PublishOutcome.CONFIRMED
    assert (await taken(far)).message_id == "late"


async def test_notice_during_a_retirement_keeps_the_queue(broker_rig: BrokerRig):
    leader, queues, far = await served(broker_rig)
    await leader.hear(queues, pulled=1, after_s=IDLE_S)
    queues.release((LANE,))
    publish = asyncio.create_task(queues.publish(LANE, message("late")))
    await asyncio.sleep(0.1)
    leader.counts.noticed(LANE, leader.now + 0.5)  # the notice that the waiting process publishes
    await leader.hear(queues, pulled=1)
    assert await publish is PublishOutcome.CONFIRMED
    assert (await taken(far)).message_id == "late"


async def test_retirement_lock_ends_with_the_leaders_connection(broker_rig: BrokerRig):
    leader, queues, far = await served(broker_rig)
    await leader.hear(queues, pulled=1, after_s=IDLE_S)
    queues.release((LANE,))
    publish = asyncio.create_task(queues.publish(LANE, message("late")))
    await asyncio.sleep(0.1)
    assert not publish.done()
    await leader.broker.close()
    assert await publish is PublishOutcome.CONFIRMED
    assert (await taken(far)).message_id == "late"


async def test_grouper_in_the_leaders_process_cannot_publish_to_a_queue_being_deleted(
    broker_rig: BrokerRig,
):
    """Grouper and leader use one connection, so the broker's lock does not separate them."""
    broker = await broker_rig.connect()
    await topology.declare(broker)
    leader = Leader(broker)
    queues = leader.retirement.queues
    await queues.publish(LANE, message("a"))
    await (await taken(broker)).settle(Settlement.ACK)
    await eventually(lambda: is_empty(broker))
    await leader.count_served(queues)
    await leader.hear(queues, pulled=1, after_s=IDLE_S)

    publish = asyncio.create_task(queues.publish(LANE, message("late")))
    await asyncio.sleep(0.1)
    assert not publish.done()
    assert queues.released == ()
    await leader.hear(queues, pulled=1, after_s=retirement.PATIENCE_S)
    assert await publish is PublishOutcome.CONFIRMED
    assert (await taken(broker)).message_id == "late"


async def test_end_of_a_retirement_is_published(broker_rig: BrokerRig):
    leader, queues, far = await served(broker_rig)
    heard = topology.temporary_queue("heard")
    await far.declare_queue(heard)
    await far.bind(
        BindingSpec(
            exchange=topology.CONTROL, queue=heard.name, routing_key=topology.CONTROL_RETIREMENT
        )
    )
    await leader.hear(queues, pulled=1, after_s=IDLE_S)
    queues.release((LANE,))
    await leader.hear(queues, pulled=1, after_s=retirement.SETTLE_S)
    bodies: list[bytes] = []

    async def both() -> bool:
        if (delivery := await far.get(heard.name)) is not None:
            bodies.append(delivery.body)
        return len(bodies) == 2

    await eventually(both)
    assert decode_retiring(bodies[0]).queues == (LANE,)
    assert Decoder(QueuesRetired)(bodies[1]).deleted == (LANE,)
