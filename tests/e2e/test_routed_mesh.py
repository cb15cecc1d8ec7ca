"""Three groupers route by prefix to two instances over RabbitMQ, exchanging state."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import TypeVar

import pytest

from services.mesh.processes import ProcessMesh
from shared.broker import topology
from shared.broker.protocol import BindingSpec, Delivery, Settlement
from shared.contracts.base import Decoder, Message
from shared.contracts.qos import Slo
from shared.contracts.requests import RequestCompleted
from shared.contracts.routing import PrefillsObserved, PrefillsSampled, RouterState
from shared.contracts.telemetry import InstanceStatus
from tests.brokers import RabbitServer, eventually, rabbit_targets
from tests.e2e.meshes import Answer, ask_all, mesh_spec, producer_of, request

pytestmark = [pytest.mark.slow, pytest.mark.rabbitmq]

M = TypeVar("M", bound=Message)
CHAT = Slo(ttft_s=10.0)
HEARD = InstanceStatus | PrefillsObserved | PrefillsSampled | RouterState
KEYS = (
    topology.STATUS_KEYS,
    topology.PREFILLS_KEY,
    topology.OBSERVED_SAMPLES_KEY,
    topology.ROUTER_KEY,
)
FAMILIES = 6
"""Number of groups of prompts; prompts of a group share their first thousand bytes or more."""


@asynccontextmanager
async def telemetry(mesh: ProcessMesh) -> AsyncIterator[list[Message]]:
    """Messages between services while the context is open."""
    heard: list[Message] = []
    decode: Decoder[HEARD] = Decoder(HEARD)

    async def on_message(delivery: Delivery) -> None:
        heard.append(decode(delivery.body))
        await delivery.settle(Settlement.ACK)

    async with mesh.open_broker("headway-onlooker") as broker:
        queue = topology.temporary_queue("onlooker")
        await broker.declare_queue(queue)
        for key in KEYS:
            await broker.bind(
                BindingSpec(exchange=topology.TELEMETRY, queue=queue.name, routing_key=key)
            )
        subscription = await broker.consume(queue.name, on_message, prefetch=64)
        yield heard
        await subscription.cancel()


def prompt_of(number: int) -> str:
    return f"of family {number % FAMILIES} " * 120 + f"and this is request {number}"


async def test_requests_follow_their_prefix_and_routers_exchange_state(
    rabbit_servers: Callable[[str], RabbitServer], tmp_path_factory: pytest.TempPathFactory
) -> None:
    with rabbit_servers(rabbit_targets()[0]).fresh_url() as url:
        spec = mesh_spec(
            url,
            tmp_path_factory.mktemp("routed"),
            groupers=3,
            planner={"grouper": {"routing": {"policy": "default"}}},
        )
        async with ProcessMesh(spec) as mesh, telemetry(mesh) as heard:

            def of(kind: type[M]) -> list[M]:
                return [each for each in heard if isinstance(each, kind)]

            await eventually(lambda: len({s.instance_id for s in of(InstanceStatus)}) == 2)
            async with producer_of(mesh) as producer:
                # One request is in the mesh at a time: no load counts against a request's prefix.
                answers: list[Answer] = []
                for number in range(90):
                    one = request(number, max_tokens=6, slo=CHAT, prompt=prompt_of(number))
                    answers += await ask_all(producer, [one])
            await eventually(lambda: sum(len(each.samples) for each in of(PrefillsSampled)) >= 60)
            await eventually(lambda: len({each.sender for each in of(RouterState)}) == 3)

        assert [type(each.final) for each in answers] == [RequestCompleted] * len(answers)
        # Inboxes exist before any process publishes to them or reads them.
        logs = [path.read_text() for path in spec.log_dir.glob("*.log")]
        assert len(logs) >= 6
        assert not any("inbox.closed" in text or "broker.lost" in text for text in logs)
        # Requests of a family go to the instance that caches its prefix, from any grouper.
        first: dict[int, str] = {}
        followed = 0
        for number, answer in enumerate(answers):
            assert isinstance(answer.final, RequestCompleted)
            instance = answer.final.instance_id
            known = first.setdefault(number % FAMILIES, instance)
            followed += known == instance and answer.final.usage.cached_tokens > 100
        assert followed >= 0.9 * (len(answers) - FAMILIES)
        reported = {sender for each in of(RouterState) for sender in each.work.work}
        assert len(reported) == 3
