"""Listening to soft state: messages are decoded in order, other kinds skipped, queues removed."""

import asyncio

import pytest

from shared.broker import topology
from shared.broker.listening import listening
from shared.broker.memory.broker import MemoryBroker
from shared.broker.memory.hub import MemoryHub
from shared.broker.protocol import OutMessage
from shared.contracts.base import Decoder, encode
from shared.contracts.control import LaneNonempty
from shared.contracts.errors import QueueNotFoundError

DECODE: Decoder[LaneNonempty] = Decoder(LaneNonempty)


async def test_messages_of_the_kind_arrive_in_order_and_others_are_skipped():
    hub, queue = MemoryHub(), topology.temporary_queue("test")
    heard: asyncio.Queue[LaneNonempty] = asyncio.Queue()
    first, second = LaneNonempty(queue="lane.a"), LaneNonempty(queue="lane.b")
    async with MemoryBroker(hub) as far, MemoryBroker(hub) as near:
        await topology.declare(near)
        bindings = [(topology.TELEMETRY, "a"), (topology.CONTROL, "b")]
        async with listening(near, queue, DECODE, bindings, heard.put_nowait):
            for exchange, key, body in (
                (topology.TELEMETRY, "a", encode(first)),
                (topology.TELEMETRY, "a", b'{"kind":"newer.v9"}'),
                (topology.TELEMETRY, "a", b"not JSON"),
                (topology.TELEMETRY, "unbound", encode(first)),
                (topology.CONTROL, "b", encode(second)),
            ):
                await far.publish(exchange, key, OutMessage(body=body))

            assert [await heard.get(), await heard.get()] == [first, second]
        assert heard.empty()


async def test_no_message_arrives_after_the_block():
    """A listener that begins later hears the message, so that the first could have heard it."""
    hub, queues = MemoryHub(), [topology.temporary_queue("test") for _ in range(2)]
    bindings = [(topology.TELEMETRY, "a")]
    heard: list[LaneNonempty] = []
    later: asyncio.Queue[LaneNonempty] = asyncio.Queue()
    message = LaneNonempty(queue="lane.a")
    async with MemoryBroker(hub) as far, MemoryBroker(hub) as near:
        await topology.declare(near)
        async with listening(near, queues[0], DECODE, bindings, heard.append):
            pass
        async with listening(near, queues[1], DECODE, bindings, later.put_nowait):
            await far.publish(topology.TELEMETRY, "a", OutMessage(body=encode(message)))

            assert await later.get() == message

    assert heard == []


async def test_the_queue_is_deleted_at_the_end():
    hub, queue = MemoryHub(), topology.temporary_queue("test")
    async with MemoryBroker(hub) as near:
        await topology.declare(near)
        async with listening(near, queue, DECODE, [(topology.TELEMETRY, "a")], lambda _: None):
            assert await near.depth(queue.name) is not None

        assert await near.depth(queue.name) is None


async def test_the_queue_is_deleted_if_it_cannot_be_bound():
    hub, queue = MemoryHub(), topology.temporary_queue("test")
    async with MemoryBroker(hub) as near:
        with pytest.raises(QueueNotFoundError):
            async with listening(near, queue, DECODE, [("no-exchange", "a")], lambda _: None):
                pass

        assert await near.depth(queue.name) is None
