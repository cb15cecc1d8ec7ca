"""A gateway on a real port, in front of a fake mesh."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import msgspec

from ops.ports import free_port
from services.agent.backends.bodies.events import Events, Heading, events_for
from services.agent.backends.bodies.events import Usage as CallUsage
from services.gateway.service import serve
from services.gateway.settings import Settings
from shared.api.events import response_of_stream
from shared.broker import topology
from shared.broker.protocol import (
    BindingSpec,
    Broker,
    BrokerFactory,
    Delivery,
    OutMessage,
    Settlement,
)
from shared.contracts.base import InstanceId, RequestId, RunId, encode
from shared.contracts.control import Control, RequestCancel
from shared.contracts.ingress import CallRequest
from shared.contracts.qos import SloVerdict
from shared.contracts.requests import (
    ChildAnswer,
    ErrorInfo,
    FinishReason,
    ReplyMode,
    RequestCompleted,
    RequestFailed,
    RunStarted,
    StepDetails,
    Timings,
    TokenChunk,
    TokensEmitted,
    Usage,
)
from shared.runtime.cli import Ports
from shared.runtime.clock import SystemClock
from shared.runtime.health import Health
from tests.brokers import BrokerRig, RabbitRig, eventually

INSTANCE = InstanceId("i1")
PIECES = ("Hel", "lo ", "wor", "ld")
PROMPT_TOKENS = 3
KEYS = {"sk-acme": "acme", "sk-other": "other"}
"""API keys and their tenants."""


@dataclass(frozen=True)
class Request:
    """A request that the fake mesh has received."""

    body: CallRequest
    delivery: Delivery
    mesh: "FakeMesh"

    async def reply(self, message: msgspec.Struct) -> None:
        assert self.delivery.reply_to is not None
        await self.mesh.broker.publish(
            topology.REPLIES, self.delivery.reply_to, OutMessage(body=encode(message))
        )

    async def start(self, run: str = "run1", *, hop: int = 0) -> None:
        await self.reply(
            RunStarted(
                request_id=RequestId(self.body.id or ""),
                run_id=RunId(run),
                hop=hop,
                instance_id=INSTANCE,
                at=0.0,
            )
        )

    async def tokens(self, offset: int, *pieces: str, run: str = "run1", first: int = 10) -> None:
        chunk = TokenChunk(
            request_id=RequestId(self.body.id or ""),
            run_id=RunId(run),
            offset=offset,
            token_ids=tuple(range(first + offset, first + offset + len(pieces))),
            details=steps_of(self.body, *pieces, offset=offset),
        )
        await self.reply(TokensEmitted(chunks=(chunk,)))

    async def complete(self, *pieces: str) -> None:
        await self.reply(completed(self.body, *pieces))

    async def fail(self, *, status: int, code: str, run: str | None = None) -> None:
        await self.reply(
            RequestFailed(
                request_id=RequestId(self.body.id or ""),
                run_id=None if run is None else RunId(run),
                error=ErrorInfo(message="no", code=code, status=status, retry_after_s=3.0),
                at=0.0,
            )
        )


def events_of(body: CallRequest) -> Events:
    """Makes the events of an answer to *body*."""
    fields = msgspec.json.decode(body.body)
    return events_for(
        body.endpoint,
        Heading(
            request_id=body.id or "",
            model=fields["model"],
            created_at=0,
            tool=None,
            includes_usage=not body.events or "stream_options" in fields,
        ),
    )


def steps_of(body: CallRequest, *pieces: str, offset: int = 0) -> tuple[StepDetails, ...]:
    """One step for each piece of an answer."""
    events = events_of(body)
    return tuple(
        StepDetails(1, events=(b"" if number else events.begin(0)) + events.text(0, piece))
        for number, piece in enumerate(pieces, offset)
    )


def completed(body: CallRequest, *pieces: str) -> RequestCompleted:
    """The final of a request whose answer is *pieces*."""
    now = SystemClock().now()
    events = events_of(body)
    usage = Usage(
        prompt_tokens=PROMPT_TOKENS,
        completion_tokens=len(pieces),
        total_tokens=PROMPT_TOKENS + len(pieces),
        cached_tokens=1,
    )
    close = events.close(CallUsage(prompt=PROMPT_TOKENS, cached=1, completion=len(pieces)))
    tail = StepDetails(0, events=events.end(0, FinishReason.STOP) + close)
    details = (*steps_of(body, *pieces), tail)
    stream = b"".join(step.events for step in details)
    response = b"null" if body.events else response_of_stream(body.endpoint, stream)
    return RequestCompleted(
        request_id=RequestId(body.id or ""),
        run_id=RunId("run1"),
        instance_id=INSTANCE,
        model=body.model or "",
        token_ids=(),
        text="",
        finish_reason=FinishReason.STOP,
        usage=usage,
        timings=Timings(
            arrived_at=body.arrived_at or now,
            grouped_at=now,
            pulled_at=now,
            submitted_at=now,
            first_token_at=now,
            finished_at=now,
        ),
        verdict=SloVerdict(attained=True),
        engine="fake",
        details=details if body.events else (),
        children=(
            ChildAnswer(
                token_ids=tuple(range(10, 10 + len(pieces))),
                text="",
                finish_reason=FinishReason.STOP,
            ),
        ),
        response=msgspec.Raw(response),
    )


async def stream(request: Request, *pieces: str) -> None:
    """Send the replies of a run before its final."""
    await request.start()
    for offset, piece in enumerate(pieces):
        await request.tokens(offset, piece)


async def answer(request: Request) -> None:
    """Answer as a healthy mesh does: stream if requested, then complete."""
    if request.body.reply is ReplyMode.STREAM:
        await stream(request, *PIECES)
    await request.complete(*PIECES)


@dataclass
class FakeMesh:
    """Fake mesh that gets requests from the two global queues; a script answers each request."""

    broker: Broker
    script: Callable[[Request], Awaitable[None]] = answer
    requests: list[Request] = field(default_factory=list)
    controls: list[Control] = field(default_factory=list)

    async def start(self) -> None:
        await topology.declare(self.broker)
        await self.broker.declare_queue(topology.private_queue("fake-mesh-control"))
        for key in topology.control_keys(INSTANCE):
            await self.broker.bind(
                BindingSpec(exchange=topology.CONTROL, queue="fake-mesh-control", routing_key=key)
            )
        await self.broker.consume("fake-mesh-control", self._on_control, prefetch=10)
        for queue in (topology.GLOBAL_INTERACTIVE, topology.GLOBAL_REST):
            await self.broker.consume(queue, self._on_request, prefetch=100)

    @property
    def cancelled(self) -> list[str]:
        return [it.request_id for it in self.controls if isinstance(it, RequestCancel)]

    async def _on_request(self, delivery: Delivery) -> None:
        body = msgspec.json.decode(delivery.body, type=CallRequest)
        request = Request(body, delivery, self)
        self.requests.append(request)
        await delivery.settle(Settlement.ACK)
        await self.script(request)

    async def _on_control(self, delivery: Delivery) -> None:
        with contextlib.suppress(msgspec.ValidationError):  # a report of the gateway
            self.controls.append(msgspec.json.decode(delivery.body, type=Control))
        await delivery.settle(Settlement.ACK)


@dataclass(frozen=True)
class GatewayRig:
    """A running gateway."""

    url: str
    mesh: FakeMesh
    health: Health
    stop: asyncio.Event
    serving: "asyncio.Task[None]"

    def sample(self, name: str, **labels: str) -> float | None:
        return self.health.metrics.get_sample_value(name, labels)


def http_client() -> httpx.AsyncClient:
    """HTTP client with timeouts long enough for a busy machine."""
    return httpx.AsyncClient(timeout=60.0)


@contextlib.asynccontextmanager
async def http_of(rig: GatewayRig, key: str = "sk-acme") -> AsyncIterator[httpx.AsyncClient]:
    """HTTP client of a gateway, with an API key of `KEYS`."""
    async with http_client() as http:
        http.base_url = httpx.URL(rig.url)
        http.headers["authorization"] = f"Bearer {key}"
        yield http


def error_of(answer: httpx.Response) -> tuple[int, str, str | None]:
    """Status, code and parameter of an error, whose body has exactly OpenAI's fields."""
    error = answer.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    return answer.status_code, error["code"], error["param"]


@contextlib.asynccontextmanager
async def running_gateway(
    brokers: BrokerRig, registry: Path, *, mesh: FakeMesh | None = None, **fields: object
) -> AsyncIterator[GatewayRig]:
    """Context with a gateway, in front of *mesh* if another gateway has started it."""
    url = brokers.url if isinstance(brokers, RabbitRig) else "memory://"
    settings = msgspec.convert(
        {"registry": str(registry), "port": free_port(), "amqp_url": url, "drain_timeout_s": 60.0}
        | fields,
        Settings,
    )
    if mesh is None:
        mesh = FakeMesh(await brokers.connect("fake mesh"))
        await mesh.start()
    open_broker: BrokerFactory = brokers.open
    health = Health(service="gateway")
    ports = Ports(settings=settings, open_broker=open_broker, clock=SystemClock(), health=health)
    stop = asyncio.Event()
    serving = asyncio.create_task(serve(ports, stop), name="gateway")
    await eventually(lambda: "start" not in health.reasons or serving.done())
    try:
        yield GatewayRig(f"http://127.0.0.1:{settings.port}", mesh, health, stop, serving)
    finally:
        stop.set()
        await serving
