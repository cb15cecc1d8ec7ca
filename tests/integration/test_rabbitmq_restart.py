"""RabbitMQ restarts, dies and runs out of memory while clients are connected."""

import asyncio
import resource
from collections.abc import AsyncIterator

import pytest

from ops.broker import MAX_FILES, PrivateNode
from shared.broker.amqp.broker import AmqpBroker
from shared.broker.protocol import (
    Delivery,
    OutMessage,
    PublishOutcome,
    QueueSpec,
    QueueType,
    Settlement,
)
from shared.broker.retry import publish_until_confirmed
from shared.contracts.errors import BrokerUnavailableError
from tests.brokers import eventually, memory_alarm
from tests.integration.rabbit_steps import PRIVATE, WORK, declare, take

pytestmark = pytest.mark.rabbitmq


@pytest.mark.slow
class TestBrokerRestart:
    @pytest.fixture
    async def clients(
        self, private_node: PrivateNode
    ) -> AsyncIterator[tuple[AmqpBroker, AmqpBroker]]:
        private_node.start()
        async with (
            AmqpBroker(private_node.url, client_name="one", reconnect_s=0.2) as one,
            AmqpBroker(private_node.url, client_name="two", reconnect_s=0.2) as two,
        ):
            yield one, two
        private_node.start()

    @pytest.mark.parametrize("how", ["stop", "kill"])
    async def test_all_objects_are_restored_and_no_confirmed_message_is_lost(
        self, private_node: PrivateNode, clients: tuple[AmqpBroker, AmqpBroker], how: str
    ):
        broker, other = clients
        await broker.delete_queue("work")
        await declare(broker, WORK, PRIVATE)
        received: list[bytes] = []

        async def handler(delivery: Delivery) -> None:
            received.append(delivery.body)
            await delivery.settle(Settlement.ACK)

        await broker.consume("private", handler, prefetch=5)
        for body in (b"a", b"b", b"c"):
            await broker.publish("x", "work", OutMessage(body=body))
        held = await take(broker, "work")
        # RabbitMQ 3.10 writes the list of its quorum queues some seconds late. A queue declared
        # just before a kill never answers again.
        await asyncio.to_thread(private_node.ctl, "eval", "[dets:sync(T) || T <- dets:all()].")
        await asyncio.to_thread(getattr(private_node, how))
        await eventually(lambda: not broker.connected)
        settled = await held.settle(Settlement.ACK)
        await asyncio.to_thread(private_node.start)
        await eventually(lambda: broker.connected and other.connected, within_s=60)
        after = OutMessage(body=b"after")

        assert settled is False
        assert (
            await publish_until_confirmed(other, "x", "private", after) is PublishOutcome.CONFIRMED
        )
        await eventually(lambda: received == [b"after"])
        again = {each.body: each for each in [await take(broker, "work") for _ in range(3)]}
        # Order is not asserted: the queue may serve before it notices its dead reader.
        assert set(again) == {b"a", b"b", b"c"}
        assert again[b"a"].redelivered


@pytest.mark.slow
def test_a_private_node_can_open_files_for_many_queues(private_node: PrivateNode):
    private_node.start()
    beam = int(private_node.ctl("eval", "list_to_integer(os:getpid())."))
    soft, hard = resource.prlimit(beam, resource.RLIMIT_NOFILE)
    assert soft == min(hard, MAX_FILES) or hard == resource.RLIM_INFINITY


async def test_a_memory_alarm_blocks_publishing_only(
    private_node: PrivateNode, monkeypatch: pytest.MonkeyPatch
):
    """A broker with a memory alarm stops reading from publishers; no call may wait forever."""
    private_node.start()
    async with AmqpBroker(private_node.url, client_name="alarm", timeout_s=30.0) as broker:
        await declare(broker, QueueSpec(name="alarm", type=QueueType.CLASSIC))
        await broker.purge("alarm")
        await broker.publish("x", "alarm", OutMessage(body=b"before"))
        async with memory_alarm(private_node):
            with monkeypatch.context() as hurried:
                # White box: short timeout, since the publish is never confirmed.
                hurried.setattr(broker._publishing, "timeout_s", 1.0)
                with pytest.raises(BrokerUnavailableError):
                    await broker.publish("x", "alarm", OutMessage(body=b"during", message_id="d"))
            delivery = await take(broker, "alarm")
            settled = await delivery.settle(Settlement.ACK)
        after = OutMessage(body=b"during", message_id="d")

        assert (delivery.body, settled) == (b"before", True)
        assert (
            await publish_until_confirmed(broker, "x", "alarm", after) is PublishOutcome.CONFIRMED
        )
        assert (await take(broker, "alarm")).message_id == "d"
