"""Records reach the keeper over every broker, and it answers questions about them."""

import pytest

from shared.broker import topology
from shared.broker.protocol import BindingSpec, Broker, OutMessage, Settlement
from shared.broker.stories import MOST_AT_ONCE, StoryOutbox
from shared.contracts.base import Decoder, InstanceId, RequestId, TenantId
from shared.contracts.stories.questions import StoriesReported
from shared.contracts.stories.story import PulledRequest, StoriesObserved, Story
from shared.runtime.clock import SystemClock
from tests.brokers import BrokerRig, eventually
from tests.contract.stories.keepers import ACME, asked, keeping

decode_stories: Decoder[StoriesObserved] = Decoder(StoriesObserved)


def ended(request_id: str, tenant: TenantId = ACME) -> Story:
    return Story(request_id=RequestId(request_id), tenant=tenant, finished_at=SystemClock().now())


async def kept(broker: Broker, number: int) -> StoriesReported:
    """The answer that has *number* records of the tenant."""
    found: StoriesReported | None = None

    async def are_kept() -> bool:
        nonlocal found
        found = await asked(broker)
        return found is not None and len(found.stories) == number

    await eventually(are_kept)
    assert found is not None
    return found


async def test_records_of_several_senders_are_kept_and_are_private(broker_rig: BrokerRig) -> None:
    broker, other = await broker_rig.connect("agent"), await broker_rig.connect("estimator")
    await topology.declare(broker)
    async with keeping(other):
        agent, grouper = StoryOutbox(broker, "a1"), StoryOutbox(broker, "grouper")
        agent.ended(ended("r1"))
        agent.ended(ended("r2", TenantId("other")))
        grouper.ended(ended("r3"))
        await agent.send()
        await grouper.send()
        found = await kept(broker, 2)

    assert {each.request_id for each in found.stories} == {"r1", "r3"}


async def test_many_records_are_sent_in_groups(broker_rig: BrokerRig) -> None:
    """The last group has the rest."""
    broker = await broker_rig.connect("agent")
    await topology.declare(broker)
    copy = topology.temporary_queue("test")
    await broker.declare_queue(copy)
    await broker.bind(
        BindingSpec(exchange=topology.TELEMETRY, queue=copy.name, routing_key=topology.STORIES_KEY)
    )
    async with keeping(broker):
        outbox = StoryOutbox(broker, "a1")
        for number in range(MOST_AT_ONCE + 3):
            outbox.ended(ended(f"r{number}"))
        await outbox.send()
        await kept(broker, MOST_AT_ONCE + 3)
    sizes = []
    while (delivery := await broker.get(copy.name)) is not None:
        sizes.append(len(decode_stories(delivery.body).ended))
        await delivery.settle(Settlement.ACK)

    assert sizes == [MOST_AT_ONCE, 3]


async def test_a_request_without_an_end_is_held_by_its_instance(broker_rig: BrokerRig) -> None:
    broker = await broker_rig.connect("agent")
    await topology.declare(broker)
    async with keeping(broker):
        outbox = StoryOutbox(broker, "a1")
        outbox.pulled(PulledRequest(tenant=ACME, request_id=RequestId("r"), at=1.5))
        outbox.ended(ended("other"))
        await outbox.send()
        await kept(broker, 1)
        found = await asked(broker, "r")

    assert found is not None
    assert [(each.instance_id, each.at) for each in found.held] == [(InstanceId("a1"), 1.5)]


@pytest.mark.parametrize("body", [b"{", b'{"kind": "other"}'])
async def test_an_unreadable_record_is_dropped(broker_rig: BrokerRig, body: bytes) -> None:
    broker = await broker_rig.connect("agent")
    await topology.declare(broker)
    async with keeping(broker):
        message = OutMessage(body=body)
        await broker.publish(topology.TELEMETRY, topology.STORIES_KEY, message)
        outbox = StoryOutbox(broker, "a1")
        outbox.ended(ended("r1"))
        await outbox.send()
        await kept(broker, 1)
