"""A new broker has a complete list of work queues; other brokers get one from the leader."""

from shared.broker import topology
from shared.broker.declaring import EARLIER_QUEUE, declare_topology
from shared.broker.protocol import QueueSpec
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
