"""vLLM's parameters pass through the mesh to vLLM's application and engine."""

import json
import re
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx
import msgspec
import pytest
import pytest_asyncio

from services.mesh.processes import ProcessMesh
from tests.brokers import RabbitServer, eventually, rabbit_targets
from tests.e2e.meshes import LLAMA, mesh_spec, tool_registry
from tests.stores import migrated_settings

pytestmark = [
    pytest.mark.slow,
    pytest.mark.rabbitmq,
    pytest.mark.vllm,
    pytest.mark.asyncio(loop_scope="module"),
]
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"x": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["x"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "pick", "parameters": SCHEMA, "strict": True}}
CHAT: dict[str, Any] = {
    "model": LLAMA,
    "messages": [{"role": "user", "content": "hello"}],
    "temperature": 0,
    "max_tokens": 300,
}
COMPLETION: dict[str, Any] = {"model": LLAMA, "prompt": "hello", "temperature": 0, "max_tokens": 6}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def http(
    rabbit_servers: Callable[[str], RabbitServer], tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[httpx.AsyncClient]:
    """A client of a mesh with one vLLM engine."""
    directory = tmp_path_factory.mktemp("mesh")
    settings = await migrated_settings(None, directory / "data")
    store = msgspec.to_builtins(settings)
    with rabbit_servers(rabbit_targets()[0]).fresh_url() as url:
        spec = mesh_spec(
            url,
            directory,
            engine="vllm",
            agents=1,
            registry=tool_registry(directory / "models"),
            gateway={"store": store},
            planner={"store": store},
        )
        async with (
            ProcessMesh(spec),
            httpx.AsyncClient(base_url=spec.gateway_url, timeout=120.0) as client,
        ):
            yield client


async def answered(http: httpx.AsyncClient, path: str, body: dict[str, Any]) -> dict[str, Any]:
    answer = await http.post(path, json=body)
    assert answer.status_code == 200, answer.text
    choice: dict[str, Any] = answer.json()["choices"][0]
    return choice


async def test_answer_follows_its_schema(http: httpx.AsyncClient):
    wanted = {"type": "json_schema", "json_schema": {"name": "n", "strict": True, "schema": SCHEMA}}
    choice = await answered(http, "/v1/chat/completions", CHAT | {"response_format": wanted})

    assert 0 <= json.loads(choice["message"]["content"])["x"] <= 99


async def test_named_tool_is_called(http: httpx.AsyncClient):
    named = {"type": "function", "function": {"name": "pick"}}
    choice = await answered(
        http, "/v1/chat/completions", CHAT | {"tools": [TOOL], "tool_choice": named}
    )

    (call,) = choice["message"]["tool_calls"]
    assert call["function"]["name"] == "pick"
    assert 0 <= json.loads(call["function"]["arguments"])["x"] <= 99


async def test_answer_follows_a_regular_expression(http: httpx.AsyncClient):
    body = CHAT | {"structured_outputs": {"regex": "[a-f]{3,9}-[0-9]{2}"}}
    choice = await answered(http, "/v1/chat/completions", body)

    assert re.fullmatch("[a-f]{3,9}-[0-9]{2}", choice["message"]["content"])


async def test_only_allowed_tokens_are_generated(http: httpx.AsyncClient):
    body = COMPLETION | {"allowed_token_ids": [40, 41], "return_token_ids": True}
    choice = await answered(http, "/v1/completions", body)

    assert set(choice["token_ids"]) <= {40, 41}


async def test_log_probabilities_of_whole_and_streamed_answers_are_equal(http: httpx.AsyncClient):
    body = COMPLETION | {"logprobs": 2}
    whole = (await answered(http, "/v1/completions", body))["logprobs"]
    streamed: list[float] = []
    async with http.stream("POST", "/v1/completions", json=body | {"stream": True}) as answer:
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                for choice in json.loads(line.removeprefix("data: "))["choices"]:
                    streamed += (choice["logprobs"] or {"token_logprobs": []})["token_logprobs"]

    assert len(whole["token_logprobs"]) == len(whole["top_logprobs"]) == 6
    assert streamed == pytest.approx(whole["token_logprobs"], abs=1e-3)


async def test_log_probabilities_of_the_prompt_come_once(http: httpx.AsyncClient):
    choice = await answered(http, "/v1/completions", COMPLETION | {"prompt_logprobs": 1})

    assert len(choice["prompt_logprobs"]) == 4
    assert choice["prompt_logprobs"][0] is None


async def test_invalid_grammar_is_refused(http: httpx.AsyncClient):
    answer = await http.post(
        "/v1/chat/completions", json=CHAT | {"structured_outputs": {"regex": "("}}
    )

    assert answer.status_code == 400
    assert "grammar" in answer.json()["error"]["message"].lower()


WHOLE: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": CHAT | {"max_tokens": 20, "temperature": 1, "n": 2},
    "/v1/completions": COMPLETION | {"prompt": ["a", "b"], "temperature": 1},
    "/v1/responses": {"model": LLAMA, "input": "hello", "max_output_tokens": 12},
    "/v1/messages": {
        "model": LLAMA,
        "messages": [{"role": "user", "content": "hello"}],
        "max_tokens": 12,
    },
}
"""Path -> a body with a random answer."""


@pytest.mark.parametrize("path", WHOLE)
async def test_whole_answers_are_repeated_byte_by_byte(http: httpx.AsyncClient, path: str):
    """Also their ids and times."""
    first, second, other = [
        await http.post(path, json=WHOLE[path], headers={"idempotency-key": f"{path} {key}"})
        for key in ("one", "one", "two")
    ]

    assert first.status_code == 200, first.text
    assert first.content == second.content
    assert first.json()["id"] != other.json()["id"]
    assert first.json()["headway"]["request_id"] == first.headers["x-headway-request-id"]


@pytest.mark.parametrize("path", WHOLE)
async def test_answer_that_is_collected_later_is_that_of_a_waiting_client(
    http: httpx.AsyncClient, path: str
):
    key = {"idempotency-key": f"{path} later"}
    accepted = await http.post(path, json=WHOLE[path], headers=key | {"prefer": "respond-async"})
    assert accepted.status_code == 202, accepted.text
    found: dict[str, Any] = {}

    async def has_ended() -> bool:
        nonlocal found
        found = (await http.get(accepted.headers["location"])).json()
        return found["ended_at"] is not None

    await eventually(has_ended)
    waited = await http.post(path, json=WHOLE[path], headers=key)

    assert (found["status"], found["endpoint"]) == ("completed", path)
    assert found["result"] == waited.json()
