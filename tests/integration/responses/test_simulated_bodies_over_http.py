"""Responses and messages that simulated engines answer, read by stock clients over HTTP."""

import json
from collections.abc import AsyncIterator
from typing import Any

import anthropic
import httpx
import msgspec
import openai
import pytest
import pytest_asyncio

from ops.ports import free_port
from services.mesh.embedded import EmbeddedMesh
from services.mesh.spec import EMBEDDED, AgentSpec, MeshSpec
from shared.models.tiny import make_tiny_models
from tests.brokers import eventually
from tests.queued import MODEL
from tests.stores import migrated_settings

pytestmark = pytest.mark.asyncio(loop_scope="module")
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def url(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[str]:
    directory = tmp_path_factory.mktemp("mesh")
    store = msgspec.to_builtins(await migrated_settings(None, directory / "data"))
    fast = {"simulated": {"time_scale": 0.1, "cold_activation_s": 0.1}}
    spec = MeshSpec(
        broker=EMBEDDED,
        registry=make_tiny_models(directory / "models", weights=False),
        log_dir=directory / "log",
        gateway_port=free_port(),
        gateway={"store": store},
        planner={"store": store},
        agents=(AgentSpec(instance_id="a", settings={"engine": fast}),),
    )
    async with EmbeddedMesh(spec), httpx.AsyncClient(base_url=spec.gateway_url) as client:

        async def is_served() -> bool:
            found = (await client.get(f"/v1/models/{MODEL}")).json()
            return bool(found["owned_by"] == "headway-simulated")

        await eventually(is_served)
        yield spec.gateway_url


async def test_a_response_is_whole_and_streamed(url: str):
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="any") as client:
        asked: dict[str, Any] = {"model": MODEL, "input": "Hello", "max_output_tokens": 12}
        whole = await client.responses.create(**asked, temperature=0)
        texts, last = [], None
        async for event in await client.responses.create(**asked, temperature=0, stream=True):
            if event.type == "response.output_text.delta":
                texts.append(event.delta)
            last = event

    assert whole.output_text
    assert whole.usage is not None
    assert whole.usage.output_tokens == 12
    assert whole.status == "incomplete"
    assert "".join(texts) == whole.output_text
    assert last is not None
    assert last.type == "response.incomplete"


async def test_a_response_continues_an_earlier_one(url: str):
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="any") as client:
        first = await client.responses.create(
            model=MODEL, input="Hello", max_output_tokens=8, store=True
        )
        second = await client.responses.create(
            model=MODEL, input="And?", max_output_tokens=8, previous_response_id=first.id
        )

    assert first.usage is not None
    assert second.usage is not None
    assert second.usage.input_tokens > first.usage.input_tokens


async def test_a_message_calls_the_demanded_tool(url: str):
    asked: dict[str, Any] = {
        "model": MODEL,
        "max_tokens": 12,
        "messages": [{"role": "user", "content": "What is the weather?"}],
        "tools": [{"name": "weather", "input_schema": SCHEMA}],
        "tool_choice": {"type": "tool", "name": "weather"},
    }
    cold = {"temperature": 0}
    async with anthropic.AsyncAnthropic(base_url=url, api_key="any") as client:
        whole = await client.messages.create(**asked, extra_body=cold)
        async with client.messages.stream(**asked, extra_body=cold) as stream:
            streamed = await stream.get_final_message()

    (call,) = whole.content
    assert call.type == "tool_use"
    assert set(call.input) == {"city"}
    assert whole.stop_reason == streamed.stop_reason == "tool_use"
    assert json.dumps(streamed.content[0].input) == json.dumps(call.input)


async def test_an_invalid_response_names_its_field(url: str):
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="any") as client:
        with pytest.raises(openai.BadRequestError) as refused:
            await client.responses.create(model=MODEL, input="Hello", max_output_tokens=0)

    assert refused.value.param == "max_tokens"  # as vLLM names it
