"""RabbitMQ 4 refuses messages above 16 MiB; the refusal affects no other message."""

import asyncio
from collections.abc import Callable, Iterator

import pytest

from shared.broker import topology
from shared.broker.amqp.broker import AmqpBroker
from shared.broker.protocol import OutMessage, PublishOutcome, Settlement
from shared.contracts.errors import MessageTooLargeError
from tests.brokers import FOUR, RabbitServer

pytestmark = pytest.mark.rabbitmq

LIMIT = 16 << 20
LANE = "lane.sizes"


@pytest.fixture
def url(rabbit_servers: Callable[[str], RabbitServer]) -> Iterator[str]:
    with rabbit_servers(FOUR).fresh_url() as fresh:
        yield fresh


async def test_only_the_message_above_the_limit_is_refused(url: str):
    async with AmqpBroker(url, client_name="sizes", timeout_s=30.0) as broker:
        await topology.declare(broker)
        await topology.declare_work_queue(broker, LANE)
        losses: list[None] = []
        broker.on_connection_lost(lambda: losses.append(None))
        small = [OutMessage(body=b"x" * 1000, message_id=f"m{n}") for n in range(200)]
        large = OutMessage(body=bytes(LIMIT + 1), message_id="large")
        *outcomes, refused = await asyncio.gather(
            *(broker.publish(topology.LANES, LANE, each) for each in small),
            broker.publish(topology.LANES, LANE, large),
            return_exceptions=True,
        )
        depth = await broker.depth(LANE)

    assert set(outcomes) == {PublishOutcome.CONFIRMED}
    assert isinstance(refused, MessageTooLargeError)
    assert str(LIMIT) in str(refused)
    assert (refused.code, refused.status) == ("message_too_large", 413)
    assert depth is not None
    assert depth.ready == len(small)  # none was published twice
    assert losses == []


async def test_message_at_the_limit_arrives(url: str):
    async with AmqpBroker(url, client_name="sizes", timeout_s=30.0) as broker:
        await topology.declare(broker)
        await topology.declare_work_queue(broker, LANE)
        body = bytes(LIMIT)
        await broker.publish(topology.LANES, LANE, OutMessage(body=body))
        delivery = await broker.get(LANE)
        assert delivery is not None
        assert len(delivery.body) == LIMIT
        await delivery.settle(Settlement.ACK)


async def test_tokens_above_the_limit_raise_and_stop_no_other_tokens(url: str):
    async with AmqpBroker(url, client_name="sizes", timeout_s=30.0) as broker:
        await topology.declare(broker)
        queue, binding = topology.reply_queue("reply.sizes")
        await broker.declare_queue(queue)
        await broker.bind(binding)
        before, after = (OutMessage(body=word, message_id=None) for word in (b"a", b"b"))
        await broker.send(topology.REPLIES, queue.name, before)
        with pytest.raises(MessageTooLargeError):
            await broker.send(topology.REPLIES, queue.name, OutMessage(body=bytes(LIMIT + 1)))
        await broker.send(topology.REPLIES, queue.name, after)
        bodies = []
        while len(bodies) < 2:
            if (delivery := await broker.get(queue.name)) is not None:
                bodies.append(delivery.body)
                await delivery.settle(Settlement.ACK)
    assert bodies == [b"a", b"b"]
