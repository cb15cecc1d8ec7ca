"""Requests end at their ends in every place, over RabbitMQ and over the in-process broker."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from ops.ports import free_port
from services.mesh.spec import EMBEDDED, AgentSpec, MeshSpec
from shared.broker import topology
from shared.broker.connect import open_broker
from shared.broker.protocol import Broker, OutMessage, Settlement
from shared.contracts.base import Decoder, encode
from shared.contracts.ingress import InferenceRequest
from shared.contracts.qos import OnLate, Slo
from shared.contracts.requests import (
    ErrorInfo,
    Final,
    ReplyMode,
    RequestCompleted,
    RequestFailed,
)
from shared.models.tiny import make_tiny_models
from shared.producer.generation import Generation
from shared.producer.producer import Producer
from shared.runtime.clock import SystemClock
from tests.brokers import MEMORY, RabbitServer, eventually
from tests.conftest import RABBIT_PARAMS
from tests.integration.ends.broker_mesh import BrokerMesh
from tests.queued import MODEL

WITHIN_S = 30.0
CHAT, BATCH = Slo(ttft_s=20.0, tbt_s=5.0), Slo(ttlt_s=600.0)
decode_failed: Decoder[RequestFailed] = Decoder(RequestFailed)


def spec(directory: Path, *agents: AgentSpec) -> MeshSpec:
    return MeshSpec(
        broker=EMBEDDED,
        registry=make_tiny_models(directory / "models", weights=False),
        log_dir=directory / "log",
        gateway_port=free_port(),
        agents=agents,
        planner={"leader": {"settle_s": 0.5, "plan_period_s": 0.1}},
    )


AGENT = AgentSpec(
    instance_id="a",
    settings={
        "engine": {"simulated": {"max_running": 1, "cold_activation_s": 0.1}},
        "initial_model": MODEL,
        "pull": {"window": 1},
        "drain_timeout_s": 0.1,
    },
)
"""An instance that runs one request, and holds one more."""


def request(**fields: Any) -> InferenceRequest:
    values: dict[str, Any] = {
        "model": MODEL,
        "prompt": (10, 11, 12),
        "max_tokens": 4,
        "temperature": 0.0,
        "ignore_eos": True,
        "slo": BATCH,
    }
    return InferenceRequest(**(values | fields))


@pytest_asyncio.fixture(
    scope="module",
    loop_scope="module",
    params=[pytest.param(MEMORY, marks=pytest.mark.slow), *RABBIT_PARAMS],
)
async def producer(
    request: Any,
    rabbit_servers: Callable[[str], RabbitServer],
    tmp_path_factory: pytest.TempPathFactory,
) -> AsyncIterator[Producer]:
    """A producer of a mesh with `AGENT`."""
    directory = tmp_path_factory.mktemp("mesh")
    if request.param == MEMORY:
        async with produced(directory, None) as producer:
            yield producer
        return
    with rabbit_servers(request.param).fresh_url() as url:
        async with produced(directory, url) as producer:
            yield producer


@asynccontextmanager
async def produced(directory: Path, url: str | None) -> AsyncIterator[Producer]:
    async with (
        BrokerMesh(spec(directory, AGENT), url) as mesh,
        mesh.open_broker("producer") as broker,
        Producer(broker, name="test", clock=SystemClock(), user_id="guest") as producer,
    ):
        yield producer


@asynccontextmanager
async def busy(producer: Producer) -> AsyncIterator[None]:
    """Context in which a long request occupies the engine."""
    long = await producer.submit(request(max_tokens=3000, slo=CHAT), reply=ReplyMode.STREAM)
    await anext(long)
    try:
        yield
    finally:
        await long.cancel()


async def final_of(generation: Generation) -> Final:
    async with asyncio.timeout(WITHIN_S):
        return await generation.final()


async def error_of(producer: Producer, asked: InferenceRequest) -> ErrorInfo:
    """The error of a request that does not complete."""
    final = await final_of(await producer.submit(asked, reply=ReplyMode.FINAL))
    assert isinstance(final, RequestFailed), final
    assert (final.error.code, final.error.status) == ("deadline_expired", 504)
    return final.error


on_module_loop = pytest.mark.asyncio(loop_scope="module")


@on_module_loop
async def test_request_ends_in_the_window(producer: Producer):
    async with busy(producer):
        error = await error_of(producer, request(ttl_s=1.0))

    assert "on instance a, with 0 of at most 4 tokens" in error.message
    assert error.param == "expires_at"


@on_module_loop
async def test_request_ends_in_a_lane_without_pulls(producer: Producer):
    async with busy(producer):
        held = await producer.submit(request(), reply=ReplyMode.FINAL)
        error = await error_of(producer, request(ttl_s=1.0))
        await held.cancel()

    assert "last put into lane." in error.message


@on_module_loop
async def test_running_request_ends_with_its_tokens_counted(producer: Producer):
    running = await producer.submit(
        request(max_tokens=3000, ttl_s=1.0, slo=CHAT), reply=ReplyMode.STREAM
    )
    async with asyncio.timeout(WITHIN_S):
        tokens = [token async for part in running for token in part.token_ids]
        final = await running.final()

    assert isinstance(final, RequestFailed)
    assert (final.error.code, final.error.status) == ("deadline_expired", 504)
    assert final.run_id is not None
    assert 0 < len(tokens) < 3000
    assert "it ran on instance a, with" in final.error.message


@on_module_loop
async def test_late_interactive_request_is_dropped(producer: Producer):
    asked = request(slo=Slo(ttft_s=1.0, tbt_s=1.0), on_late=OnLate.DROP)
    async with busy(producer):
        error = await error_of(producer, asked)

    assert error.param == "slo.ttft_s"


@on_module_loop
async def test_interactive_request_with_a_token_is_served_beyond_its_first_deadline(
    producer: Producer,
):
    asked = request(slo=Slo(ttft_s=1.0, tbt_s=1.0), on_late=OnLate.DROP, max_tokens=400)
    final = await final_of(await producer.submit(asked, reply=ReplyMode.FINAL))

    assert isinstance(final, RequestCompleted), final
    assert final.timings.finished_at > final.timings.arrived_at + 1.0


@on_module_loop
async def test_held_request_begins_at_its_time(producer: Producer):
    not_before = SystemClock().now() + 1.1
    asked = request(not_before=not_before, ttl_s=30.0)
    final = await final_of(await producer.submit(asked, reply=ReplyMode.FINAL))

    assert isinstance(final, RequestCompleted), final
    assert final.timings.arrived_at == pytest.approx(not_before)
    assert final.timings.grouped_at >= not_before


@on_module_loop
async def test_held_request_can_be_cancelled(producer: Producer):
    asked = request(not_before=SystemClock().now() + 0.6)
    held = await producer.submit(asked, reply=ReplyMode.FINAL)
    await held.cancel()
    final = await final_of(held)
    other = await final_of(await producer.submit(request(), reply=ReplyMode.FINAL))

    assert isinstance(final, RequestFailed)
    assert final.error.code == "cancelled"
    assert isinstance(other, RequestCompleted)


@on_module_loop
async def test_request_without_an_end_waits(producer: Producer):
    async with busy(producer):
        waits = await producer.submit(request(slo=Slo(ttft_s=0.2)), reply=ReplyMode.FINAL)
        await asyncio.sleep(1.0)
    final = await final_of(waits)

    assert isinstance(final, RequestCompleted), final
    assert not final.verdict.attained


@asynccontextmanager
async def grouper(url: str, directory: Path) -> AsyncIterator[None]:
    """Context in which a grouper runs, without other services."""
    mesh = BrokerMesh(spec(directory), url)
    for name, (service, values) in mesh.spec.service_settings().items():
        if "grouper" in values.get("roles", ()):
            mesh._start(name, service, values)
    try:
        yield
        mesh.check()
    finally:
        await mesh.stop_services(serving=False)


REPLIES = "reply.of-the-test"


class Mesh:
    """A grouper on RabbitMQ without agents, and the replies of its requests."""

    def __init__(self, broker: Broker) -> None:
        self.broker = broker

    async def publish(self, name: str, expiration_s: float | None = None, **fields: Any) -> None:
        message = OutMessage(
            body=encode(request(id=name, **fields)),
            message_id=name,
            reply_to=REPLIES,
            expiration_s=expiration_s,
        )
        await self.broker.publish(topology.REQUESTS, topology.REST_KEY, message)

    async def ready(self, queue: str) -> int:
        depth = await self.broker.depth(queue)
        return 0 if depth is None else depth.ready

    async def wait(self, queue: str, ready: int) -> None:
        async def reached() -> bool:
            return await self.ready(queue) == ready

        await eventually(reached)

    async def failure(self) -> RequestFailed:
        await self.wait(REPLIES, 1)
        delivery = await self.broker.get(REPLIES)
        assert delivery is not None
        await delivery.settle(Settlement.ACK)
        return decode_failed(delivery.body)


@asynccontextmanager
async def client(url: str) -> AsyncIterator[Mesh]:
    async with open_broker(url, client_name="test") as broker:
        await topology.declare(broker)
        queue, binding = topology.reply_queue(REPLIES)
        await broker.declare_queue(queue)
        await broker.bind(binding)
        yield Mesh(broker)


async def test_message_that_the_broker_drops_before_it_is_grouped_ends_with_504(
    rabbit_url: str, tmp_path: Path
):
    async with client(rabbit_url) as mesh:
        await mesh.publish("r", expiration_s=0.1)
        await mesh.wait(topology.DEAD_LETTERS, 1)
        async with grouper(rabbit_url, tmp_path):
            failed = await mesh.failure()

    assert (failed.request_id, failed.error.code) == ("r", "deadline_expired")
    assert failed.error.status == 504
    assert "it was never grouped" in failed.error.message


LANE = "lane.2.tiny-llama.high.12.w0"


async def test_request_ends_once_although_the_broker_drops_it_too(rabbit_url: str, tmp_path: Path):
    """The grouper ends a request deep in a lane; later, the broker drops it at the lane's head."""
    async with client(rabbit_url) as mesh, grouper(rabbit_url, tmp_path):
        await mesh.publish("stays", slo=Slo())
        await mesh.wait(LANE, 1)
        await mesh.publish("ends", slo=Slo(), ttl_s=0.5)
        failed = await mesh.failure()
        assert (failed.request_id, failed.error.code) == ("ends", "deadline_expired")
        assert await mesh.ready(topology.DEAD_LETTERS) == 0

        head = await mesh.broker.get(LANE)
        assert head is not None
        await mesh.wait(topology.DEAD_LETTERS, 1)
        await mesh.wait(topology.DEAD_LETTER_REPLIES, 0)
        await mesh.publish("next", slo=Slo(), expires_at=1.0)
        after = await mesh.failure()

    assert after.request_id == "next"


async def test_request_at_the_head_of_a_lane_ends_once(rabbit_url: str, tmp_path: Path):
    """The broker and the grouper both see its end."""
    async with client(rabbit_url) as mesh, grouper(rabbit_url, tmp_path):
        await mesh.publish("ends", slo=Slo(), ttl_s=0.5)
        failed = await mesh.failure()
        await mesh.wait(topology.DEAD_LETTERS, 1)
        await asyncio.sleep(0.5)
        left = await mesh.ready(REPLIES)

    assert (failed.request_id, failed.error.code, left) == ("ends", "deadline_expired", 0)
