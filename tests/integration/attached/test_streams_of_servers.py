"""Comments of attached servers, and headers of coding agents, at every door of the light front."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
import pytest_asyncio
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from ops.ports import free_port
from services.mesh.embedded import EmbeddedMesh
from services.mesh.spec import EMBEDDED, AgentSpec, MeshSpec
from shared.contracts.base import ModelName
from shared.contracts.models import ModelEntry
from shared.models.registry import ModelRegistry, write_registry
from shared.models.tiny import make_tiny_models
from shared.runtime.health import serve_http
from tests.clients.coding_agents import CODING_AGENTS, SESSION_FIELDS
from tests.queued import MODEL

pytestmark = pytest.mark.asyncio(loop_scope="module")

SERVED = ModelName("m")
SILENCE_S = 0.6
MESSAGES = [{"role": "user", "content": "hi"}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": MESSAGES, "max_tokens": 2},
    "/v1/completions": {"prompt": "x", "max_tokens": 2},
    "/v1/responses": {"input": "x", "max_output_tokens": 2},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 2},
}
RESPONSE = {"id": "resp_1", "object": "response", "status": "completed", "output": []}
MESSAGE = {"id": "msg_1", "type": "message", "role": "assistant", "content": []}
EVENTS: dict[str, list[dict[str, Any]]] = {
    "/v1/chat/completions": [
        {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]},
        {"choices": [{"index": 0, "delta": {"content": "one"}}]},
        {"choices": [{"index": 0, "delta": {"content": " two"}}]},
        {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]},
    ],
    "/v1/completions": [
        {"choices": [{"index": 0, "text": "one"}]},
        {"choices": [{"index": 0, "text": " two", "finish_reason": "stop"}]},
    ],
    "/v1/responses": [
        {"type": "response.created", "response": RESPONSE | {"status": "in_progress"}},
        {"type": "response.output_text.delta", "delta": "one"},
        {"type": "response.output_text.delta", "delta": " two"},
        {"type": "response.completed", "response": RESPONSE},
    ],
    "/v1/messages": [
        {"type": "message_start", "message": MESSAGE},
        {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "one"}},
        {"type": "ping"},
        {
            "type": "content_block_delta",
            "index": 0,
            "delta": {"type": "text_delta", "text": " two"},
        },
        {
            "type": "message_delta",
            "delta": {"stop_reason": "end_turn"},
            "usage": {"output_tokens": 2},
        },
        {"type": "message_stop"},
    ],
}
WHOLE: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "one two"},
                "finish_reason": "stop",
            }
        ]
    },
    "/v1/completions": {"choices": [{"index": 0, "text": "one two", "finish_reason": "stop"}]},
    "/v1/responses": RESPONSE,
    "/v1/messages": MESSAGE | {"stop_reason": "end_turn"},
}


async def answered(request: Request) -> Response:
    """The canned answer; a stream is silent but for comments for longer than the limit."""
    if not (await request.json()).get("stream"):
        return JSONResponse(WHOLE[request.url.path])
    return StreamingResponse(commented(EVENTS[request.url.path]), media_type="text/event-stream")


async def commented(events: list[dict[str, Any]]) -> AsyncIterator[bytes]:
    for _ in range(5):
        yield b": keep-alive\n\n"
        await asyncio.sleep(SILENCE_S / 2)
    for event in events:
        yield b":\n\n:ping - now\r\n\r\n"
        name = f"event: {event['type']}\n".encode() if "type" in event else b""
        yield name + b": inside\ndata: " + json.dumps(event).encode() + b"\n\n"
        await asyncio.sleep(0.01)
    if "type" not in events[0]:
        yield b": before the end\n\ndata: [DONE]\n\n"
    yield b": after the end\n\n"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def http(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[httpx.AsyncClient]:
    """Client of a mesh with the light front, a simulated engine and an attached server."""
    directory = tmp_path_factory.mktemp("mesh")
    port, registry = free_port(), directory / "registry.json"
    own = ModelRegistry.load(make_tiny_models(directory / "models", weights=False)).entry(MODEL)
    write_registry(registry, [own, ModelEntry(name=SERVED, takes="bodies", max_model_len=512)])
    server = Starlette(
        routes=[
            Route("/health", lambda _request: Response()),
            Route("/version", lambda _request: JSONResponse({"version": "0.32.0"})),
            *(Route(path, answered, methods=["POST"]) for path in BODIES),
        ]
    )
    remote = {"url": f"http://127.0.0.1:{port}", "silence_timeout_s": SILENCE_S}
    agents = (
        AgentSpec(
            instance_id="own",
            settings={
                "models": [MODEL],
                "initial_model": MODEL,
                "engine": {"simulated": {"cold_activation_s": 0.1}},
            },
        ),
        AgentSpec(
            instance_id="attached",
            engine="remote",
            settings={"models": [SERVED], "engine": {"remote": remote}},
        ),
    )
    spec = MeshSpec(
        broker=EMBEDDED,
        registry=registry,
        log_dir=directory / "log",
        gateway_port=free_port(),
        agents=agents,
        planner={"leader": {"settle_s": 0.5, "plan_period_s": 0.1}},
    )
    async with (
        serve_http(server, host="127.0.0.1", port=port),
        EmbeddedMesh(spec),
        httpx.AsyncClient(base_url=spec.gateway_url, timeout=30.0) as client,
    ):
        yield client


def data_in(stream: str) -> list[dict[str, Any]]:
    """The JSON of a stream's events, without what the mesh adds."""
    lines = [line[6:] for line in stream.splitlines() if line.startswith("data: ")]
    found = [json.loads(line) for line in lines if line != "[DONE]"]
    return [{name: part for name, part in each.items() if name != "headway"} for each in found]


async def test_comments_are_signs_of_life_and_leave_the_events_as_they_are(http: httpx.AsyncClient):
    async with asyncio.TaskGroup() as group:
        asked = {
            path: group.create_task(http.post(path, json={"model": SERVED, "stream": True, **body}))
            for path, body in BODIES.items()
        }

    for path, task in asked.items():
        answer = task.result()
        assert answer.status_code == 200, (path, answer.text)
        assert data_in(answer.text) == EVENTS[path], path
        assert '"headway":' in answer.text
        assert ": inside" in answer.text


async def test_headers_and_fields_of_coding_agents_change_nothing(http: httpx.AsyncClient):
    own = [path for path in BODIES if path.endswith("completions")]
    for model, paths in ((SERVED, [*BODIES]), (MODEL, own)):
        for path in paths:
            for agent, headers in CODING_AGENTS.items():
                for fields in ({}, SESSION_FIELDS):
                    asked = {"model": model, **BODIES[path], **fields}
                    answer = await http.post(path, json=asked, headers=headers)
                    assert answer.status_code == 200, (agent, path, model, answer.text)
