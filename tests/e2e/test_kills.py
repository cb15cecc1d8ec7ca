"""Processes of the mesh are killed under load; no answer is lost, duplicated or changed."""

import asyncio
from pathlib import Path

import pytest

from ops.broker import PrivateNode
from services.mesh.processes import ProcessMesh
from shared.broker import topology
from shared.contracts.requests import RequestCompleted
from tests.brokers import FOUR
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
)

pytestmark = pytest.mark.rabbitmq

NUM_REQUESTS = 320
SPACING_S = 0.06
MAX_TOKENS = 80


async def havoc(mesh: ProcessMesh, node: PrivateNode, undisturbed: asyncio.Event) -> None:
    """Kill one process after another, and restart the broker, while the mesh is under load."""
    await undisturbed.wait()
    await kill(mesh, "agent-a0")
    await asyncio.sleep(1.0)
    await mesh.processes["agent-a0"].start()
    await kill(mesh, "grouper-0")
    await asyncio.sleep(1.0)
    await mesh.processes["grouper-0"].start()
    await kill(mesh, await leader_of(mesh))
    await kill(mesh, "gateway")
    await asyncio.sleep(1.0)
    await mesh.processes["gateway"].start()
    await kill(mesh, "agent-a1")  # the agent is not restarted
    await asyncio.sleep(1.0)
    await asyncio.to_thread(node.stop)
    await asyncio.to_thread(node.start)
    # A supervisor would restart these processes: on a busy machine they may have exited while the
    # broker was stopped.
    for name in ("agent-a0", "grouper-0", "gateway"):
        if not mesh.processes[name].running:
            await mesh.processes[name].start()


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
        under_way = asyncio.Event()
        async with producer_of(mesh, "storm") as producer:
            chaos = asyncio.create_task(havoc(mesh, node, under_way), name="havoc")
            storm = await ask_all(
                producer,
                requests,
                spacing_s=SPACING_S,
                on_sent=lambda n: under_way.set() if n > 30 else None,
                timeout_s=240.0,
            )
            await chaos
        async with mesh.open_broker("headway-check") as broker:
            await only_left(broker, mesh, {})

    assert [type(answer.final) for answer in storm] == [RequestCompleted] * NUM_REQUESTS
    assert [a.token_ids for a in calm] == [a.token_ids for a in storm]
    for answer in storm:
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
