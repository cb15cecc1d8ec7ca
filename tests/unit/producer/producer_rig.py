"""A producer and a broker; the test acts as the mesh."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import msgspec

from ops.generate.replies import REQUEST
from ops.sim.virtual_time import LoopClock
from shared.broker import topology
from shared.broker.memory.broker import MemoryBroker
from shared.broker.memory.hub import MemoryHub
from shared.broker.protocol import BindingSpec, Broker, Delivery, OutMessage, Settlement
from shared.contracts.base import encode
from shared.contracts.control import Control
from shared.contracts.ingress import InferenceRequest
from shared.producer.producer import Producer
from shared.runtime.clock import Clock
from tests.brokers import eventually

BODY = InferenceRequest(model="m", prompt="hello", id=REQUEST)


@dataclass
class Rig:
    """A producer, and the mesh's side of the broker."""

    hub: MemoryHub
    far: Broker
    producer: Producer

    async def reply(self, *messages: msgspec.Struct) -> None:
        for message in messages:
            await self.far.publish(
                topology.REPLIES, self.producer.reply_queue, OutMessage(body=encode(message))
            )

    async def requested(self, queue: str = topology.GLOBAL_REST) -> Delivery:
        delivery = await self.far.get(queue)
        assert delivery is not None
        await delivery.settle(Settlement.ACK)
        return delivery

    async def controlled(self) -> Control:
        """The next control message to all instances, or to the instance of run `b`."""
        found: list[Delivery] = []

        async def arrived() -> bool:
            if delivery := await self.far.get("control"):
                found.append(delivery)
            return bool(found)

        await eventually(arrived)
        return msgspec.json.decode(found[0].body, type=Control)


@asynccontextmanager
async def rig(
    *, user_id: str | None = None, silence_s: float = 10.0, clock: Clock | None = None
) -> AsyncIterator[Rig]:
    hub = MemoryHub()
    async with MemoryBroker(hub) as far, MemoryBroker(hub) as near:
        await topology.declare(far)
        await far.declare_queue(topology.private_queue("control"))
        for key in topology.control_keys("instance-of-b"):
            await far.bind(BindingSpec(exchange=topology.CONTROL, queue="control", routing_key=key))
        async with Producer(
            near,
            name="test",
            clock=clock or LoopClock(),
            user_id=user_id,
            give_up_after_s=0.1,
            silence_s=silence_s,
        ) as producer:
            yield Rig(hub, far, producer)
