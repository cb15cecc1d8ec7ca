"""Kills and poison requests on real vLLM engines."""

import asyncio
from pathlib import Path

import msgspec
import pytest

from services.mesh.processes import ProcessMesh
from shared.broker import topology
from shared.contracts.base import ModelName
from shared.contracts.requests import RequestCompleted
from shared.models.registry import ModelRegistry, write_registry
from shared.models.tiny import make_tiny_models
from tests.brokers import eventually
from tests.e2e.meshes import (
    LLAMA,
    ask_all,
    assert_consistent,
    kill,
    mesh_spec,
    only_left,
    producer_of,
    request,
)

pytestmark = [pytest.mark.slow, pytest.mark.rabbitmq, pytest.mark.vllm]

NUM_REQUESTS = 60
PATIENCE_S = 480.0
"""Time limit of answers; engine restarts take one or two minutes on a quiet machine."""
AGENTS = ("agent-a0", "agent-a1")
POISON_TOKEN = 333
ENGINE = {"engine": {"vllm": {"max_running": 24}}}


async def test_killed_and_drained_engines_change_no_answer(
    vllm_broker: str, tmp_path: Path
) -> None:
    settings = ENGINE | {"drain_timeout_s": 0.2}
    spec = mesh_spec(vllm_broker, tmp_path, engine="vllm", agents=2, agent_settings=settings)
    requests = [request(n, max_tokens=120) for n in range(NUM_REQUESTS)]
    async with ProcessMesh(spec) as mesh, producer_of(mesh) as producer:
        calm = await ask_all(producer, requests, timeout_s=PATIENCE_S)
        num_parts = 0

        def on_part() -> None:
            nonlocal num_parts
            num_parts += 1

        async def more_parts() -> None:
            enough = num_parts + NUM_REQUESTS
            await eventually(lambda: num_parts >= enough, within_s=PATIENCE_S)

        async def havoc() -> None:
            await more_parts()
            # No engine is left, so the storm cannot end before the last one has drained.
            await kill(mesh, "agent-a0")
            await more_parts()  # only the other agent sends them
            await mesh.processes["agent-a1"].stop()  # running requests are evicted with progress
            await asyncio.gather(*(mesh.processes[name].start() for name in AGENTS))

        chaos = asyncio.create_task(havoc(), name="havoc")
        storm = await ask_all(
            producer,
            requests,
            spacing_s=0.02,
            on_part=on_part,
            timeout_s=PATIENCE_S,
        )
        await chaos

    assert [RequestCompleted] * NUM_REQUESTS == [type(answer.final) for answer in storm]
    assert [a.token_ids for a in calm] == [a.token_ids for a in storm]
    assert any(answer.final.attempts.evictions for answer in storm)
    assert {"vllm-0.32.0"} == {answer.final.engine for answer in storm}
    for answer in storm:
        assert_consistent(answer)


async def test_only_the_poison_request_is_dead_lettered(vllm_broker: str, tmp_path: Path) -> None:
    models = ModelRegistry.load(make_tiny_models(tmp_path / "models"))
    entry = msgspec.structs.replace(
        models.entry(ModelName(LLAMA)),
        engine_args={"worker_cls": "tests.e2e.poison_worker.PoisonWorker"},
    )
    registry = tmp_path / "poison.json"
    write_registry(registry, [entry])
    spec = mesh_spec(
        vllm_broker, tmp_path, engine="vllm", agents=1, registry=registry, agent_settings=ENGINE
    )
    bodies = [request(n, max_tokens=100, prompt=tuple(range(10, 40 + n))) for n in range(20)]
    poison = request(99, prompt=(20, 21, POISON_TOKEN, 22), max_tokens=5)
    async with ProcessMesh(spec) as mesh, producer_of(mesh) as producer:
        answers = await ask_all(
            producer, [*bodies[:10], poison, *bodies[10:]], timeout_s=PATIENCE_S
        )
        async with mesh.open_broker("headway-check") as broker:
            await only_left(broker, mesh, {topology.DEAD_LETTERS: 1})

    failed = [answer.final for answer in answers if not isinstance(answer.final, RequestCompleted)]
    assert [final.error.code for final in failed] == ["poison_request"]
