"""What was routed to an instance that died is served by others; nothing is deleted too soon."""

from collections.abc import AsyncIterator

import pytest

from services.planner.inboxes import GRACE_S, InboxClaims
from shared.broker import topology
from shared.broker.memory import MemoryBroker
from shared.broker.memory_hub import MemoryHub
from shared.broker.protocol import BindingSpec, OutMessage, PublishOutcome
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


async def test_requests_go_ahead_of_their_lanes_and_no_more_are_routed(broker: MemoryBroker):
    request = a_request("r")
    await route(broker, request)
    notices = topology.passing_queue("notices")
    await broker.declare_queue(notices)
    await broker.bind(
        BindingSpec(
            exchange=topology.CONTROL, queue=notices.name, routing_key=topology.CONTROL_LANE
        )
    )
    claims = InboxClaims(broker)
    claims.add("dead", NOW)
    await claims.work(NOW)
    notice = await broker.get(notices.name)
    back = await broker.get(LaneKey.parse(request.lane).resume_name)

    assert back is not None
    assert notice is not None
    assert decode_notice(notice.body) == LaneNonempty(queue=back.queue)
    assert (decode(back.body).request_id, decode(back.body).attempts.hop) == ("r", 1)
    assert await route(broker, request) is PublishOutcome.UNROUTABLE


async def test_the_inbox_goes_when_a_frozen_owner_must_have_lost_its_connection(
    broker: MemoryBroker, hub: MemoryHub
):
    request = a_request("r")
    await route(broker, request)
    claims = InboxClaims(broker)
    async with MemoryBroker(hub) as frozen:
        assert await frozen.get(INBOX) is not None
        claims.add("dead", NOW)
        await claims.work(NOW + GRACE_S - 1)
        assert await broker.depth(INBOX) is not None
    await claims.work(NOW + GRACE_S)

    assert await broker.depth(INBOX) is None
    assert await broker.get(LaneKey.parse(request.lane).resume_name) is not None


async def test_what_cannot_be_read_is_buried(broker: MemoryBroker):
    await broker.publish(topology.LANES, INBOX, OutMessage(body=b"?"))
    claims = InboxClaims(broker)
    claims.add("dead", NOW)
    await claims.work(NOW)

    depth = await broker.depth(topology.DEAD_LETTERS)
    assert depth is not None
    assert depth.ready == 1


async def test_an_instance_that_returned_keeps_its_inbox(broker: MemoryBroker):
    claims = InboxClaims(broker)
    claims.add("dead", NOW)
    claims.returned("dead")
    await claims.work(NOW + GRACE_S)
    assert await broker.depth(INBOX) is not None
