"""Lanes are retired and used again while processes are killed; no request is lost or stuck."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from itertools import count
from pathlib import Path

import pytest

from ops.broker import PrivateNode
from services.mesh.processes import ProcessMesh
from shared.broker import topology
from shared.broker.protocol import BindingSpec, Broker, Delivery, Settlement
from shared.contracts.base import Decoder, tag_of
from shared.contracts.control import QueuesRetired, QueuesRetiring
from shared.contracts.requests import RequestCompleted
from tests.brokers import eventually
from tests.e2e.meshes import (
    SLOW_ENGINE,
    ask_all,
    kill,
    leader_of,
    mesh_spec,
    only_left,
    producer_of,
    request,
)

pytestmark = [pytest.mark.rabbitmq, pytest.mark.slow]

ROUNDS = 6
NUM_REQUESTS = 30
IDLE_S = 4.0


class Retirements:
    """Notices of the leader, as they arrive."""

    def __init__(self) -> None:
        self.begun = 0
        self.deleted: list[str] = []

    async def on_delivery(self, delivery: Delivery) -> None:
        if delivery.kind == tag_of(QueuesRetiring):
            self.begun += 1
        else:
            self.deleted += Decoder(QueuesRetired)(delivery.body).deleted
        await delivery.settle(Settlement.ACK)


@asynccontextmanager
async def observed(broker: Broker) -> AsyncIterator[Retirements]:
    retirements = Retirements()
    queue = topology.temporary_queue("retirements")
    await broker.declare_queue(queue)
    await broker.bind(
        BindingSpec(
            exchange=topology.CONTROL, queue=queue.name, routing_key=topology.CONTROL_RETIREMENT
        )
    )
    subscription = await broker.consume(queue.name, retirements.on_delivery, prefetch=8)
    yield retirements
    await subscription.cancel()


async def test_requests_published_while_their_lanes_retire_are_served(
    node: PrivateNode,
    tmp_path: Path,
) -> None:
    """Each round begins when the leader begins to retire the lanes of the round before."""
    spec = mesh_spec(
        node.url,
        tmp_path,
        agents=2,
        groupers=2,
        leaders=2,
        planner={"leader": {"retire_idle_s": IDLE_S, "audit_period_s": 1.0}},
        agent_settings={"engine": {"simulated": SLOW_ENGINE}},
    )
    numbers: Iterator[int] = count()
    async with (
        ProcessMesh(spec) as mesh,
        mesh.open_broker("headway-retirements") as broker,
        observed(broker) as retirements,
        producer_of(mesh, "rounds") as producer,
    ):
        victims = {1: "agent-a0", 2: "grouper-0", 3: await leader_of(mesh)}
        for number in range(ROUNDS):
            requests = [request(next(numbers), max_tokens=20) for _ in range(NUM_REQUESTS)]
            serving = asyncio.create_task(ask_all(producer, requests, spacing_s=0.03))
            await asyncio.sleep(0.5)
            if number in victims:
                await kill(mesh, victims[number])
                assert not serving.done()
                await mesh.processes[victims[number]].start()
            assert [type(each.final) for each in await serving] == [RequestCompleted] * NUM_REQUESTS
            await eventually(more_than(retirements, retirements.begun))
        await eventually(lambda: len(set(retirements.deleted)) >= 3)
        await only_left(broker, mesh, {})


def more_than(retirements: Retirements, begun: int) -> Callable[[], bool]:
    return lambda: retirements.begun > begun
