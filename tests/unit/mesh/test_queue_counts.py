"""Which lanes `headway queues` counts."""

from collections.abc import AsyncIterator

import pytest

from services.mesh.queues import count_queues, in_force
from shared.broker import topology
from shared.broker.memory_hub import MemoryHub
from shared.broker.protocol import BindingSpec, Delivery, OutMessage, Settlement
from shared.contracts.base import Decoder, ModelName, encode
from shared.contracts.lanes import LaneLayout
from shared.contracts.plans import PlanAsked, PlanExplained
from tests.deliveries import UnreliableBroker

LANE = "lane.1.m.high.3.long-2"


@pytest.fixture
async def broker() -> AsyncIterator[UnreliableBroker]:
    async with UnreliableBroker(MemoryHub()) as opened:
        await topology.declare(opened)
        yield opened


async def answer(broker: UnreliableBroker, work_version: int) -> None:
    """A leader that knows learnt edges."""
    decode: Decoder[PlanAsked] = Decoder(PlanAsked)

    async def on_asked(delivery: Delivery) -> None:
        plan = PlanExplained(
            epoch=1, at=0.0, leader_id="l", policy="qlm", work_version=work_version
        )
        message = OutMessage(body=encode(plan))
        await broker.publish(topology.REPLIES, decode(delivery.body).reply_to, message)
        await delivery.settle(Settlement.ACK)

    queue = topology.private_queue("leader.l")
    await broker.declare_queue(queue)
    binding = BindingSpec(
        exchange=topology.CONTROL, queue=queue.name, routing_key=topology.CONTROL_PLAN
    )
    await broker.bind(binding)
    await broker.consume(queue.name, on_asked, prefetch=1)


async def test_without_a_leader_the_layout_is_the_operators(broker: UnreliableBroker):
    assert await in_force(broker, LaneLayout(version=4)) == LaneLayout(version=4)


async def test_lanes_of_learnt_edges_are_counted(broker: UnreliableBroker):
    await topology.declare_work_queue(broker, LANE)
    await broker.publish(topology.LANES, LANE, OutMessage(body=b"x"))
    await answer(broker, work_version=3)
    layout = await in_force(broker, LaneLayout())
    counts = await count_queues(broker, (ModelName("m"),), layout)

    assert {each.queue: each.ready for each in counts if each.queue.startswith("lane")} == {LANE: 1}
