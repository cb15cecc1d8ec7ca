"""An agent's parts over the in-process broker; the test plays engine, leader and producer."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from services.agent.admission import Admission
from services.agent.backends.base import EngineBackend
from services.agent.endings import Endings
from services.agent.handlers import HANDLERS, Context
from services.agent.outbox import Outbox
from services.agent.puller import Puller
from services.agent.reporting import Reporter
from services.agent.residency import ModelResidency
from services.agent.runner import Runner
from services.agent.settings import PullSettings
from services.agent.state import AgentState, Pulled, Run
from shared.broker import topology
from shared.broker.consumer import Dispatcher
from shared.broker.memory_hub import MemoryHub
from shared.broker.protocol import BindingSpec, OutMessage, QueueSpec, QueueType, Settlement
from shared.contracts.base import Decoder, InstanceId, Message, ModelName, encode
from shared.contracts.control import Control
from shared.contracts.lanes import LaneLayout
from shared.contracts.plans import LaneQuota, PlanPublished, Segment, VirtualQueue
from shared.contracts.requests import (
    QueuedRequest,
    Reply,
    RequestCompleted,
    RequestFailed,
    TokensEmitted,
)
from shared.contracts.telemetry import RequestObserved
from shared.models.registry import ModelRegistry
from shared.models.tokenizer import Tokenizer
from solver.scheduling.pulling import PullOrder, Source, SourceKind
from solver.scheduling.window import Window
from tests.clocks import NOW, FakeClock
from tests.deliveries import LooseDelivery, UnreliableBroker
from tests.queued import MODEL, OTHER
from tests.unit.agent.scripted_engine import ScriptedEngine

REPLY = "replies-of-the-test"
EVICT_HOLD_S = 2.0
PATIENCE_S = 10.0
decode_queued: Decoder[QueuedRequest] = Decoder(QueuedRequest)
decode_reply: Decoder[Reply] = Decoder(Reply)
decode_control: Decoder[Control] = Decoder(Control)
decode_observed: Decoder[RequestObserved] = Decoder(RequestObserved)


class AgentRig:
    """
    One agent; its loops run only when the test starts them.

    Args:
        hub: The broker's server.
        broker: The agent's client.
        far: The test's client.
        registry: Models that it may serve.
        tokenizers: Of these.
        engine: Scripted unless the test brings another.
        pull: Settings that matter to the test.
    """

    def __init__(
        self,
        *,
        hub: MemoryHub,
        broker: UnreliableBroker,
        far: UnreliableBroker,
        registry: ModelRegistry,
        tokenizers: dict[ModelName, Tokenizer],
        engine: EngineBackend | None = None,
        pull: PullSettings | None = None,
    ) -> None:
        self.hub, self.broker, self.far = hub, broker, far
        self.tokenizers = tokenizers
        self.engine = ScriptedEngine()
        backend: EngineBackend = engine or self.engine
        self.clock = clock = FakeClock()
        self.pull = pull or PullSettings()
        self.state = AgentState(
            instance_id=InstanceId("i1"),
            window=Window(aging_bound_s=self.pull.aging_bound_s),
            order=PullOrder(poll_s=self.pull.poll_s),
            model=MODEL,
        )
        self.outbox = Outbox(broker, self.state.instance_id)
        self.reporter = Reporter(state=self.state, engine=backend, broker=broker, clock=clock)
        self.endings = Endings(
            state=self.state,
            outbox=self.outbox,
            clock=clock,
            engine="scripted",
            device="paper",
            observe=self.reporter.observed,
            evict_hold_s=EVICT_HOLD_S,
        )
        self.runner = Runner(
            state=self.state,
            engine=backend,
            outbox=self.outbox,
            endings=self.endings,
            tokenizers=tokenizers,
            entries={name: registry.entry(name) for name in registry.bases},
            clock=clock,
        )
        self.admission = Admission(
            state=self.state, engine=backend, runner=self.runner, settings=self.pull, clock=clock
        )
        self.puller = Puller(
            state=self.state,
            broker=broker,
            engine=backend,
            endings=self.endings,
            outbox=self.outbox,
            settings=self.pull,
            clock=clock,
        )
        self.residency = ModelResidency(
            state=self.state,
            engine=backend,
            endings=self.endings,
            reporter=self.reporter,
            layout=LaneLayout(),
            servable=(MODEL, OTHER),
            swap_drain_s=0.0,
            orphan_patience_s=PATIENCE_S,
            clock=clock,
        )
        self.stop = asyncio.Event()
        self.handler = Dispatcher(
            HANDLERS,
            Context(
                state=self.state,
                engine=backend,
                residency=self.residency,
                endings=self.endings,
                reporter=self.reporter,
                stop=self.stop,
            ),
        )

    async def put(self, request: QueuedRequest, queue: str | None = None) -> str:
        """Let a request wait in its lane, or in *queue*; which."""
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
        """A request in the agent's hands, as if just pulled."""
        delivery = await self.broker.get(await self.put(request, queue))
        assert delivery is not None
        return Pulled(request=request, deliveries=[delivery], pulled_at=self.clock.now())

    async def running(self, request: QueuedRequest) -> tuple[Run, asyncio.Task[None]]:
        """A request on the scripted engine."""
        run = self.runner.begin(await self.pulled(request))
        task = asyncio.create_task(self.runner.run(run), name=f"run:{request.request_id}")
        await self.engine.began(request.request_id)
        return run, task

    async def hold(self, request: QueuedRequest) -> None:
        """A request in the window."""
        self.state.hold(await self.pulled(request))

    def sources(self, *queues: str, kind: SourceKind = SourceKind.LANE) -> None:
        """Make *queues* what the puller pulls from."""
        self.state.order.set_sources(
            [Source(queue=queue, kind=kind, time_left_s=1.0) for queue in queues], NOW
        )

    async def tell(self, message: Message) -> LooseDelivery:
        """Give a control message to the handlers."""
        delivery = LooseDelivery(body=encode(message))
        await self.handler.handle(delivery)
        return delivery

    async def replies(self) -> list[Reply]:
        """Everything on the reply queue."""
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
        """Messages of *lane* once the agent's connection is gone: what it had not settled."""
        await self.broker.close()
        return await self.far.ready(lane)


def a_plan(*models: ModelName, epoch: int = 1, lanes: tuple[str, ...] = ()) -> PlanPublished:
    """One segment per model, each with *lanes*."""
    quotas = tuple(LaneQuota(lane=lane, quota=1) for lane in lanes)
    segments = tuple(Segment(model=model, lanes=quotas) for model in models)
    return PlanPublished(
        epoch=epoch,
        issued_at=NOW,
        leader_id="leader",
        queue=VirtualQueue(instance_id=InstanceId("i1"), segments=segments),
        policy="test",
    )


def streamed_tokens(replies: list[Reply]) -> tuple[int, ...]:
    """Tokens of all batches, in order of arrival."""
    return tuple(
        token
        for reply in replies
        if isinstance(reply, TokensEmitted)
        for chunk in reply.chunks
        for token in chunk.token_ids
    )


def streamed_text(replies: list[Reply]) -> str:
    return "".join(
        chunk.text
        for reply in replies
        if isinstance(reply, TokensEmitted)
        for chunk in reply.chunks
    )


def tokens_of(rig: AgentRig, text: str) -> tuple[int, ...]:
    """Tokens whose text is *text*, without what the tokenizer adds around a prompt."""
    tokens = rig.tokenizers[MODEL].encode(text)
    return tuple(token for token in tokens if token >= 8)


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
    """A queue that gets what is published to *exchange* from now on."""
    name = f"listen.{exchange}"
    await rig.far.declare_queue(QueueSpec(name=name, type=QueueType.CLASSIC))
    await rig.far.bind(BindingSpec(exchange=exchange, queue=name, routing_key=routing_key))
    return name
