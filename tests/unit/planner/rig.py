"""A grouper over the in-process broker, and producers that publish requests."""

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

import msgspec
from cachetools import FIFOCache

from services.planner.grouper.dead_letter_replies import DeadLetterReplies
from services.planner.grouper.expiry import Expiry
from services.planner.grouper.grouper import Grouper
from services.planner.grouper.intake import Intake
from services.planner.grouper.lane_reports import LaneReports
from services.planner.grouper.placement import Placement
from services.planner.grouper.stored.claims import Claims
from services.planner.grouper.watched_ends import WatchedEnds
from services.planner.routed.routing import PULL, Routing
from services.planner.settings import GrouperSettings
from services.planner.state import GrouperState
from shared.broker import topology
from shared.broker.memory.hub import MemoryHub
from shared.broker.protocol import (
    BindingSpec,
    Delivery,
    HeaderValue,
    OutMessage,
    QueueSpec,
    QueueType,
)
from shared.broker.work_queues import WorkQueues
from shared.contracts.base import Decoder, InstanceId, ModelName, RequestId, TenantId, encode
from shared.contracts.lanes import LaneLayout
from shared.contracts.qos import QosClass
from shared.contracts.requests import QueuedRequest, RequestFailed
from shared.contracts.telemetry import RequestObserved, source_name
from shared.models.registry import ModelRegistry
from shared.tenants.policies import Policies
from solver.prediction.lengths.prompt_lengths import PromptLengths
from solver.routing.shares import TenantShares
from tests.clocks import NOW, FakeClock
from tests.contract.tenants.gates import gate_of
from tests.deliveries import UnreliableBroker
from tests.queued import MODEL

LANE = "lane.2.tiny-llama.high.12.w0"
"""Lane of `BODY`, a best-effort request."""
BODY: dict[str, Any] = {"model": MODEL, "prompt": [10, 11, 12], "max_tokens": 8}
REPLIES_TO = "replies-of-the-test"
SENDER = "grouper-of-the-test"
NO_HEADERS: Mapping[str, HeaderValue] = {}
OBSERVED = RequestObserved(
    request_id=RequestId("r"),
    instance_id=InstanceId("a1"),
    model=ModelName(MODEL),
    engine="simulated",
    device="cpu",
    application="default",
    tenant=TenantId("t"),
    qos_class=QosClass.INTERACTIVE,
    prompt_tokens=3,
    output_tokens=2,
    arrived_at=NOW,
    pulled_at=NOW,
    submitted_at=NOW,
    first_token_at=NOW,
    finished_at=NOW,
    attained=True,
)
"""Observation of a request that completed."""

decode_queued: Decoder[QueuedRequest] = Decoder(QueuedRequest)
decode_failed: Decoder[RequestFailed] = Decoder(RequestFailed)


def intake_of(
    registry: ModelRegistry,
    settings: GrouperSettings | None = None,
    layout: LaneLayout | None = None,
) -> Intake:
    return Intake(
        registry=registry,
        settings=settings or GrouperSettings(),
        layout=layout or LaneLayout(),
        lengths=PromptLengths(),
    )


@dataclass
class GrouperRig:
    """One grouper, and the test's client of its broker."""

    hub: MemoryHub
    broker: UnreliableBroker
    """The grouper's client."""
    far: UnreliableBroker
    """The test's client."""
    grouper: Grouper
    clock: FakeClock

    async def publish(
        self,
        body: dict[str, Any] | bytes,
        *,
        message_id: str | None = None,
        reply_to: str | None = REPLIES_TO,
        kind: str = "inference.request.v1",
        user_id: str | None = None,
        expiration_s: float | None = None,
        headers: Mapping[str, HeaderValue] = NO_HEADERS,
    ) -> None:
        """Publish to the global queue as a producer does."""
        raw = body if isinstance(body, bytes) else msgspec.json.encode(body)
        message = OutMessage(
            body=raw,
            kind=kind,
            message_id=message_id or uuid4().hex,
            reply_to=reply_to,
            user_id=user_id,
            expiration_s=expiration_s,
            headers=headers,
        )
        await self.far.publish(topology.REQUESTS, topology.REST_KEY, message)

    async def pull(self, queue: str = topology.GLOBAL_REST) -> Delivery:
        """The next message of a global queue, as a delivery to the grouper."""
        delivery = await self.broker.get(queue)
        assert delivery is not None
        return delivery

    async def submit(self, body: dict[str, Any] | bytes, **fields: Any) -> None:
        """Publish a request and let the grouper handle it."""
        await self.publish(body, **fields)
        await self.grouper.on_request(await self.pull())

    async def handle_dead_letter(self) -> None:
        """Handle the next dead letter."""
        dead_letter_replies = DeadLetterReplies(
            broker=self.broker,
            clock=self.clock,
            state=self.grouper.state,
            expiry=self.grouper.expiry,
        )
        await dead_letter_replies.on_dead_letter(await self.pull(topology.DEAD_LETTER_REPLIES))

    async def queued(self, lane: str = LANE) -> QueuedRequest:
        return decode_queued((await self.far.take(lane)).body)

    async def failure(self, queue: str = REPLIES_TO) -> RequestFailed:
        return decode_failed((await self.far.take(queue)).body)

    async def unsettled(self) -> int:
        """Global messages that are redelivered after the grouper's connection is lost."""
        await self.broker.close()
        return await self.far.ready(topology.GLOBAL_REST)


@asynccontextmanager
async def open_grouper(
    registry: ModelRegistry, settings: GrouperSettings | None = None
) -> AsyncIterator[GrouperRig]:
    settings = settings or GrouperSettings()
    clock = FakeClock()
    hub = MemoryHub(clock)
    async with UnreliableBroker(hub) as broker, UnreliableBroker(hub) as far:
        await topology.declare(broker)
        spec, binding = topology.reply_queue(REPLIES_TO)
        await far.declare_queue(spec)
        await far.bind(binding)
        state = GrouperState(
            shares=TenantShares(
                max_share=settings.max_tenant_share,
                free_tokens=settings.free_outstanding_tokens,
            ),
            recent=FIFOCache(settings.duplicate_memory),
        )
        intake, policies = intake_of(registry, settings), Policies()
        source = source_name(SENDER, "first")
        queues = WorkQueues(broker, source)
        grouper = Grouper(
            broker=broker,
            intake=intake,
            settings=settings,
            state=state,
            clock=clock,
            placement=Placement(
                broker=broker,
                queues=queues,
                state=state,
                clock=clock,
                routing=routing_of(broker, settings, clock),
            ),
            expiry=Expiry(
                broker=broker,
                state=state,
                clock=clock,
                sender=SENDER,
                watched=WatchedEnds(settings.max_watched_ends),
                ended=FIFOCache(settings.expired_memory),
                finish=state.finish,
            ),
            tenants=gate_of(
                broker, clock, policies, source=source, outstanding=state.shares.outstanding
            ),
            claims=Claims(store=None, holder=source),
            reports=LaneReports(
                broker=broker,
                clock=clock,
                sender=SENDER,
                incarnation="first",
                state=state,
                queues=queues,
                layout=intake.layout,
                policies=policies,
            ),
        )
        yield GrouperRig(hub, broker, far, grouper, clock)


def routing_of(
    broker: UnreliableBroker, settings: GrouperSettings, clock: FakeClock
) -> Routing | None:
    if settings.routing.policy == PULL:
        return None
    return Routing(broker=broker, settings=settings.routing, clock=clock, sender=SENDER)


async def listen(broker: UnreliableBroker, exchange: str, routing_key: str) -> str:
    """A queue that receives all future messages of *exchange*."""
    name = f"listen.{uuid4().hex}"
    await broker.declare_queue(QueueSpec(name=name, type=QueueType.CLASSIC))
    await broker.bind(BindingSpec(exchange=exchange, queue=name, routing_key=routing_key))
    return name


def queued_bytes(request: QueuedRequest) -> OutMessage:
    """*request* as stored in a lane."""
    return OutMessage(
        body=encode(request),
        kind="request.queued.v1",
        message_id=request.request_id,
        reply_to=request.reply_to,
    )
