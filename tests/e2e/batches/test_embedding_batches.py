"""Lines of batches for embeddings of the mesh's own engines are answered as over HTTP."""

import asyncio
import base64
import json
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import httpx
import msgspec
import numpy as np
import openai
import pytest
import pytest_asyncio
from openai.types import Batch

from services.mesh.processes import ProcessMesh
from shared.api.calls import EMBEDDINGS
from shared.api.pooling import MAX_INPUTS
from shared.contracts.ingress import CallRequest
from shared.contracts.requests import ReplyMode, RequestCompleted, RequestFailed
from shared.models.registry import ModelRegistry, write_registry
from shared.models.tiny import TINY_MODELS, TINY_POOLING_MODELS, make_tiny_models
from tests.brokers import RabbitServer, eventually, rabbit_targets
from tests.contract.calls.call_engines import DIMENSIONS, EMBED, embedding_models
from tests.e2e.commands import run
from tests.e2e.meshes import LLAMA, mesh_spec, producer_of
from tests.e2e.pooling.vectors import TEXTS, TOLERANCE, close
from tests.stores import migrated_settings

pytestmark = [
    pytest.mark.slow,
    pytest.mark.rabbitmq,
    pytest.mark.vllm,
    pytest.mark.asyncio(loop_scope="module"),
]
CLASSIFY = "tiny-classify"
LEASE_S = 2.0
NUM_KILLED_LINES = 600
KILLED = ("agent-a0", "gateway")
PATIENCE_S = 240.0
Body = dict[str, Any]
GOOD: list[Body] = [
    {"input": TEXTS[0]},
    {"input": TEXTS},
    {"input": TEXTS, "encoding_format": "float"},
    {"input": TEXTS, "encoding_format": "base64"},
    {"input": TEXTS, "dimensions": DIMENSIONS[0], "user": "someone"},
    {"input": [10, 20, 30]},
    {"input": [[10, 20, 30], [40, 50]]},
    {"input": [[10, 20 + number % 400] for number in range(MAX_INPUTS)], "dimensions": 8},
    {"input": TEXTS, "truncate_prompt_tokens": 2},
    {"messages": [{"role": "user", "content": "hello"}]},
]
BAD: list[Body] = [
    {"input": TEXTS, "dimensions": 9},
    {"input": TEXTS, "encoding_format": "none"},
    {"input": []},
    {"input": "word " * 5000},
    {"input": [[10, 100_000]]},
    {"input": {"text": "a"}},
    {"input": [[10]] * (MAX_INPUTS + 1)},
]
"""Bodies that are refused over HTTP also."""


@dataclass(frozen=True, slots=True)
class Rig:
    mesh: ProcessMesh
    http: httpx.AsyncClient
    client: openai.AsyncOpenAI


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def rig(
    rabbit_servers: Callable[[str], RabbitServer], tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Rig]:
    """A mesh with one vLLM engine, on which the pooling model is active, and a store."""
    directory = tmp_path_factory.mktemp("embeddings")
    settings = await migrated_settings(None, directory / "data")
    store = msgspec.to_builtins(settings)
    others = {LLAMA: TINY_MODELS[LLAMA], CLASSIFY: TINY_POOLING_MODELS[CLASSIFY]}
    registries = (
        embedding_models(directory / "embed"),
        make_tiny_models(directory / "others", weights=False, models=others),
    )
    loaded = map(ModelRegistry.load, registries)
    registry = directory / "registry.json"
    write_registry(registry, [each.entry(name) for each in loaded for name in each.bases])
    with rabbit_servers(rabbit_targets()[0]).fresh_url() as url:
        spec = mesh_spec(
            url,
            directory,
            engine="vllm",
            agents=1,
            registry=registry,
            agent_settings={"initial_model": EMBED},
            gateway={"store": store, "batches": {"lease_s": LEASE_S}},
            planner={"store": store},
        )
        async with (
            ProcessMesh(spec) as mesh,
            httpx.AsyncClient(base_url=spec.gateway_url, timeout=240.0) as http,
            openai.AsyncOpenAI(
                base_url=f"{spec.gateway_url}/v1", api_key="none", max_retries=0, timeout=60.0
            ) as client,
        ):
            yield Rig(mesh, http, client)


def a_line(number: int, body: Body) -> bytes:
    line = {"custom_id": f"c{number}", "method": "POST", "url": EMBEDDINGS, "body": body}
    return json.dumps(line).encode() + b"\n"


async def created(rig: Rig, bodies: list[Body]) -> Batch:
    """A batch of *bodies*."""
    content = b"".join(a_line(number, body) for number, body in enumerate(bodies))
    file = await rig.client.files.create(file=("lines.jsonl", content), purpose="batch")
    return await rig.client.batches.create(
        input_file_id=file.id, endpoint=EMBEDDINGS, completion_window="24h"
    )


async def ended(rig: Rig, batch: Batch) -> Batch:
    """The batch, once it has ended."""
    async with asyncio.timeout(PATIENCE_S):
        while batch.status in ("validating", "in_progress", "finalizing"):
            await asyncio.sleep(0.2)
            with suppress(openai.APIConnectionError, openai.InternalServerError):
                batch = await rig.client.batches.retrieve(batch.id)
    return batch


async def lines_of(rig: Rig, batch: Batch) -> list[Any]:
    """Lines of the output and error files of a completed batch."""
    assert batch.status == "completed"
    lines: list[Any] = []
    for file_id in filter(None, (batch.output_file_id, batch.error_file_id)):
        text = (await rig.client.files.content(file_id)).text
        lines += map(json.loads, text.splitlines())
    return lines


async def results_of(rig: Rig, bodies: list[Body]) -> dict[str, Any]:
    """Run a batch of *bodies*; `custom_id` -> its line of the output or error file."""
    lines = await lines_of(rig, await ended(rig, await created(rig, bodies)))
    assert len(lines) == len(bodies)
    return {line["custom_id"]: line for line in lines}


async def test_lines_are_answered_as_over_http(rig: Rig):
    bodies = [{"model": EMBED} | body for body in GOOD]
    results = await results_of(rig, bodies)
    for number, body in enumerate(bodies):
        answer = await rig.http.post(EMBEDDINGS, json=body)
        response = results[f"c{number}"]["response"]

        assert (answer.status_code, response["status_code"]) == (200, 200)
        if body.get("encoding_format") == "base64":
            assert close(unpacked(response["body"]), unpacked(answer.json()))
        else:
            assert close(response["body"], answer.json())


def unpacked(response: Any) -> list[list[float]]:
    """The vectors of a response in base64."""
    packed = (base64.b64decode(each["embedding"]) for each in response["data"])
    return [np.frombuffer(each, "<f4").tolist() for each in packed]


async def test_lines_are_refused_as_over_http(rig: Rig):
    bodies = [{"model": EMBED} | body for body in BAD]
    results = await results_of(rig, bodies)
    for number, body in enumerate(bodies):
        expected = (await rig.http.post(EMBEDDINGS, json=body)).json()["error"]
        response = results[f"c{number}"]["response"]
        error = response["body"]["error"]

        assert response["status_code"] == 400
        assert (error["message"], error["param"]) == (expected["message"], expected["param"])


async def test_models_of_other_tasks_are_refused_by_name(rig: Rig):
    bodies = [{"model": name, "input": "a"} for name in (LLAMA, CLASSIFY)]
    bodies.append({"model": EMBED, "input": "a", "encoding_format": "bytes"})
    results = await results_of(rig, bodies)
    errors = [results[f"c{number}"]["error"] for number in range(2)]
    refused = results["c2"]["response"]["body"]["error"]

    assert [error["code"] for error in errors] == ["unsupported_task"] * 2
    assert [error["param"] for error in errors] == ["body.model"] * 2
    assert (refused["code"], refused["param"]) == ("unsupported_parameter", "encoding_format")


async def test_producers_get_the_response_of_http(rig: Rig):
    body = {"model": EMBED, "input": TEXTS}
    answer = await rig.http.post(EMBEDDINGS, json=body)
    long = body | {"input": "word " * 5000}
    async with producer_of(rig.mesh) as producer, asyncio.timeout(60):
        finals = []
        for asked in (body, long):
            raw = msgspec.Raw(json.dumps(asked).encode())
            request = CallRequest(endpoint=EMBEDDINGS, body=raw)
            generation = await producer.submit(request, reply=ReplyMode.FINAL)
            finals.append(await generation.final())
    final, failed = finals

    assert isinstance(final, RequestCompleted)
    assert isinstance(final.response, msgspec.Raw)
    assert close(json.loads(bytes(final.response)), answer.json())
    assert final.usage.prompt_tokens == answer.json()["usage"]["prompt_tokens"]
    assert final.usage.completion_tokens == 0
    assert isinstance(failed, RequestFailed)
    assert failed.error.status == 400
    assert len(answer.json()["data"][0]["embedding"]) == 128
    assert abs(np.linalg.norm(answer.json()["data"][0]["embedding"]) - 1) < TOLERANCE


async def test_submit_prints_the_response(rig: Rig):
    body = {"model": EMBED, "input": ["a", "b"], "encoding_format": "base64"}
    answer = await rig.http.post(EMBEDDINGS, json=body)
    verb = ("mesh", "submit", "--endpoint", EMBEDDINGS, "--body", json.dumps(body))
    ran = await run(rig.mesh, *verb)

    assert ran.code == 0, ran.err
    assert close(unpacked(ran.json), unpacked(answer.json()))
    assert ran.json["usage"] == answer.json()["usage"]


def num_answered(rig: Rig, batch: Batch) -> int:
    """Number of lines that the agent has answered, by its log; it counts repeats."""
    log = rig.mesh.processes["agent-a0"].log_file.read_text().splitlines()
    return sum('"request.completed"' in line and batch.id in line for line in log)


async def test_every_line_has_its_vector_once_though_agent_and_gateway_are_killed(rig: Rig):
    bodies: list[Body] = [
        {"model": EMBED, "input": f"line {number}"} for number in range(NUM_KILLED_LINES)
    ]
    batch = await created(rig, bodies)
    enough = NUM_KILLED_LINES // 5
    await eventually(lambda: num_answered(rig, batch) >= enough, within_s=PATIENCE_S)
    for name in KILLED:
        await rig.mesh.kill(name)
    at_kill = num_answered(rig, batch)
    for name in KILLED:
        await rig.mesh.restart(name)
    batch = await ended(rig, batch)
    at_end = num_answered(rig, batch)
    lines = await lines_of(rig, batch)
    checked = range(0, NUM_KILLED_LINES, NUM_KILLED_LINES // 10)
    answers = [await rig.http.post(EMBEDDINGS, json=bodies[number]) for number in checked]
    found = {line["custom_id"]: line["response"]["body"] for line in lines}

    # No agent ran when the gateway was killed, and the one that was started again has answered
    # lines: some were left.
    assert at_end > at_kill
    assert [line["custom_id"] for line in lines] == [f"c{n}" for n in range(NUM_KILLED_LINES)]
    for number, answer in zip(checked, answers, strict=True):
        assert close(found[f"c{number}"], answer.json())
