"""The mesh's objects on a broker: made at the start, and again when they are lost."""

import pytest

from shared.broker import topology
from shared.broker.declaring import EARLIER_QUEUE, declare_topology, keep_topology
from shared.broker.protocol import OutMessage, PublishOutcome, QueueSpec
from shared.broker.queue_list import list_queue, rewriting
from tests.brokers import BrokerRig


async def test_list_of_a_new_broker_is_complete(broker_rig: BrokerRig):
    broker, other = await broker_rig.connect(), await broker_rig.connect()
    await declare_topology(broker)
    await list_queue(broker, "lane.a")
    await declare_topology(other)
    async with rewriting(other) as listed:
        assert (listed.queues, listed.complete) == ({"lane.a"}, True)


async def test_list_is_incomplete_after_an_upgrade(broker_rig: BrokerRig):
    broker = await broker_rig.connect()
    await broker.declare_queue(QueueSpec(name=EARLIER_QUEUE))
    await declare_topology(broker)
    async with rewriting(broker) as listed:
        assert not listed.complete


async def test_list_is_incomplete_after_a_purge(broker_rig: BrokerRig):
    broker = await broker_rig.connect()
    await declare_topology(broker)
    await broker.purge(topology.WORK_QUEUES)
    await declare_topology(broker)
    async with rewriting(broker) as listed:
        assert not listed.complete


@pytest.mark.parametrize("queue", [queue.name for queue in topology.QUEUES])
async def test_a_queue_that_was_deleted_is_made_again(broker_rig: BrokerRig, queue: str):
    broker = await broker_rig.connect()
    await declare_topology(broker)
    await broker.delete_queue(queue)
    await keep_topology(broker)
    assert await broker.depth(queue) is not None
    for binding in topology.BINDINGS:
        if binding.queue == queue and "*" not in binding.routing_key:
            key = binding.routing_key.replace("#", "x")
            message = OutMessage(body=b"{}", kind="k")
            outcome = await broker.publish(binding.exchange, key, message)
            assert outcome is PublishOutcome.CONFIRMED, binding


async def test_a_broker_that_lost_all_gets_all_again(broker_rig: BrokerRig):
    broker = await broker_rig.connect()
    await declare_topology(broker)
    for queue in topology.QUEUES:
        await broker.delete_queue(queue.name)
    await keep_topology(broker)
    assert all([await broker.depth(queue.name) is not None for queue in topology.QUEUES])
    async with rewriting(broker) as listed:
        assert listed.complete


async def test_a_lost_list_alone_is_not_complete(broker_rig: BrokerRig):
    broker = await broker_rig.connect()
    await declare_topology(broker)
    await broker.delete_queue(topology.WORK_QUEUES)
    await keep_topology(broker)
    async with rewriting(broker) as listed:
        assert not listed.complete
