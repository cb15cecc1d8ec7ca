"""
Components of an agent over the in-process broker; the test acts as engine, leader and producer.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from services.agent.state import Pulled, Run
from shared.broker import topology
from shared.broker.memory.hub import MemoryHub
from shared.broker.protocol import BindingSpec, OutMessage, QueueSpec, QueueType, Settlement
from shared.contracts.base import Decoder, Message, ModelName, encode
from shared.contracts.control import Control
from shared.contracts.requests import QueuedRequest, Reply, RequestCompleted, RequestFailed
from shared.contracts.telemetry import RequestObserved
from shared.models.registry import ModelRegistry
from shared.models.tokenizer import Tokenizer
from solver.scheduling.pulling import Source, SourceKind
from tests.clocks import NOW
from tests.deliveries import LooseDelivery, UnreliableBroker
from tests.unit.agent.parts import AgentParts

REPLY = "replies-of-the-test"
decode_queued: Decoder[QueuedRequest] = Decoder(QueuedRequest)
decode_reply: Decoder[Reply] = Decoder(Reply)
decode_control: Decoder[Control] = Decoder(Control)
decode_observed: Decoder[RequestObserved] = Decoder(RequestObserved)


class AgentRig(AgentParts):
    """
    One agent; its loops run only when the test starts them.

    Args:
        hub: Server of the in-process broker.
        far: The test's client of the broker.
        parts: Arguments of `AgentParts`.
    """

    def __init__(self, *, hub: MemoryHub, far: UnreliableBroker, **parts: Any) -> None:
        super().__init__(**parts)
        self.hub, self.far = hub, far

    async def put(self, request: QueuedRequest, queue: str | None = None) -> str:
        """Publish a request to its lane or to *queue*; return the queue's name."""
        name = queue or request.lane
        await topology.declare_work_queue(self.far, name)
        message = OutMessage(
            body=encode(request),
            kind="request.queued.v1",
            message_id=request.request_id,
            reply_to=request.reply_to,
        )
        await self.far.publish(topology.LANES, name, message)
        return name

    async def pulled(self, request: QueuedRequest, queue: str | None = None) -> Pulled:
        """A request that the agent holds as if it had just pulled it."""
        delivery = await self.broker.get(await self.put(request, queue))
        assert delivery is not None
        return Pulled(request=request, deliveries=[delivery], pulled_at=self.clock.now())

    async def running(self, request: QueuedRequest) -> tuple[Run, asyncio.Task[None]]:
        """
        Start *request* on the scripted engine; return its run, and the task that executes the run.
        """
        run = self.runner.begin(await self.pulled(request))
        task = asyncio.create_task(self.runner.run(run), name=f"run:{request.request_id}")
        await self.engine.began(request.request_id)
        return run, task

    async def hold(self, request: QueuedRequest) -> None:
        """Put *request* into the window."""
        self.state.hold(await self.pulled(request))

    def sources(self, *queues: str, kind: SourceKind = SourceKind.LANE) -> None:
        """Set the puller's sources to *queues*."""
        self.state.order.set_sources(
            [Source(queue=queue, kind=kind, time_left_s=1.0) for queue in queues], NOW
        )

    async def deliver(self, message: Message) -> LooseDelivery:
        """Pass a control message to the handlers."""
        delivery = LooseDelivery(body=encode(message))
        await self.handler.handle(delivery)
        return delivery

    async def replies(self) -> list[Reply]:
        """All messages on the reply queue."""
        found = []
        while (delivery := await self.far.get(REPLY)) is not None:
            await delivery.settle(Settlement.ACK)
            found.append(decode_reply(delivery.body))
        return found

    async def completed(self) -> RequestCompleted:
        """The reply queue's last message, an answer."""
        final = (await self.replies())[-1]
        assert isinstance(final, RequestCompleted), final
        return final

    async def failed(self) -> RequestFailed:
        """The reply queue's last message, an error."""
        final = (await self.replies())[-1]
        assert isinstance(final, RequestFailed), final
        return final

    async def requeued(self, queue: str) -> QueuedRequest:
        return decode_queued((await self.far.take(queue)).body)

    async def back_in_lane(self, lane: str) -> int:
        """
        Drop the agent's connection; return its unsettled messages, which are again in *lane*.
        """
        await self.broker.close()
        return await self.far.ready(lane)


@asynccontextmanager
async def open_agent(
    registry: ModelRegistry, tokenizers: dict[ModelName, Tokenizer], **fields: Any
) -> AsyncIterator[AgentRig]:
    hub = MemoryHub()
    async with UnreliableBroker(hub) as broker, UnreliableBroker(hub) as far:
        await topology.declare(broker)
        spec, binding = topology.reply_queue(REPLY)
        await far.declare_queue(spec)
        await far.bind(binding)
        yield AgentRig(
            hub=hub, broker=broker, far=far, registry=registry, tokenizers=tokenizers, **fields
        )


async def listen(rig: AgentRig, exchange: str, routing_key: str) -> str:
    """A queue that receives all future messages of *exchange*."""
    name = f"listen.{exchange}"
    await rig.far.declare_queue(QueueSpec(name=name, type=QueueType.CLASSIC))
    await rig.far.bind(BindingSpec(exchange=exchange, queue=name, routing_key=routing_key))
    return name
