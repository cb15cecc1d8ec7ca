"""What was open when an embedded mesh stopped, whose queues were in memory."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from ops.ports import free_port
from services.mesh.embedded import EmbeddedMesh
from services.mesh.spec import EMBEDDED, AgentSpec, MeshSpec
from shared.contracts.models import ModelEntry
from shared.models.registry import write_registry
from shared.models.tiny import make_tiny_models
from shared.runtime.health import serve_http
from tests.integration.gateway_rig import http_client
from tests.queued import MODEL
from tests.stores import migrated_settings

COMPLETIONS, FILES, BATCHES = "/v1/completions", "/v1/files", "/v1/batches"
BODY = {"model": MODEL, "prompt": "hello", "max_tokens": 4}
STUCK, FAST = 10_000.0, 0.1


@contextlib.asynccontextmanager
async def opened_mesh(
    directory: Path, *, time_scale: float = FAST, server: str | None = None
) -> AsyncIterator[httpx.AsyncClient]:
    """
    Client of a mesh with the store in *directory*.

    Args:
        directory: Directory of all files.
        time_scale: Factor of the times of its engine.
        server: Address of a server that serves instead of an engine.
    """
    store = msgspec.to_builtins(await migrated_settings(None, directory / "data"))
    agent = {
        "initial_model": MODEL,
        "drain_timeout_s": 0.1,
        "engine": {"simulated": {"time_scale": time_scale, "cold_activation_s": 0.0}},
    }
    spec_of_agent = AgentSpec(instance_id="a", settings=agent)
    registry = make_tiny_models(directory / "models", weights=False)
    if server is not None:
        registry = directory / "registry.json"
        write_registry(registry, [ModelEntry(name=MODEL, takes="bodies", max_model_len=512)])
        remote = {"models": [MODEL], "engine": {"remote": {"url": server}}, "drain_timeout_s": 0.1}
        spec_of_agent = AgentSpec(instance_id="a", engine="remote", settings=remote)
    spec = MeshSpec(
        broker=EMBEDDED,
        registry=registry,
        log_dir=directory / "log",
        gateway_port=free_port(),
        gateway={
            "store": store,
            "batches": {"poll_s": 0.05, "lease_s": 1.0},
            "drain_timeout_s": 0.1,
        },
        planner={"store": store, "leader": {"settle_s": 0.5, "plan_period_s": 0.1}},
        agents=(spec_of_agent,),
    )
    async with EmbeddedMesh(spec), http_client() as http:
        http.base_url = httpx.URL(spec.gateway_url)
        yield http


async def found(http: httpx.AsyncClient, path: str, field: str) -> dict[str, Any]:
    """The object at *path*, as soon as it has *field*."""
    async with asyncio.timeout(60):
        while True:
            answer: dict[str, Any] = (await http.get(path)).json()
            if answer.get(field) is not None:
                return answer
            await asyncio.sleep(0.05)


async def test_open_work_runs_or_fails_after_the_next_start(tmp_path: Path):
    later = {"idempotency-key": "later", "prefer": "respond-async"}
    lines = [
        {"custom_id": f"line-{n}", "method": "POST", "url": COMPLETIONS, "body": BODY}
        for n in range(2)
    ]
    content = b"\n".join(map(msgspec.json.encode, lines))
    async with opened_mesh(tmp_path, time_scale=STUCK) as http:
        file = await http.post(
            FILES, data={"purpose": "batch"}, files={"file": ("lines.jsonl", content)}
        )
        asked = {"input_file_id": file.json()["id"], "endpoint": COMPLETIONS}
        made = await http.post(BATCHES, json=asked | {"completion_window": "24h"})
        batch = f"{BATCHES}/{made.json()['id']}"
        answer = await http.post(COMPLETIONS, json=BODY, headers=later)
        request = answer.headers["location"]
        await found(http, request, "grouped_at")
        await found(http, f"/v1/requests/{made.json()['id']}-000001", "grouped_at")
        with contextlib.suppress(httpx.ReadTimeout):
            await http.post(
                COMPLETIONS, json=BODY, headers={"idempotency-key": "plain"}, timeout=0.5
            )

    async with opened_mesh(tmp_path, time_scale=FAST) as http:
        ended = await found(http, request, "ended_at")
        plain = await http.post(COMPLETIONS, json=BODY, headers={"idempotency-key": "plain"})
        completed = await found(http, batch, "completed_at")

    assert ended["status"] == "failed"
    assert ended["error"]["code"] == "mesh_stopped"
    assert "another Idempotency-Key" in ended["error"]["message"]
    assert plain.status_code == 200, plain.text
    assert completed["request_counts"] == {"total": 2, "completed": 2, "failed": 0}


async def test_a_background_response_runs_again_after_the_next_start(tmp_path: Path):
    response = {"id": "resp_1", "object": "response", "status": "completed", "output": []}
    events = [
        {"type": "response.created", "response": response | {"status": "in_progress"}},
        {"type": "response.completed", "response": response},
    ]
    asked, may_answer = asyncio.Event(), asyncio.Event()

    async def stream() -> AsyncIterator[bytes]:
        asked.set()
        await may_answer.wait()
        for event in events:
            yield b"data: " + msgspec.json.encode(event) + b"\n\n"

    async def answered(_request: Request) -> Response:
        return StreamingResponse(stream(), media_type="text/event-stream")

    routes = [
        Route("/health", lambda _request: Response()),
        Route("/version", lambda _request: JSONResponse({"version": "0.32.0"})),
        Route("/v1/responses", answered, methods=["POST"]),
    ]
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    async with serve_http(Starlette(routes=routes), host="127.0.0.1", port=port):
        async with opened_mesh(tmp_path, server=url) as http:
            body = {"model": MODEL, "input": "hello", "background": True}
            made = (await http.post("/v1/responses", json=body)).json()
            await asyncio.wait_for(asked.wait(), 30.0)
        may_answer.set()
        async with opened_mesh(tmp_path, server=url) as http, asyncio.timeout(60):
            while (await http.get(f"/v1/responses/{made['id']}")).json()["status"] != "completed":
                await asyncio.sleep(0.1)
