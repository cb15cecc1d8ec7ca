"""An agent over the in-process broker; the test acts as engine, leader and producer."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any, cast

import msgspec
from prometheus_client import CollectorRegistry

from ops.sim.virtual_time import LoopClock
from services.agent.backends.base import EngineBackend
from services.agent.servable import ServableModels
from services.agent.service import Agent
from services.agent.settings import Settings
from shared.broker import topology
from shared.broker.memory.hub import MemoryHub
from shared.broker.protocol import (
    BindingSpec,
    HeaderValue,
    OutMessage,
    QueueDepth,
    QueueSpec,
    QueueType,
    Settlement,
)
from shared.broker.rpc import ask
from shared.broker.work_queues import WorkQueues
from shared.contracts.base import Decoder, InstanceId, Message, RequestId, encode, tag_of
from shared.contracts.control import (
    Control,
    EvictRequest,
    LsoAnswered,
    LsoCommand,
    SnapshotRequested,
)
from shared.contracts.plans import PlanPublished
from shared.contracts.requests import (
    Final,
    FinishReason,
    QueuedRequest,
    Reply,
    RequestCompleted,
    RequestFailed,
    Tokens,
)
from shared.contracts.telemetry import InstanceStatus, RequestObserved
from shared.models.registry import ModelRegistry
from shared.runtime.cli import Ports
from shared.runtime.clock import Clock
from shared.runtime.health import Health
from shared.tracing.spans import Tracer
from solver.instance.instance import Instance
from tests.agents.scripted_engine import ScriptedEngine
from tests.brokers import eventually
from tests.deliveries import UnreliableBroker
from tests.queued import MODEL, OTHER, lane_of

REPLY = "replies-of-the-test"
LANE, RESUME = lane_of().queue_name, lane_of().resume_name
NO_HEADERS: Mapping[str, HeaderValue] = MappingProxyType({})
I1, R = InstanceId("i1"), RequestId("r")
decode_queued: Decoder[QueuedRequest] = Decoder(QueuedRequest)
decode_reply: Decoder[Reply] = Decoder(Reply)
decode_control: Decoder[Control] = Decoder(Control)
decode_answered: Decoder[LsoAnswered] = Decoder(LsoAnswered)
decode_observed: Decoder[RequestObserved] = Decoder(RequestObserved)
decode_status: Decoder[InstanceStatus] = Decoder(InstanceStatus)


class AgentRig:
    """
    A running agent.

    Args:
        agent: The agent.
        engine: Its engine.
        health: Its health.
        broker: The agent's client of the broker.
        far: The test's client of the broker.
        models: Models that the agent serves.
        stop: Ends the agent.
        work: The task in which the agent runs.
    """

    def __init__(
        self,
        *,
        agent: Agent,
        engine: ScriptedEngine,
        health: Health,
        broker: UnreliableBroker,
        far: UnreliableBroker,
        models: ServableModels,
        clock: Clock,
        stop: asyncio.Event,
        work: asyncio.Task[None],
    ) -> None:
        self.agent, self.engine, self.health = agent, engine, health
        self.broker, self.far = broker, far
        self.models, self.clock, self.stop, self.work = models, clock, stop, work
        self._queues = WorkQueues(far, "test")

    @property
    def instance(self) -> Instance:
        """The agent's instance, to be read only."""
        return self.agent.instance

    @property
    def metrics(self) -> CollectorRegistry:
        return self.health.metrics

    async def put(
        self,
        request: QueuedRequest,
        queue: str | None = None,
        *,
        headers: Mapping[str, HeaderValue] = NO_HEADERS,
    ) -> str:
        """Publish a request to its lane or to *queue*, with a notice; return the queue's name."""
        name = queue or request.lane
        message = OutMessage(
            body=encode(request),
            kind="request.queued.v1",
            message_id=request.request_id,
            reply_to=request.reply_to,
            headers=headers,
        )
        await self._queues.publish(name, message)
        return name

    async def running(self, request: QueuedRequest) -> None:
        """Publish *request*, and wait until the engine runs it."""
        await self.put(request)
        await self.engine.began(request.request_id)

    async def waiting(self, request: QueuedRequest) -> None:
        """Publish *request*, and wait until it is in the window; the engine must be full."""
        await self.put(request)
        await eventually(lambda: request.request_id in self.instance.requests.window)

    async def evicted(self, request_id: str, queue: str = RESUME) -> QueuedRequest:
        """Order the eviction of a run, and take the request from its resume queue."""
        await self.deliver(EvictRequest(instance_id=I1, request_id=RequestId(request_id)))
        return await self.requeued(queue)

    async def ordered(self, order: LsoCommand) -> LsoAnswered:
        """Publish an operator's order; return the answer."""

        def addressed(reply_to: str) -> Message:
            return msgspec.structs.replace(order, reply_to=reply_to)

        key = topology.command_instance(I1)
        answer = await ask(self.far, key, addressed, decode_answered, timeout_s=60.0)
        assert isinstance(answer, LsoAnswered)
        return answer

    async def deliver(
        self, message: Message, key: str | None = None, *, user_id: str | None = None
    ) -> None:
        """Publish a message of the leader, a gateway or an operator."""
        ours = self.instance.settings.instance_id
        exchange, to = topology.CONTROL, key or topology.command_instance(ours)
        if isinstance(message, PlanPublished):
            binding = topology.plan_queue(ours, "any")[1]
            exchange, to = binding.exchange, binding.routing_key
        out = OutMessage(
            body=encode(message), kind=tag_of(type(message)), persistent=False, user_id=user_id
        )
        await self.far.publish(exchange, to, out)
        await self.settled()

    async def settled(self) -> None:
        """Let the agent process what has arrived, for some milliseconds."""
        for _ in range(5):
            await asyncio.sleep(0.001)

    async def replies(self) -> list[Reply]:
        """All messages on the reply queue."""
        found = []
        while (delivery := await self.far.get(REPLY)) is not None:
            await delivery.settle(Settlement.ACK)
            found.append(decode_reply(delivery.body))
        return found

    async def final(self, within_s: float = 60.0) -> tuple[list[Reply], Reply]:
        """Wait for a final reply; return all replies, and the final one."""
        found: list[Reply] = []
        finals: list[Reply] = []

        async def has_final() -> bool:
            found.extend(await self.replies())
            finals.extend(each for each in found if isinstance(each, Final))
            return bool(finals)

        await eventually(has_final, within_s=within_s)
        return found, finals[0]

    async def answered(
        self, request: QueuedRequest, *outputs: Tokens, finish: FinishReason = FinishReason.LENGTH
    ) -> tuple[list[Reply], RequestCompleted]:
        """Run *request* with *outputs*, and end it; return all replies and the final one."""
        await self.running(request)
        for tokens in outputs:
            self.engine.emit(request.request_id, *tokens)
        self.engine.emit(request.request_id, finish=finish)
        replies, final = await self.final()
        assert isinstance(final, RequestCompleted), final
        return replies, final

    async def completed(self) -> RequestCompleted:
        """The next final reply, an answer."""
        _, final = await self.final()
        assert isinstance(final, RequestCompleted), final
        return final

    async def failed(self) -> RequestFailed:
        """The next final reply, an error."""
        _, final = await self.final()
        assert isinstance(final, RequestFailed), final
        return final

    async def requeued(self, queue: str) -> QueuedRequest:
        """Wait for a request in *queue*, and take it."""
        await eventually(lambda: self.has_ready(queue))
        return decode_queued((await self.far.take(queue)).body)

    async def has_ready(self, queue: str, at_least: int = 1) -> bool:
        return await self.far.ready(queue) >= at_least

    async def holds(self, queue: str) -> bool:
        """Return whether the agent has not settled messages of a work queue."""
        depth = await self.far.depth(queue)
        return depth is not None and depth.consumers > 0

    async def is_empty(self, queue: str) -> bool:
        """Return whether a work queue has neither ready nor unsettled messages."""
        await self.settled()
        return await self.far.depth(queue) in (None, QueueDepth(ready=0, consumers=0))

    async def status(self) -> InstanceStatus:
        """The present status, as the leader receives it."""
        queue = await listen(self, topology.TELEMETRY, topology.STATUS_KEYS)
        await self.far.purge(queue)
        await self.deliver(SnapshotRequested())
        return decode_status((await self.far.take(queue)).body)


@asynccontextmanager
async def open_agent(
    registry: ModelRegistry,
    registry_path: Path,
    *,
    engine: EngineBackend | None = None,
    clock: Clock | None = None,
    tracer: Tracer | None = None,
    **settings: Any,
) -> AsyncIterator[AgentRig]:
    """
    An agent that serves `MODEL`, until the block ends.

    Args:
        engine: Engine of the agent; by default a scripted engine.
        settings: Settings of the agent that override the defaults.
    """
    hub = MemoryHub()
    defaults: dict[str, Any] = {
        "instance_id": "i1",
        "models": (MODEL, OTHER),
        "initial_model": MODEL,
        "drain_timeout_s": 0.0,
        "registry": str(registry_path),
    }
    backend = engine or ScriptedEngine()
    async with UnreliableBroker(hub) as broker, UnreliableBroker(hub) as far:
        await topology.declare(broker)
        spec, binding = topology.reply_queue(REPLY)
        await far.declare_queue(spec)
        await far.bind(binding)
        health, stop, clock = Health(service="agent"), asyncio.Event(), clock or LoopClock()
        ports = Ports(
            settings=Settings(**(defaults | settings)),
            open_broker=lambda _name: broker,
            clock=clock,
            health=health,
            tracer=tracer,
        )
        models = ServableModels(registry.entry(name) for name in (MODEL, OTHER))
        agent = Agent(ports, broker, backend, models, registry)
        async with AsyncExitStack() as stack:
            work = asyncio.create_task(agent.run(stop, stack))
            await eventually(lambda: "start" not in health.reasons or work.done())
            try:
                yield AgentRig(
                    agent=agent,
                    engine=cast("ScriptedEngine", backend),
                    health=health,
                    broker=broker,
                    far=far,
                    models=models,
                    clock=clock,
                    stop=stop,
                    work=work,
                )
            finally:
                broker.down.clear()
                stop.set()
                await asyncio.wait_for(work, 60)


async def listen(rig: AgentRig, exchange: str, routing_key: str) -> str:
    """A queue that receives all future messages of *exchange* with *routing_key*."""
    name = f"listen.{exchange}.{routing_key}"
    await rig.far.declare_queue(QueueSpec(name=name, type=QueueType.CLASSIC))
    await rig.far.bind(BindingSpec(exchange=exchange, queue=name, routing_key=routing_key))
    return name


def counted(rig: AgentRig, name: str, **labels: str) -> float | None:
    """Value of one of the agent's metric series."""
    return rig.metrics.get_sample_value(f"headway_agent_{name}", labels)
