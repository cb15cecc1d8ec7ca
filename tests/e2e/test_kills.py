"""Processes of the mesh are killed under load; no answer is lost, duplicated or changed."""

import asyncio
from pathlib import Path

import pytest

from ops.broker import PrivateNode
from services.agent.cli import next_status
from services.mesh.processes import ProcessMesh
from shared.broker import topology
from shared.contracts.requests import RequestCompleted
from shared.producer.producer import Producer
from tests.brokers import FOUR, eventually
from tests.e2e.meshes import (
    SLOW_ENGINE,
    ask_all,
    assert_consistent,
    kill,
    leader_of,
    mesh_spec,
    only_left,
    producer_of,
    request,
    steady_load,
)

pytestmark = pytest.mark.rabbitmq

NUM_REQUESTS = 160
"""Number of different requests, which the clients send again and again."""
CLIENTS = 16
MAX_TOKENS = 80
PATIENCE_S = 240.0


async def havoc(mesh: ProcessMesh, node: PrivateNode, producer: Producer) -> None:
    """
    Kill one process after another, and restart the broker, each while most of the clients wait for
    an answer; agents are killed while they run requests.
    """
    await kill_serving(mesh, "a0", producer)
    await asyncio.sleep(1.0)
    await mesh.processes["agent-a0"].start()
    await kill_under_load(mesh, "grouper-0", producer)
    await asyncio.sleep(1.0)
    await mesh.processes["grouper-0"].start()
    await kill_under_load(mesh, await leader_of(mesh), producer)
    await kill_under_load(mesh, "gateway", producer)
    await asyncio.sleep(1.0)
    await mesh.processes["gateway"].start()
    await kill_serving(mesh, "a1", producer)  # the agent is not restarted
    await asyncio.sleep(1.0)
    await under_load(producer)
    await asyncio.to_thread(node.stop)
    await asyncio.to_thread(node.start)
    # A supervisor would restart these processes: on a busy machine they may have exited while the
    # broker was stopped.
    for name in ("agent-a0", "grouper-0", "gateway"):
        if not mesh.processes[name].running:
            await mesh.processes[name].start()


async def under_load(producer: Producer) -> None:
    """Wait until most of the clients wait for an answer."""
    await eventually(lambda: producer.num_outstanding > CLIENTS // 2)


async def kill_under_load(mesh: ProcessMesh, name: str, producer: Producer) -> None:
    await under_load(producer)
    await kill(mesh, name)


async def kill_serving(mesh: ProcessMesh, instance_id: str, producer: Producer) -> None:
    """Kill an agent, as soon as it reports that it runs requests."""
    async with mesh.open_broker("headway-watch") as broker:

        async def is_serving() -> bool:
            status = await next_status(broker, instance_id)
            return status is not None and status.running > 0

        await under_load(producer)
        await eventually(is_serving)
        await kill(mesh, f"agent-{instance_id}")


@pytest.mark.parametrize(
    ("routing", "release"),
    [
        pytest.param("pull", FOUR, marks=pytest.mark.slow),
        ("default", "rabbitmq"),
    ],
)
async def test_no_kill_loses_duplicates_or_changes_an_answer(
    node: PrivateNode, tmp_path: Path, routing: str, release: str
) -> None:
    spec = mesh_spec(
        node.url,
        tmp_path,
        agents=3,
        groupers=2,
        leaders=2,
        planner={"grouper": {"routing": {"policy": routing, "scope": "all"}}},
        # On RabbitMQ 4, each request is renewed while it is served.
        agent_settings={
            "engine": {"simulated": SLOW_ENGINE},
            "consumer_timeout_s": 1.0 if release == FOUR else 1800.0,
        },
    )
    requests = [request(n, max_tokens=MAX_TOKENS) for n in range(NUM_REQUESTS)]
    async with ProcessMesh(spec) as mesh:
        async with producer_of(mesh, "calm") as producer:
            calm = await ask_all(producer, requests)
        async with producer_of(mesh, "storm") as producer, asyncio.timeout(PATIENCE_S):
            async with steady_load(producer, requests, clients=CLIENTS) as storm:
                await eventually(lambda: len(storm) > CLIENTS)
                await havoc(mesh, node, producer)
            # A request that ran twice has a second final, which the producer must still receive.
            async with mesh.open_broker("headway-check") as broker:
                await only_left(broker, mesh, {})

    assert {RequestCompleted} == {type(answer.final) for answer in storm.values()}
    for number, answer in storm.items():
        assert calm[number % NUM_REQUESTS].token_ids == answer.token_ids
        assert_consistent(answer)


@pytest.mark.slow
async def test_only_the_poison_request_is_dead_lettered(node: PrivateNode, tmp_path: Path) -> None:
    poison_token = 333
    spec = mesh_spec(
        node.url,
        tmp_path,
        agents=2,
        agent_settings={"engine": {"simulated": SLOW_ENGINE | {"crash_on_token": poison_token}}},
    )
    bodies = [request(n, max_tokens=MAX_TOKENS, prompt=tuple(range(10, 40 + n))) for n in range(20)]
    poison = request(99, prompt=(20, 21, poison_token, 22), max_tokens=5)
    async with ProcessMesh(spec) as mesh, producer_of(mesh) as producer:
        answers = await ask_all(producer, [*bodies[:10], poison, *bodies[10:]])
        async with mesh.open_broker("headway-check") as broker:
            await only_left(broker, mesh, {topology.DEAD_LETTERS: 1})

    failed = [answer.final for answer in answers if not isinstance(answer.final, RequestCompleted)]
    assert [final.error.code for final in failed] == ["poison_request"]
