"""Queues that `headway queues` counts."""

from collections.abc import AsyncIterator
from typing import Any

import pytest

from services.mesh import queues
from services.mesh.queues import ask_leader, count_queues, meaning_of
from shared.broker import topology
from shared.broker.memory.hub import MemoryHub
from shared.broker.protocol import BindingSpec, Delivery, OutMessage, Settlement
from shared.contracts.base import Decoder, ModelName, encode
from shared.contracts.lanes import LaneLayout, inbox_name
from shared.contracts.plans import PlanExplained, PlanRequested
from tests.deliveries import UnreliableBroker

LANE = "lane.1.m.high.3.long-2"


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Raise the time limit of a leader's answer, for busy machines."""
    monkeypatch.setattr(queues, "LEADER_TIMEOUT_S", 60.0)


@pytest.fixture
async def broker() -> AsyncIterator[UnreliableBroker]:
    async with UnreliableBroker(MemoryHub()) as opened:
        await topology.declare(opened)
        yield opened


async def answer(broker: UnreliableBroker, **reported: Any) -> None:
    """Run a leader that answers with the given counts."""
    decode: Decoder[PlanRequested] = Decoder(PlanRequested)

    async def on_asked(delivery: Delivery) -> None:
        plan = PlanExplained(epoch=1, at=0.0, leader_id="l", policy="qlm", **reported)
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


async def counted(
    broker: UnreliableBroker,
    layout: LaneLayout,
    models: tuple[ModelName, ...] | None = (ModelName("m"),),
) -> dict[str, int]:
    """Counted numbers of ready messages in lanes and inboxes."""
    counts = await count_queues(broker, models, layout, await ask_leader(broker))
    return {each.queue: each.ready for each in counts if not each.queue.startswith("headway.")}


async def waiting_in(broker: UnreliableBroker, *names: str) -> None:
    for name in names:
        await topology.declare_work_queue(broker, name)
        await broker.publish(topology.LANES, name, OutMessage(body=b"x"))


async def test_without_a_leader_the_configured_layout_is_counted(broker: UnreliableBroker):
    await waiting_in(broker, "lane.4.m.high.3.w9", "lane.2.m.high.3.w9", LANE, inbox_name("a1"))

    assert await ask_leader(broker) is None
    assert await counted(broker, LaneLayout(version=4)) == {"lane.4.m.high.3.w9": 1, LANE: 1}


@pytest.mark.usefixtures("patient")
async def test_only_existing_queues_are_counted_if_a_leader_names_them(broker: UnreliableBroker):
    await waiting_in(broker, LANE)
    await answer(broker, work_queues=(LANE, "lane.2.other.high.3.w0"))
    broker.counted.clear()

    assert await counted(broker, LaneLayout()) == {LANE: 1}
    assert [name for name in broker.counted if not name.startswith("headway.")] == [LANE]


@pytest.mark.parametrize(
    ("queue", "meaning"),
    [
        ("lane.2.m.high.0.w0", "importance high, due in under 0.5 s, up to 400 tokens"),
        ("lane.2.m.low.3.w1", "importance low, due in 3.12 to 7.81 s, 400 to 600 tokens"),
        ("lane.2.m.low.11.w9", "importance low, due after 4.77e+03 s, over 10252 tokens"),
        (
            "overflow.2.m.high.12.w0",
            "importance high, no deadline, up to 400 tokens, of tenants above their share",
        ),
        ("lane.1.m.high.3.short", "importance high, of layout 1"),
        ("resume.2.m.3", "interrupted requests, due in 3.12 to 7.81 s"),
        ("relegated.m", "requests whose SLO cannot be met"),
        ("headway.leader", ""),
    ],
)
def test_contents_of_a_queue_are_described(queue: str, meaning: str):
    assert meaning_of(queue, LaneLayout()) == meaning


@pytest.mark.usefixtures("patient")
async def test_inboxes_of_the_leaders_instances_are_counted(broker: UnreliableBroker):
    await waiting_in(broker, inbox_name("a1"), inbox_name("a1"), inbox_name("stranger"))
    await answer(broker, instances=("a1", "without-inbox"))

    assert await counted(broker, LaneLayout()) == {"inbox.a1": 2}


@pytest.mark.usefixtures("patient")
async def test_without_a_registry_the_lanes_that_the_leader_names_are_counted(
    broker: UnreliableBroker,
):
    other = "lane.2.other.high.3.w0"
    await waiting_in(broker, LANE, other)
    await answer(broker, work_queues=(LANE, other))
    without_answer = await count_queues(broker, None, LaneLayout())

    assert await counted(broker, LaneLayout(), None) == {LANE: 1, other: 1}
    assert {each.queue for each in without_answer} <= {spec.name for spec in topology.QUEUES}
