"""A mesh in front of servers that others run."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import msgspec

from ops.ports import free_port
from services.mesh.embedded import EmbeddedMesh
from services.mesh.spec import EMBEDDED, AgentSpec, MeshSpec
from shared.broker.declaring import declare_topology
from shared.contracts.base import ModelName
from shared.contracts.ingress import CallRequest, InferenceRequest
from shared.contracts.models import ModelEntry
from shared.contracts.qos import Slo
from shared.contracts.requests import ReplyMode, RequestCompleted
from shared.models.registry import write_registry
from shared.producer.producer import Producer, Request
from shared.runtime.clock import SystemClock
from tests.agents.openai_server import OpenAiServer
from tests.brokers import eventually

MODEL = ModelName("m")
CHAT = "/v1/chat/completions"
HELLO = [{"role": "user", "content": "hello"}]


class Fleet:
    """
    Servers behind one file of addresses, and the mesh in front of them.

    Args:
        directory: Directory of the mesh's files.
        agents: Number of agents that attach all servers.
    """

    def __init__(self, directory: Path, *, agents: int = 1) -> None:
        self.servers: dict[str, OpenAiServer] = {}
        self._stacks: dict[str, AsyncExitStack] = {}
        self._file = directory / "endpoints"
        self._file.write_text("# servers\n")
        registry = directory / "registry.json"
        write_registry(registry, [ModelEntry(name=MODEL, takes="bodies", max_model_len=512)])
        self.mesh = EmbeddedMesh(
            MeshSpec(
                broker=EMBEDDED,
                registry=registry,
                log_dir=directory / "log",
                gateway_port=free_port(),
                agents=tuple(
                    AgentSpec(
                        instance_id=f"attached-{number}",
                        engine="remote",
                        settings={
                            "models": [MODEL],
                            "engine": {"remote": {"url": f"file:{self._file}"}},
                            "drain_timeout_s": 2.0,
                        },
                    )
                    for number in range(agents)
                ),
                planner={"leader": {"settle_s": 0.5, "plan_period_s": 0.1}},
            )
        )

    async def add(self, **fields: Any) -> str:
        """Start a server and write its address to the file; return the address."""
        server = OpenAiServer(**fields)
        stack = AsyncExitStack()
        url = await stack.enter_async_context(server.serving())
        self.servers[url], self._stacks[url] = server, stack
        self.write(*self.servers)
        return url

    def write(self, *urls: str) -> None:
        """Write the file of addresses."""
        self._file.write_text("".join(f"{url}\n" for url in urls))

    async def kill(self, url: str) -> None:
        """End a server in the middle of its answers; its address stays in the file."""
        self.servers[url].break_after = 0
        await self._stacks.pop(url).aclose()

    async def close(self) -> None:
        for stack in self._stacks.values():
            await stack.aclose()


@asynccontextmanager
async def fleet_of(directory: Path, number: int, **fields: Any) -> AsyncIterator[Fleet]:
    """A running mesh in front of *number* servers."""
    fleet = Fleet(directory, **fields)
    try:
        for _ in range(number):
            await fleet.add()
        async with fleet.mesh:
            yield fleet
    finally:
        await fleet.close()


@asynccontextmanager
async def producing(fleet: Fleet) -> AsyncIterator[Producer]:
    async with fleet.mesh.open_broker("producer") as broker:
        await declare_topology(broker)
        async with Producer(broker, name="test", clock=SystemClock()) as producer:
            yield producer


async def final_of(producer: Producer, body: Request, reply: ReplyMode) -> RequestCompleted:
    async with asyncio.timeout(30):
        final = await (await producer.submit(body, reply=reply)).final()
    assert isinstance(final, RequestCompleted), final
    return final


async def instances_of(producer: Producer, number: int) -> set[str]:
    """Instances that serve *number* concurrent requests."""
    body = InferenceRequest(model=MODEL, prompt="a", max_tokens=8, temperature=0.0)
    finals = await asyncio.gather(
        *(final_of(producer, body, ReplyMode.FINAL) for _ in range(number))
    )
    return {final.instance_id for final in finals}


def instance(url: str) -> str:
    return f"attached-0-127-0-0-1-{url.rpartition(':')[2]}"


async def test_producers_get_answers_with_verdicts(tmp_path: Path) -> None:
    plain = InferenceRequest(
        model=MODEL, messages=msgspec.convert(HELLO, tuple), max_tokens=4, slo=Slo(ttft_s=9.0)
    )
    plain = msgspec.convert(msgspec.to_builtins(plain), InferenceRequest)
    body = msgspec.Raw(json.dumps({"model": MODEL, "messages": HELLO, "max_tokens": 4}).encode())
    async with fleet_of(tmp_path, 1) as fleet, producing(fleet) as producer:
        (server,) = fleet.servers.values()
        text = await final_of(producer, plain, ReplyMode.FINAL)
        generation = await producer.submit(plain, reply=ReplyMode.STREAM)
        streamed = [part.text async for part in generation]
        call = await final_of(producer, CallRequest(endpoint=CHAT, body=body), ReplyMode.FINAL)

    assert server.bodies[-1]["messages"] == HELLO
    assert text.text.count(" w") == 4
    assert "".join(streamed).count(" w") == 4
    assert text.verdict.attained
    assert (text.usage.completion_tokens, text.engine) == (4, "vllm-0.32.0")
    assert json.loads(bytes(call.response or b""))["choices"][0]["finish_reason"] == "length"


async def test_http_clients_get_the_servers_responses(tmp_path: Path) -> None:
    body = {"model": MODEL, "messages": HELLO, "max_tokens": 4, "temperature": 0}
    async with (
        fleet_of(tmp_path, 1) as fleet,
        httpx.AsyncClient(base_url=fleet.mesh.spec.gateway_url) as client,
    ):
        ((url, server),) = fleet.servers.items()
        async with httpx.AsyncClient(base_url=url) as directly:
            expected = (await directly.post(CHAT, json=body)).json()
            events = (await directly.post(CHAT, json=body | {"stream": True})).text
        answer = (await client.post(CHAT, json=body | {"slo": {"ttft_s": 5.0}})).json()
        streamed = (await client.post(CHAT, json=body | {"stream": True})).text
        server.refuse = (422, {"error": {"message": "too hot", "param": "temperature"}})
        refused = await client.post(CHAT, json=body)
        absent = await client.post("/v1/embeddings", json={"model": MODEL, "input": "a"})

    result = answer.pop("headway")
    assert (answer, result["instance"], result["slo_attained"]) == (expected, instance(url), True)
    plain = [event.partition(',"headway"')[0].rstrip("}") for event in streamed.split("\n\n")]
    assert plain == [event.rstrip("}") for event in events.split("\n\n")]
    assert streamed.count('"headway"') == 1
    assert refused.status_code == 422
    assert refused.json()["error"]["message"] == "too hot"
    assert absent.status_code == 404  # the server has no such endpoint


async def test_servers_come_and_go(tmp_path: Path) -> None:
    async with fleet_of(tmp_path, 2) as fleet, producing(fleet) as producer:
        first, second = fleet.servers
        for server in fleet.servers.values():
            server.token_s = 0.01

        async def uses(*urls: str) -> bool:
            """Whether 40 concurrent requests are served by exactly these servers."""
            return await instances_of(producer, 40) == {instance(url) for url in urls}

        await eventually(lambda: uses(first, second), within_s=20.0)
        third = await fleet.add(token_s=0.01)
        await eventually(lambda: uses(first, second, third), within_s=20.0)
        fleet.write(second, third)
        await eventually(lambda: uses(second, third), within_s=20.0)


async def test_requests_of_a_lost_server_are_served_elsewhere(tmp_path: Path) -> None:
    body = InferenceRequest(model=MODEL, prompt="a", max_tokens=40, temperature=0.0)
    async with fleet_of(tmp_path, 2) as fleet, producing(fleet) as producer:
        first, second = fleet.servers
        for server in fleet.servers.values():
            server.token_s = 0.02
        finals = [
            asyncio.create_task(final_of(producer, body, ReplyMode.STREAM)) for _ in range(20)
        ]

        async def both_run() -> bool:
            return all(server.open for server in fleet.servers.values())

        await eventually(both_run)
        await fleet.kill(first)
        answers = await asyncio.gather(*finals)

    texts = {answer.text for answer in answers}
    assert len(texts) == 1
    assert {answer.instance_id for answer in answers} >= {instance(second)}
    assert any(answer.attempts.hop for answer in answers)


async def test_two_agents_do_not_share_a_server(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path, agents=2)
    urls = [await fleet.add() for _ in range(3)]
    try:
        await fleet.mesh.start()
        async with producing(fleet) as producer:

            async def all_used() -> bool:
                return len(await instances_of(producer, 30)) == len(urls)

            await eventually(all_used, within_s=20.0)
            names = await instances_of(producer, 30)
    finally:
        await fleet.mesh.stop()
        await fleet.close()

    # Each server is an instance of one of the agents.
    assert len({name.partition("-127")[2] for name in names}) == len(names)


async def test_server_with_another_version_is_another_instance(tmp_path: Path) -> None:
    async with fleet_of(tmp_path, 1) as fleet, producing(fleet) as producer:
        (server,) = fleet.servers.values()
        server.version = "0.33.0"
        body = InferenceRequest(model=MODEL, prompt="a", max_tokens=2)

        async def noticed() -> bool:
            final = await final_of(producer, body, ReplyMode.FINAL)
            return final.engine == "vllm-0.33.0"

        await eventually(noticed, within_s=20.0)
