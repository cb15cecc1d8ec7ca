"""Nodes of the broker's cluster are killed, under load and before a service starts."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from ops.bench.lost_nodes import lost_nodes
from ops.broker import PrivateCluster
from services.agent.cancels import Cancels
from shared.broker import topology
from shared.broker.amqp.broker import AmqpBroker
from shared.broker.declaring import declare_topology, keep_topology
from shared.broker.protocol import Broker, Delivery, OutMessage, PublishOutcome, Settlement
from shared.broker.retry import publish_until_confirmed
from shared.contracts.base import Decoder, RequestId
from shared.contracts.control import CancelsMarked, RequestCancel
from shared.contracts.errors import BrokerUnavailableError
from tests.brokers import FOUR, release_of

pytestmark = [pytest.mark.slow, pytest.mark.rabbitmq]
decode: Decoder[CancelsMarked | RequestCancel] = Decoder(CancelsMarked | RequestCancel)


async def test_the_loss_of_the_node_that_all_clients_use_loses_and_doubles_no_answer() -> None:
    release_of("rabbitmq")
    result = await lost_nodes(num_requests=240, kills=(0,), seed=0)

    assert {line.name: line.value for line in result.lines if not line.holds} == {}


@pytest.fixture(params=["rabbitmq", FOUR])
def cluster(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[PrivateCluster]:
    """Three nodes, of which the test kills the first."""
    cluster = PrivateCluster(tmp_path, release=release_of(request.param))
    cluster.start()
    yield cluster
    cluster.close()


async def test_a_service_starts_while_the_node_of_classic_queues_is_down(cluster: PrivateCluster):
    first, second, _ = cluster.nodes
    async with AmqpBroker(first.url, client_name="first") as broker:
        await declare_topology(broker)
        await cancel(broker, "before")
    await asyncio.to_thread(first.kill)
    async with AmqpBroker(cluster.url, client_name="later") as broker:
        await declare_topology(broker)
        await keep_topology(broker)
        # RabbitMQ 3 reports the reason, which RabbitMQ 4 does not for a minute.
        with pytest.raises(BrokerUnavailableError, match=r"headway\.estimator"):
            await broker.depth(topology.ESTIMATOR)
        await cancel(broker, "after")
        read = await cancels_of(broker)
    async with AmqpBroker(second.url, client_name="second") as broker:
        again = await cancels_of(broker)

    assert read == again == ["before", "after"]


async def cancel(broker: Broker, request_id: str) -> None:
    message = OutMessage.transient(RequestCancel(request_id=RequestId(request_id)))
    # RabbitMQ 3 closes the connection of a message to a stream that has no leader at the moment.
    outcome = await publish_until_confirmed(
        broker, topology.CONTROL, topology.CONTROL_CANCEL, message, give_up_after_s=30.0
    )
    assert outcome is PublishOutcome.CONFIRMED


async def cancels_of(broker: Broker) -> list[str]:
    """Ids of the kept cancellations, as an agent reads them at its start."""
    found: list[str] = []
    cancels = Cancels(broker)

    async def on_delivery(delivery: Delivery) -> None:
        message = decode(delivery.body)
        if isinstance(message, CancelsMarked):
            cancels.on_mark(message.mark)
        else:
            found.append(message.request_id)
        await delivery.settle(Settlement.ACK)

    await cancels.start(on_delivery)
    await cancels.close()
    return found
