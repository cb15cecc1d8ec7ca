"""RabbitMQ closes channels with requests that are held for long, unless the agent renews them."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from ops.broker import FAST_TICKS, PrivateNode
from services.agent.servable import ServableModels
from services.agent.service import Agent
from services.agent.settings import Settings
from shared.broker import topology
from shared.broker.amqp.broker import AmqpBroker
from shared.broker.protocol import Broker, OutMessage
from shared.broker.work_queues import WorkQueues
from shared.contracts.base import encode
from shared.contracts.lanes import inbox_name
from shared.contracts.requests import FinishReason
from shared.models.registry import ModelRegistry
from shared.models.tiny import make_tiny_models
from shared.runtime.cli import Ports
from shared.runtime.clock import SystemClock
from shared.runtime.health import Health
from tests.agents.scripted_engine import ScriptedEngine
from tests.brokers import FOUR, eventually, release_of
from tests.queued import MODEL, OTHER, a_request

pytestmark = pytest.mark.rabbitmq

TIMEOUT_S = 1.5
INBOX = inbox_name("i1")


@pytest.fixture(
    scope="module", params=[FOUR, pytest.param("rabbitmq", marks=pytest.mark.slow, id="rabbitmq")]
)
def node(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[PrivateNode]:
    """A node that closes a channel whose delivery is unacknowledged for `TIMEOUT_S`."""
    node = PrivateNode(
        tmp_path_factory.mktemp("timeout"),
        release=release_of(request.param),
        settings={"consumer_timeout": int(1000 * TIMEOUT_S)},
        advanced=FAST_TICKS,
    )
    node.start()
    yield node
    node.close()


@asynccontextmanager
async def holding(
    node: PrivateNode, directory: Path, **settings: Any
) -> AsyncIterator[tuple[ScriptedEngine, Broker]]:
    """An agent that runs the request `r`."""
    path = make_tiny_models(directory / "models", weights=False)
    registry, health, engine = ModelRegistry.load(path), Health(service="agent"), ScriptedEngine()
    stop = asyncio.Event()
    async with (
        AmqpBroker(node.url, client_name="agent", timeout_s=30.0) as broker,
        AmqpBroker(node.url, client_name="test", timeout_s=30.0) as far,
        AsyncExitStack() as stack,
    ):
        await topology.declare(broker)
        ports = Ports(
            settings=Settings(
                instance_id="i1",
                models=(MODEL,),
                initial_model=MODEL,
                drain_timeout_s=0.0,
                registry=str(path),
                **settings,
            ),
            open_broker=lambda _name: broker,
            clock=SystemClock(),
            health=health,
        )
        models = ServableModels(registry.entry(name) for name in (MODEL, OTHER))
        agent = Agent(ports, broker, engine, models, registry)
        work = asyncio.create_task(agent.run(stop, stack))
        await eventually(lambda: "start" not in health.reasons or work.done())
        request, queues = a_request("r", arrived_at=SystemClock().now()), WorkQueues(far, "test")
        await queues.publish(request.lane, OutMessage(body=encode(request), message_id="r"))
        await engine.began("r")
        yield engine, far
        stop.set()
        await asyncio.wait_for(work, 60.0)
        for queue in (request.lane, INBOX):
            await far.delete_queue(queue)


async def test_channel_of_a_renewed_request_stays_open(node: PrivateNode, tmp_path: Path):
    before = node.num_timeouts
    async with holding(node, tmp_path, consumer_timeout_s=TIMEOUT_S) as (engine, far):
        engine.emit("r", 7)
        await asyncio.sleep(2.5 * TIMEOUT_S)
        engine.emit("r", finish=FinishReason.LENGTH)

        async def has_left() -> bool:
            depth = await far.depth(INBOX)
            return depth is not None and not (depth.ready or depth.consumers)

        await eventually(has_left)
    assert node.num_timeouts == before


async def test_channel_of_a_request_that_is_not_renewed_is_closed(
    node: PrivateNode, tmp_path: Path
):
    before = node.num_timeouts
    async with holding(node, tmp_path) as (engine, _):
        await eventually(lambda: node.num_timeouts > before)
        engine.emit("r", finish=FinishReason.LENGTH)
