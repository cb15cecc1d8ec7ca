"""Requests in the form of HTTP over AMQP have the responses that HTTP has."""

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
import pytest_asyncio

from services.agent.verbs.cli_lso import order
from services.mesh.processes import ProcessMesh
from shared.contracts.base import InstanceId, RequestId
from shared.contracts.control import EvictRequest, LsoAnswered, LsoOutcome
from shared.contracts.ingress import CallRequest
from shared.contracts.qos import Slo
from shared.contracts.requests import Final, ReplyMode, RequestCompleted, RequestFailed
from shared.producer.producer import Producer
from tests.brokers import RabbitServer, rabbit_targets
from tests.contract.calls.call_cases import CASES, CHAT, COMPLETIONS, TALK
from tests.contract.calls.call_engines import stable
from tests.e2e.commands import run
from tests.e2e.meshes import LLAMA, mesh_spec, producer_of, tool_registry

pytestmark = [
    pytest.mark.slow,
    pytest.mark.rabbitmq,
    pytest.mark.vllm,
    pytest.mark.asyncio(loop_scope="module"),
]
OF_HTTP = ("headway",)
"""Fields of responses that the gateway adds."""
ROOT = Path(__file__).parent.parent.parent


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def mesh(
    rabbit_servers: Callable[[str], RabbitServer], tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[ProcessMesh]:
    """A mesh with one vLLM engine and the front `vllm`."""
    directory = tmp_path_factory.mktemp("mesh")
    with rabbit_servers(rabbit_targets()[0]).fresh_url() as url:
        spec = mesh_spec(
            url,
            directory,
            engine="vllm",
            agents=1,
            registry=tool_registry(directory / "models"),
        )
        async with ProcessMesh(spec) as running:
            yield running


@pytest_asyncio.fixture(loop_scope="module")
async def producer(mesh: ProcessMesh) -> AsyncIterator[Producer]:
    async with producer_of(mesh) as opened:
        yield opened


@pytest_asyncio.fixture(loop_scope="module")
async def http(mesh: ProcessMesh) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=mesh.spec.gateway_url, timeout=120.0) as client:
        yield client


def call(endpoint: str, body: dict[str, Any], **fields: Any) -> CallRequest:
    return CallRequest(endpoint=endpoint, body=msgspec.Raw(json.dumps(body).encode()), **fields)


async def final_of(producer: Producer, request: CallRequest) -> Final:
    async with asyncio.timeout(120):
        generation = await producer.submit(request, reply=ReplyMode.FINAL)
        return await generation.final()


def response_of(final: Final) -> Any:
    assert isinstance(final, RequestCompleted), final
    assert isinstance(final.response, msgspec.Raw)
    return json.loads(bytes(final.response))


@pytest.mark.parametrize("name", CASES)
async def test_response_is_that_of_http(producer: Producer, http: httpx.AsyncClient, name: str):
    case = CASES[name]
    # Without a seed, random answers differ from request to request.
    body = case.body | {"model": LLAMA} | ({} if case.body.get("temperature") == 0 else {"seed": 5})
    answer = await http.post(case.endpoint, json=body)
    assert answer.status_code == 200, answer.text
    expected = {name: value for name, value in answer.json().items() if name not in OF_HTTP}

    assert stable(response_of(await final_of(producer, call(case.endpoint, body)))) == stable(
        expected
    )


@pytest.mark.parametrize(
    ("endpoint", "body"),
    [
        (CHAT, {"messages": TALK, "temperature": "hot"}),
        (CHAT, {"messages": TALK, "top_p": 7}),
        (COMPLETIONS, {"prompt": "x", "max_tokens": 10**6}),
    ],
)
async def test_invalid_body_is_refused_as_over_http(
    producer: Producer, http: httpx.AsyncClient, endpoint: str, body: dict[str, Any]
):
    body = body | {"model": LLAMA}
    answer = await http.post(endpoint, json=body)
    failed = await final_of(producer, call(endpoint, body))

    assert isinstance(failed, RequestFailed)
    expected = answer.json()["error"]
    assert failed.error.status == answer.status_code == 400
    assert (failed.error.message, failed.error.param) == (expected["message"], expected["param"])


async def test_evicted_call_streams_each_token_of_each_answer_once(
    mesh: ProcessMesh, producer: Producer
):
    body = {"model": LLAMA, "prompt": ["one", "two"], "n": 2, "max_tokens": 600, "seed": 5}
    body |= {"ignore_eos": True}
    undisturbed = response_of(await final_of(producer, call(COMPLETIONS, body)))
    request = call(COMPLETIONS, body | {"stream": True}, id="evicted", slo=Slo(ttlt_s=600.0))
    command = EvictRequest(instance_id=InstanceId("a0"), request_id=RequestId("evicted"))
    tokens: dict[int, list[int]] = {}
    evicting: asyncio.Task[Any] | None = None
    # Open before the run, so that the command arrives before the end of the run.
    async with mesh.open_broker("headway-evictor") as broker:
        generation = await producer.submit(request, reply=ReplyMode.STREAM)
        async for part in generation:
            tokens.setdefault(part.child, []).extend(part.token_ids)
            if evicting is None:
                evicting = asyncio.create_task(order(broker, command, timeout_s=30.0))
        assert evicting is not None
        answered = await evicting
    assert isinstance(answered, LsoAnswered)
    assert answered.outcome is LsoOutcome.DONE
    final = await generation.final()

    assert stable(response_of(final)) == stable(undisturbed)
    assert isinstance(final, RequestCompleted)
    assert final.attempts.evictions == 1
    assert [tuple(tokens[child]) for child in range(4)] == [c.token_ids for c in final.children]


async def test_submit_prints_the_response(mesh: ProcessMesh, tmp_path: Path):
    body = {"messages": TALK, "max_tokens": 5, "temperature": 0}
    file = tmp_path / "body.json"
    file.write_text(json.dumps(body))
    verb = ("mesh", "submit", "--model", LLAMA, "--endpoint", CHAT)
    inline = await run(mesh, *verb, "--body", json.dumps(body), "--ttlt", "60")
    read = await run(mesh, *verb, "--body", f"@{file}")

    assert inline.code == read.code == 0, inline.err
    assert inline.json["usage"]["completion_tokens"] == 5
    assert stable(read.json) == stable(inline.json)


async def test_submit_prints_the_text_of_a_streamed_body(mesh: ProcessMesh):
    body = {"model": LLAMA, "prompt": "hello", "max_tokens": 5, "temperature": 0}
    verb = ("mesh", "submit", "--endpoint", COMPLETIONS, "--body")
    whole = await run(mesh, *verb, json.dumps(body))
    streamed = await run(mesh, *verb, json.dumps(body | {"stream": True}))

    assert streamed.out.strip() == whole.json["choices"][0]["text"].strip()


async def test_submit_fails_with_the_field_of_vllm(mesh: ProcessMesh):
    body = json.dumps({"model": LLAMA, "prompt": "x", "temperature": -1})
    ran = await run(mesh, "mesh", "submit", "--endpoint", COMPLETIONS, "--body", body)

    assert ran.code == 1
    assert "temperature" in ran.err


async def example(mesh: ProcessMesh, name: str, *arguments: str) -> list[Any]:
    """Lines that an example prints."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", f"ops.examples.{name}", *arguments, "--url", mesh.spec.broker),
        cwd=ROOT,
        stdout=asyncio.subprocess.PIPE,
    )
    async with asyncio.timeout(60):
        out, _ = await process.communicate()
    return [json.loads(line) for line in out.decode().splitlines()]


async def test_example_of_a_producer_prints_the_response(mesh: ProcessMesh):
    body = {"model": LLAMA, "messages": TALK, "max_tokens": 5, "temperature": 0}
    (response,) = await example(mesh, "amqp_call", CHAT, json.dumps(body))
    (refused,) = await example(mesh, "amqp_call", CHAT, json.dumps(body | {"top_p": 7}))

    assert response["usage"]["completion_tokens"] == 5
    assert refused["error"]["param"] == "top_p"


async def test_example_of_a_consumer_prints_each_answer(mesh: ProcessMesh):
    body = {"model": LLAMA, "prompt": ["one", "two"], "max_tokens": 8, "temperature": 0}
    *parts, response = await example(mesh, "amqp_stream", COMPLETIONS, json.dumps(body))
    texts = [
        "".join(part["text"] for part in parts if part["answer"] == index) for index in range(2)
    ]

    # The stream's last tokens come with the final.
    assert all(
        choice["text"].startswith(text)
        for choice, text in zip(response["choices"], texts, strict=True)
    )
    assert any(texts)
