"""Other instances serve requests routed to a dead instance; no inbox is deleted too early."""

from collections.abc import AsyncIterator

import pytest

from services.planner.leader.orphaned_inboxes import GRACE_S, InboxClaims
from shared.broker import topology
from shared.broker.memory.broker import MemoryBroker
from shared.broker.memory.hub import MemoryHub
from shared.broker.protocol import BindingSpec, OutMessage, PublishOutcome, Settlement
from shared.broker.work_queues import WorkQueues
from shared.contracts.base import Decoder, encode
from shared.contracts.control import LaneNonempty
from shared.contracts.lanes import LaneKey, inbox_name
from shared.contracts.requests import QueuedRequest
from tests.clocks import NOW
from tests.queued import a_request

INBOX = inbox_name("dead")
decode: Decoder[QueuedRequest] = Decoder(QueuedRequest)
decode_notice: Decoder[LaneNonempty] = Decoder(LaneNonempty)


@pytest.fixture
def hub() -> MemoryHub:
    return MemoryHub()


@pytest.fixture
async def broker(hub: MemoryHub) -> AsyncIterator[MemoryBroker]:
    async with MemoryBroker(hub) as broker:
        await topology.declare(broker)
        await topology.declare_work_queue(broker, INBOX)
        yield broker


async def route(broker: MemoryBroker, request: QueuedRequest) -> PublishOutcome:
    message = OutMessage(body=encode(request), kind="request.queued.v1")
    return await broker.publish(topology.LANES, INBOX, message)


def claims_of(broker: MemoryBroker) -> InboxClaims:
    """Claims of a leader that retires no queue."""

    async def keep(_queue: str) -> None: ...

    return InboxClaims(broker, WorkQueues(broker, "leader"), keep)


async def test_requests_return_to_their_lanes_and_no_more_are_routed(broker: MemoryBroker):
    request = a_request("r")
    await route(broker, request)
    notices = topology.temporary_queue("notices")
    await broker.declare_queue(notices)
    await broker.bind(
        BindingSpec(
            exchange=topology.CONTROL, queue=notices.name, routing_key=topology.CONTROL_LANE
        )
    )
    claims = claims_of(broker)
    claims.add("dead", NOW)
    await claims.work(NOW)
    notice = await broker.get(notices.name)
    back = await broker.get(LaneKey.parse(request.lane).resume_name)

    assert back is not None
    assert notice is not None
    assert decode_notice(notice.body) == LaneNonempty(queue=back.queue, source="leader", put=1)
    assert (decode(back.body).request_id, decode(back.body).attempts.hop) == ("r", 1)
    assert await route(broker, request) is PublishOutcome.UNROUTABLE


async def test_inbox_is_deleted_after_a_stalled_owner_lost_its_connection(
    broker: MemoryBroker, hub: MemoryHub
):
    request = a_request("r")
    await route(broker, request)
    claims = claims_of(broker)
    async with MemoryBroker(hub) as frozen:
        assert await frozen.get(INBOX) is not None
        claims.add("dead", NOW)
        await claims.work(NOW + GRACE_S - 1)
        assert await broker.depth(INBOX) is not None
    await claims.work(NOW + GRACE_S)

    assert await broker.depth(INBOX) is None
    assert await broker.get(LaneKey.parse(request.lane).resume_name) is not None


async def test_undecodable_message_is_dead_lettered(broker: MemoryBroker):
    await broker.publish(topology.LANES, INBOX, OutMessage(body=b"?"))
    claims = claims_of(broker)
    claims.add("dead", NOW)
    await claims.work(NOW)

    depth = await broker.depth(topology.DEAD_LETTERS)
    assert depth is not None
    assert depth.ready == 1


async def test_report_from_before_the_deletion_is_ignored(broker: MemoryBroker):
    claims = claims_of(broker)
    claims.used("dead", NOW, NOW)
    assert claims.lost == ("dead",)
    await claims.work(NOW + GRACE_S)
    claims.used("dead", NOW + GRACE_S, NOW + GRACE_S + 1)
    assert not claims.lost
    claims.used("dead", NOW + GRACE_S + 1, NOW + GRACE_S + 2)
    assert claims.lost == ("dead",)


async def test_absent_inbox_is_looked_for_once(broker: MemoryBroker):
    claims = claims_of(broker)
    claims.used("unknown", NOW, NOW)
    await claims.work(NOW)
    claims.used("unknown", NOW, NOW + 1)
    assert not claims.lost


async def test_inbox_of_an_instance_that_returned_under_another_leader_is_emptied(
    broker: MemoryBroker,
):
    """It has left again; the list of work queues names its new inbox."""
    request, later = a_request("r"), NOW + GRACE_S + 1
    claims = claims_of(broker)
    claims.add("dead", NOW)
    await claims.work(NOW + GRACE_S)
    assert await broker.depth(INBOX) is None

    await topology.declare_work_queue(broker, INBOX)
    await route(broker, request)
    claims.restart_grace(later)
    claims.listed("dead", later)
    assert claims.lost == ("dead",)
    await claims.work(later)
    assert await broker.get(LaneKey.parse(request.lane).resume_name) is not None


async def test_returned_instance_keeps_its_inbox(broker: MemoryBroker):
    claims = claims_of(broker)
    claims.add("dead", NOW)
    claims.returned("dead")
    await claims.work(NOW + GRACE_S)
    assert await broker.depth(INBOX) is not None


async def test_inbox_is_kept_while_its_owner_holds_requests(broker: MemoryBroker, hub: MemoryHub):
    """The owner lives, and only its statuses do not arrive."""
    await route(broker, a_request("r"))
    claims = claims_of(broker)
    async with MemoryBroker(hub) as silent:
        held = await silent.get(INBOX)
        assert held is not None
        claims.add("dead", NOW)
        await claims.work(NOW + GRACE_S)
        assert await broker.depth(INBOX) is not None
        await held.settle(Settlement.ACK)
        await claims.work(NOW + GRACE_S + 1)

    assert await broker.depth(INBOX) is None
