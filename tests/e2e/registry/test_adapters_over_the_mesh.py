"""
LoRA adapters on real vLLM engines that are killed and drained.

`HEADWAY_ADAPTER_REQUESTS=200` sends more requests than the default.
"""

import asyncio
import os
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import openai
import pytest

from services.mesh.cli import main
from services.mesh.processes import ProcessMesh
from shared.contracts.base import ModelName
from shared.contracts.requests import RequestCompleted
from shared.models.registry import ModelRegistry, write_registry
from shared.models.tiny import TINY_MODELS, make_tiny_models
from shared.models.tiny_adapter import TinyAdapter, make_tiny_adapter
from tests.brokers import RabbitServer, eventually, rabbit_targets
from tests.e2e.meshes import (
    LLAMA,
    Answer,
    ask_all,
    assert_consistent,
    kill,
    mesh_spec,
    producer_of,
    request,
)

pytestmark = [pytest.mark.slow, pytest.mark.rabbitmq, pytest.mark.vllm]

NUM_REQUESTS = int(os.environ.get("HEADWAY_ADAPTER_REQUESTS", "30"))
ADAPTERS = ("sql", "chat", "code")
PATIENCE_S = 480.0
# A drain leaves running requests no time, so that they are evicted.
AGENT = {"engine": {"vllm": {"max_running": 24}}, "drain_timeout_s": 0.01}


def adapter(directory: Path, name: str) -> Path:
    seed = sum(name.encode())
    return make_tiny_adapter(directory / name, TinyAdapter(base=TINY_MODELS[LLAMA], seed=seed))


class Parts:
    """Number of streamed parts that the producer has received."""

    def __init__(self) -> None:
        self.num = 0

    def count(self) -> None:
        self.num += 1

    async def more(self) -> None:
        """Wait until an engine has generated more parts, so that requests are running."""
        wanted = self.num + 5
        while self.num < wanted:
            await asyncio.sleep(0.01)


async def interrupted(mesh: ProcessMesh, parts: Parts) -> None:
    """Stop all agents while requests run, then kill all of them with their engines."""
    agents = [mesh.processes[name] for name in ("agent-a0", "agent-a1")]
    await parts.more()
    await asyncio.gather(*(agent.stop() for agent in agents))
    await asyncio.gather(*(agent.start() for agent in agents))
    await parts.more()
    await asyncio.gather(*(kill(mesh, name) for name in ("agent-a0", "agent-a1")))
    await asyncio.gather(*(agent.start() for agent in agents))


async def test_answers_of_adapters_survive_kills_and_evictions(
    rabbit_servers: Callable[[str], RabbitServer], tmp_path: Path
) -> None:
    made = ModelRegistry.load(make_tiny_models(tmp_path / "models"))
    found = {name: str(adapter(tmp_path, name)) for name in ADAPTERS}
    registry = tmp_path / "registry.json"
    base = msgspec.structs.replace(made.entry(ModelName(LLAMA)), adapters=found)
    write_registry(registry, [base])
    requests = [
        request(number, model=ADAPTERS[number % len(ADAPTERS)], max_tokens=120)
        for number in range(NUM_REQUESTS)
    ]
    with rabbit_servers(rabbit_targets()[0]).fresh_url() as url:
        spec = mesh_spec(
            url, tmp_path, engine="vllm", registry=registry, agent_settings=AGENT,
        )  # fmt: skip
        async with ProcessMesh(spec) as mesh, producer_of(mesh) as producer:
            await check_http(mesh, registry, tmp_path)
            calm = await ask_all(producer, requests, timeout_s=PATIENCE_S)
            parts = Parts()
            chaos = asyncio.create_task(interrupted(mesh, parts), name="interrupted")
            begun = time.monotonic()
            storm = await ask_all(
                producer,
                requests,
                spacing_s=0.02,
                on_part=parts.count,
                timeout_s=PATIENCE_S,
            )
            duration_s = time.monotonic() - begun
            await chaos

    assert [RequestCompleted] * NUM_REQUESTS == [type(answer.final) for answer in storm]
    assert [a.token_ids for a in calm] == [a.token_ids for a in storm]
    assert {each.final.model for each in storm} == set(ADAPTERS)  # type: ignore[union-attr]  # all completed
    for answer in storm:
        assert_consistent(answer)
    resumed = sum(_hops(answer) > 0 for answer in storm)
    print(f"{NUM_REQUESTS} requests, {resumed} resumed or repeated, {duration_s:.1f} s")
    assert resumed > 0


async def check_http(mesh: ProcessMesh, registry: Path, directory: Path) -> None:
    """The gateway lists adapters with their base, and serves one that is added meanwhile."""
    added = adapter(directory, "added")
    arguments = ["add", "--adapter", f"{LLAMA}={added}", "--registry", str(registry)]
    async with openai.AsyncOpenAI(
        base_url=f"{mesh.spec.gateway_url}/v1", api_key="any", max_retries=0, timeout=120.0
    ) as client:
        plain = await client.completions.create(
            model=LLAMA, prompt="a queue", max_tokens=20, temperature=0
        )
        assert await asyncio.to_thread(main, ["models", *arguments]) == 0

        async def is_listed() -> bool:
            parents = {each.id: each.parent async for each in client.models.list()}  # type: ignore[attr-defined]  # vLLM's field
            return parents == {LLAMA: None} | dict.fromkeys((*ADAPTERS, "added"), LLAMA)

        await eventually(is_listed)
        texts = set()
        for name in (*ADAPTERS, "added"):
            answer = await client.chat.completions.create(
                model=name, messages=[{"role": "user", "content": "a queue"}], max_tokens=20,
                temperature=0,
            )  # fmt: skip
            assert answer.model == name
            texts.add(answer.choices[0].message.content)
        assert len({plain.choices[0].text, *texts}) == 5


def _hops(answer: Answer) -> int:
    assert isinstance(answer.final, RequestCompleted)
    return answer.final.attempts.hop
