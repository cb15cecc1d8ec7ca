"""The HTTP surface of the simulated servers of `ops.bench doors`, and what the client reads."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp
import msgspec
import pytest
from aiohttp.test_utils import TestServer

from ops.bench.doors_client import Client
from ops.bench.doors_fronts import DOORS, Fixed
from ops.bench.doors_load import ServerCounts, counts_of
from ops.bench.doors_scheduling import ServerLimits, ServerScheduler, Speed, answer_text
from ops.bench.doors_server import PLAIN, VLLM, Counts, SimulatedServer
from ops.bench.doors_traffic import chat_and_batch, sessions
from services.agent.backends.remote.telemetry import load_of

BODY = {"model": "m", "messages": [{"role": "user", "content": "a b c"}], "max_tokens": 12}
STREAMED = BODY | {"stream": True, "stream_options": {"include_usage": True}}
CHATS = "/v1/chat/completions"


@asynccontextmanager
async def a_server(kind: str = VLLM, scale: float = 0.01) -> AsyncIterator[aiohttp.ClientSession]:
    """Context with a client of a running server, whose base is the server's address."""
    scheduler = ServerScheduler(ServerLimits(max_running=8), Speed(scale=scale))
    server = SimulatedServer("m", kind, scheduler, 3750)
    iterating = asyncio.create_task(server.iterate())
    async with (
        TestServer(server.application()) as running,
        aiohttp.ClientSession(running.make_url("/")) as http,
    ):
        yield http
    iterating.cancel()


async def counts(http: aiohttp.ClientSession) -> Counts:
    async with http.get("/count") as response:
        return msgspec.json.decode(await response.read(), type=Counts)


async def test_an_answer_is_streamed_token_by_token_with_its_usage():
    async with a_server() as http, http.post(CHATS, json=STREAMED | {"priority": 2}) as response:
        text = (await response.read()).decode()
        found = await counts(http)

    events = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    chunks = [msgspec.json.decode(each) for each in events[:-1]]
    said = [each["choices"][0] for each in chunks if each["choices"]]
    assert events[-1] == "[DONE]"
    assert "".join(each["delta"]["content"] for each in said) == answer_text(12)
    assert [each["finish_reason"] for each in said] == [None] * 11 + ["length"]
    assert chunks[-1]["usage"] == {
        "prompt_tokens": 3,
        "completion_tokens": 12,
        "total_tokens": 15,
        "prompt_tokens_details": {"cached_tokens": 0},
    }
    assert (found.prompt_tokens, found.answer_tokens, found.with_priority) == (3, 12, 1)


@pytest.mark.parametrize("path", [CHATS, "/v1/completions"])
async def test_an_answer_comes_whole(path: str):
    async with a_server() as http, http.post(path, json=BODY | {"prompt": "a b c"}) as response:
        choice = (await response.json())["choices"][0]

    said = choice["message"]["content"] if path == CHATS else choice["text"]
    assert (said, choice["finish_reason"]) == (answer_text(12), "length")


async def test_a_stock_server_has_the_metrics_that_an_agent_reads():
    async with a_server() as http:
        async with http.post(CHATS, json=BODY):
            pass
        async with http.get("/metrics") as response:
            load = load_of(await response.text())

    assert load is not None
    assert (load.running, load.waiting, load.kv_capacity_tokens) == (0, 0, 60_000)
    assert (load.iterations, load.iteration_tokens) == (12, 14)


@pytest.mark.parametrize("path", ["/metrics", "/version"])
async def test_a_plain_server_has_neither_metrics_nor_version(path: str):
    async with a_server(PLAIN) as http, http.get(path) as response:
        assert response.status == 404


async def test_a_plain_server_ignores_priorities():
    async with a_server(PLAIN) as http:
        async with http.post(CHATS, json=BODY | {"priority": 2}) as response:
            assert response.status == 200
        assert (await counts(http)).with_priority == 0


async def test_the_client_gets_every_token_of_a_load():
    load = sessions(chat_and_batch, rate_rps=40.0, seconds=0.5, seed=1)
    async with a_server(scale=0.001) as http:
        base = str(http._base_url).rstrip("/")
        client = Client(http=http, door=DOORS["round robin"], choice=Fixed({"m": base}))
        await client.serve(load, patience_s=20.0)
        found = await counts(http)

    assert all(answer.outcome.finished for answer in client.answers)
    assert len(client.answers) == len(load)
    assert sum(answer.outcome.num_tokens for answer in client.answers) == found.answer_tokens
    assert sum(answer.prompt_tokens for answer in client.answers) == found.prompt_tokens
    assert found.prompt_tokens == sum(session.prompts_tokens for session in load)


async def test_counts_of_a_killed_server_are_kept():
    async with aiohttp.ClientSession() as http:
        following = ServerCounts(http, [])
        following.seen("u", Counts(prompt_tokens=100, answer_tokens=10))
        following.seen("u", Counts(prompt_tokens=30, answer_tokens=3))
        following.seen("u", Counts(prompt_tokens=50, answer_tokens=5))

    assert following.total() == Counts(prompt_tokens=150, answer_tokens=15)


def test_counts_of_a_real_server_are_in_its_metrics():
    text = (
        "# HELP vllm:prompt_tokens_total x\n"
        'vllm:num_requests_running{engine="0",model_name="m"} 2.0\n'
        'vllm:prompt_tokens_total{engine="0",model_name="m"} 1200.0\n'
        'vllm:prefix_cache_hits_total{engine="0",model_name="m"} 160.0\n'
        'vllm:generation_tokens_total{engine="0",model_name="m"} 31.0\n'
    )

    assert counts_of(text) == Counts(
        running=2, prompt_tokens=1200, cached_tokens=160, answer_tokens=31
    )
