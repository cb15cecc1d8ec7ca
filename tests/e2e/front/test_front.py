"""Stock clients against a gateway in front of simulated engines."""

import asyncio
import json
import re
from collections.abc import AsyncIterator, Callable
from typing import Any

import anthropic
import httpx
import msgspec
import openai
import pytest
import pytest_asyncio

from services.gateway.batches.openapi import batch_paths
from services.gateway.door import ROUTES
from services.gateway.files.openapi import file_paths
from services.gateway.requests.openapi import request_paths
from services.gateway.responses.openapi import response_paths
from services.gateway.stories import story_paths
from services.mesh.processes import ProcessMesh
from shared.api.calls import MAX_GRAMMAR_BYTES
from shared.models.tiny import make_tiny_models
from tests.brokers import RabbitServer, eventually, rabbit_targets
from tests.clients.coding_agents import CODING_AGENTS, SESSION_FIELDS
from tests.e2e.meshes import LLAMA, QWEN, ends_of, mesh_spec, num_stopped
from tests.stores import migrated_settings

pytestmark = [
    pytest.mark.rabbitmq,
    pytest.mark.asyncio(loop_scope="module"),
]
KEY = "secret-of-acme"
MESSAGES: list[Any] = [{"role": "user", "content": "Say something about queues."}]
HEADERS = {"authorization": f"Bearer {KEY}"}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def front(
    rabbit_servers: Callable[[str], RabbitServer], tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[ProcessMesh]:
    """A mesh with simulated engines and a store."""
    gateway = {"api_keys": {KEY: "acme"}, "max_outstanding_per_tenant": 8}
    with rabbit_servers(rabbit_targets()[0]).fresh_url() as url:
        directory = tmp_path_factory.mktemp("mesh")
        store = await migrated_settings(None, directory / "data")
        registry = make_tiny_models(directory / "models", weights=False)
        spec = mesh_spec(
            url,
            directory,
            registry=registry,
            gateway=gateway | {"store": msgspec.to_builtins(store)},
            planner={"store": msgspec.to_builtins(store)},
        )
        async with ProcessMesh(spec) as running:
            yield running


@pytest_asyncio.fixture(loop_scope="module")
async def client(front: ProcessMesh) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(
        base_url=f"{front.spec.gateway_url}/v1", api_key=KEY, max_retries=0
    ) as client:
        yield client


@pytest_asyncio.fixture(loop_scope="module")
async def http(front: ProcessMesh) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(
        base_url=front.spec.gateway_url, headers=HEADERS, timeout=30.0
    ) as client:
        yield client


async def test_streamed_chat_has_the_text_of_the_whole_chat(client: openai.AsyncOpenAI):
    asked: dict[str, Any] = {
        "model": LLAMA,
        "messages": MESSAGES,
        "max_tokens": 20,
        "temperature": 0,
    }
    whole = await client.chat.completions.create(**asked)
    stream = await client.chat.completions.create(**asked, stream=True)
    choices = [choice async for chunk in stream for choice in chunk.choices]

    assert "".join(c.delta.content or "" for c in choices) == whole.choices[0].message.content
    assert choices[-1].finish_reason == whole.choices[0].finish_reason


async def test_answer_ends_before_a_stop_string(client: openai.AsyncOpenAI):
    asked: dict[str, Any] = {"model": LLAMA, "prompt": "once", "max_tokens": 30, "temperature": 0}
    text = (await client.completions.create(**asked)).choices[0].text
    stop = text[8:11]
    cut = await client.completions.create(**asked, stop=[stop])

    assert cut.choices[0].text == text[: text.index(stop)]
    assert cut.choices[0].finish_reason == "stop"
    headway = cut.model_extra["headway"]
    assert headway["request_id"].startswith("req-")


async def test_last_event_has_the_results_after_a_stop_string(client: openai.AsyncOpenAI):
    asked: dict[str, Any] = {"model": LLAMA, "prompt": "once", "max_tokens": 30, "temperature": 0}
    text = (await client.completions.create(**asked)).choices[0].text
    stream = await client.completions.create(**asked, stop=[text[8:11]], stream=True)
    events = [event async for event in stream]

    assert events[-1].choices[0].finish_reason == "stop"
    assert events[-1].model_extra["headway"]["slo_attained"] in (True, False)


async def test_several_answers_and_prompts_are_choices(client: openai.AsyncOpenAI):
    two = await client.completions.create(
        model=LLAMA,
        prompt=["one", "two"],
        n=2,
        max_tokens=4,
        temperature=0.7,
        extra_body={"ignore_eos": True},
    )

    assert [choice.index for choice in two.choices] == [0, 1, 2, 3]
    assert two.usage.completion_tokens == 16


async def test_several_random_answers_differ(client: openai.AsyncOpenAI):
    answers = await client.completions.create(
        model=LLAMA, prompt="once", n=4, max_tokens=12, temperature=1.0
    )

    assert len({choice.text for choice in answers.choices}) > 1


async def test_second_model_is_served(client: openai.AsyncOpenAI):
    answer = await client.chat.completions.create(
        model=QWEN, messages=MESSAGES, max_tokens=4, extra_body={"slo": {}}
    )

    assert answer.model == QWEN


async def test_anthropics_client_gets_a_message(front: ProcessMesh):
    asked: dict[str, Any] = {
        "model": LLAMA,
        "messages": MESSAGES,
        "max_tokens": 5,
        "extra_body": {"temperature": 0},
    }
    async with anthropic.AsyncAnthropic(
        base_url=front.spec.gateway_url, api_key=KEY, max_retries=0
    ) as client:
        message = await client.messages.create(**asked)
        async with client.messages.stream(**asked) as stream:
            final = await stream.get_final_message()

    assert message.usage.output_tokens == final.usage.output_tokens == 5


async def test_responses_api_answers(client: openai.AsyncOpenAI):
    response = await client.responses.create(
        model=LLAMA, input="hello", max_output_tokens=5, temperature=0
    )

    assert response.usage is not None
    assert response.usage.output_tokens == 5


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        ("/v1/chat/completions", {"model": "none", "messages": MESSAGES}, 404, "model"),
        (
            "/v1/completions",
            {"model": LLAMA, "prompt": "x", "slo": {"ttft_s": 1e-6}},
            400,
            "slo.ttft_s",
        ),
        ("/v1/completions", {"model": LLAMA, "prompt": "x", "slo": {"ttft": 1}}, 400, "slo"),
        (
            "/v1/completions",
            {"model": LLAMA, "prompt": "x", "max_tokens": 10**6},
            400,
            "max_tokens",
        ),
        (
            "/v1/completions",
            {"model": LLAMA, "prompt": "x", "kv_transfer_params": {"a": 1}},
            400,
            "kv_transfer_params",
        ),
        ("/v1/completions", {"model": LLAMA, "prompt": "x", "priority": 10**6}, 400, "priority"),
    ],
)
async def test_invalid_body_is_refused_with_its_field(
    http: httpx.AsyncClient, path: str, body: dict[str, Any], status: int, param: str
):
    answer = await http.post(path, json=body)

    assert answer.status_code == status
    assert answer.json()["error"]["param"] == param


@pytest.mark.parametrize(
    "path",
    [
        *("/scale_elastic_ep", "/v1/load_lora_adapter", "/inference/v1/generate", "/invocations"),
        *("/v1/chat/completions/batch", "/docs", "/load"),
    ],
)
async def test_other_routes_are_closed(http: httpx.AsyncClient, path: str):
    for method in ("GET", "POST"):
        assert (await http.request(method, path)).status_code == 404


async def test_large_grammars_are_refused(http: httpx.AsyncClient):
    grammar = {"choice": ["x" * 1000] * 200}
    body = {"model": LLAMA, "prompt": "x", "structured_outputs": grammar}
    answer = await http.post("/v1/completions", json=body)

    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "structured_outputs"
    assert str(MAX_GRAMMAR_BYTES) in answer.json()["error"]["message"]


BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": MESSAGES, "max_tokens": 4},
    "/v1/completions": {"prompt": "x", "max_tokens": 4},
    "/v1/responses": {"input": "x", "max_output_tokens": 4},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 4},
}


@pytest.mark.parametrize("agent", CODING_AGENTS)
async def test_headers_and_fields_of_coding_agents_change_nothing(
    http: httpx.AsyncClient, agent: str
):
    for path, body in BODIES.items():
        asked = {"model": LLAMA, **body}
        for fields in ({}, SESSION_FIELDS):
            answer = await http.post(path, json=asked | fields, headers=CODING_AGENTS[agent])
            assert answer.status_code == 200, (path, answer.text)


async def test_other_arguments_of_the_engine_are_refused(http: httpx.AsyncClient):
    asked = {"model": LLAMA, "prompt": "x", "vllm_xargs": {"agentic_context": "a", "top": 1}}
    answer = await http.post("/v1/completions", json=asked)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "vllm_xargs.top"


async def test_texts_beyond_the_context_are_refused_by_the_gateway(http: httpx.AsyncClient):
    answer = await http.post("/tokenize", json={"model": LLAMA, "prompt": "a " * 1_950_000})
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert (error["code"], error["param"]) == ("context_length_exceeded", "prompt")


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/v1/responses"])
async def test_many_parts_of_contents_are_refused(http: httpx.AsyncClient, path: str):
    part = {"type": "input_text" if path == "/v1/responses" else "text", "text": "hi"}
    turns = [{"role": "user", "content": [part] * 60_000}]
    body = {"input": turns} if path == "/v1/responses" else {"messages": turns}
    answer = await http.post(path, json={"model": LLAMA, "max_tokens": 1, **body})
    assert answer.status_code == 400
    assert "the limit is 8192" in answer.text


async def test_timeout_header_ends_the_request_and_its_run(
    front: ProcessMesh, http: httpx.AsyncClient
):
    body = {"model": LLAMA, "prompt": "x", "max_tokens": 4000, "ignore_eos": True}
    # The request has reached the mesh by then, and its answer would take ten times as long.
    headers = {"x-request-timeout-seconds": "2"}
    answer = await http.post("/v1/completions", json=body, headers=headers)
    request_id = answer.headers["x-headway-request-id"]
    await eventually(lambda: bool(ends_of(front, request_id)))

    assert (answer.status_code, answer.json()["error"]["code"]) == (504, "timeout")
    assert ends_of(front, request_id) != ["request.completed"]


async def test_errors_of_the_messages_api_have_anthropics_form(http: httpx.AsyncClient):
    body = {"model": "none", "messages": MESSAGES, "max_tokens": 5}
    answer = await http.post("/v1/messages", json=body)

    assert answer.status_code == 404
    assert answer.json()["type"] == "error"
    assert answer.json()["error"]["type"] == "not_found_error"


async def test_openapi_document_has_the_open_routes_and_the_meshs_fields(http: httpx.AsyncClient):
    document = (await http.get("/openapi.json")).json()
    schemas = document["components"]["schemas"]
    references = set(re.findall(r"#/components/schemas/([^\"]+)", json.dumps(document)))

    stored = (file_paths(), request_paths(), batch_paths(), response_paths(), story_paths())
    own = {path for paths, _ in stored for path in paths}
    headers = {
        path: {each["name"] for each in document["paths"][path]["post"]["parameters"]}
        for path in ROUTES
    }

    assert document["paths"].keys() == ROUTES.keys() | own
    assert headers["/v1/responses"] >= {"idempotency-key", "prefer"}
    assert headers["/v1/embeddings"] >= {"idempotency-key"}
    assert "prefer" not in headers["/v1/embeddings"]
    assert references == schemas.keys()
    assert schemas["CallBody"]["properties"].keys() >= {"slo", "expires_at", "on_late"}


async def test_files_are_stored_and_read(client: openai.AsyncOpenAI):
    made = await client.files.create(file=("lines.jsonl", b"{}\n"), purpose="batch")
    listed = [file.id async for file in client.files.list(purpose="batch")]
    content = await client.files.content(made.id)
    deleted = await client.files.delete(made.id)

    assert listed == [made.id]
    assert (made.bytes, content.content, deleted.deleted) == (3, b"{}\n", True)


async def test_repeated_stream_has_the_id_and_the_texts_of_the_first(http: httpx.AsyncClient):
    """The answers are random: equal ones come from one run."""
    body = {"model": LLAMA, "messages": MESSAGES, "max_tokens": 12, "n": 2, "stream": True}
    answers = [
        await http.post("/v1/chat/completions", json=body, headers={"idempotency-key": key})
        for key in ("one", "one", "two")
    ]

    events = [
        [json.loads(line[6:]) for line in each.text.split("\n\n") if line[6:7] == "{"]
        for each in answers
    ]
    texts = [
        [
            "".join(
                choice["delta"].get("content") or ""
                for event in each
                for choice in event["choices"]
                if choice["index"] == index
            )
            for index in range(2)
        ]
        for each in events
    ]
    assert texts[0] == texts[1]
    assert texts[0] != texts[2]
    assert [each[0]["id"] for each in events[:2]] == [
        f"chatcmpl-{answers[0].headers['x-headway-request-id']}"
    ] * 2


async def test_whole_answer_of_a_simulated_engine_is_kept_under_its_key(http: httpx.AsyncClient):
    """Its texts are random: equal ones come from one run."""
    body = {"model": LLAMA, "prompt": "x", "max_tokens": 4}
    answers = [
        await http.post("/v1/completions", json=body, headers={"idempotency-key": key})
        for key in ("three", "three", "four")
    ]

    assert [each.status_code for each in answers] == [200] * 3
    texts = [each.json()["choices"][0]["text"] for each in answers]
    assert texts[0] == texts[1] != texts[2]


async def test_requests_without_a_valid_key_are_refused(front: ProcessMesh):
    async with httpx.AsyncClient(base_url=front.spec.gateway_url) as client:
        body = {"model": LLAMA, "prompt": "x"}
        assert (await client.post("/v1/completions", json=body)).status_code == 401
        assert (await client.get("/v1/models")).status_code == 401
        assert (await client.get("/v1/files")).status_code == 401


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/completions", {"prompt": "x", "max_tokens": 4000}),
        ("/v1/completions", {"prompt": ["x", "y"], "max_tokens": 4000}),
        ("/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 4000}),
        ("/v1/responses", {"input": "x", "max_output_tokens": 4000, "store": False}),
        ("/v1/messages", {"messages": MESSAGES, "max_tokens": 4000}),
    ],
    ids=["completions", "two prompts", "chat", "responses", "messages"],
)
async def test_clients_that_leave_end_their_requests(
    front: ProcessMesh, http: httpx.AsyncClient, path: str, fields: dict[str, Any]
):
    """`/v1/messages` has no `ignore_eos`, so that some of its answers end by themselves."""
    stopped, num_clients = num_stopped(front), 4

    async def streamed() -> None:
        body = fields | {"model": LLAMA, "stream": True, "ignore_eos": True}
        async with http.stream("POST", path, json=body) as answer:
            assert answer.status_code == 200
            async for _ in answer.aiter_lines():
                return

    await asyncio.gather(*(streamed() for _ in range(num_clients)))

    if path == "/v1/messages":
        await eventually(lambda: num_stopped(front) > stopped)
    else:
        await eventually(lambda: num_stopped(front) == stopped + num_clients)


async def test_requests_above_the_tenants_limit_get_429_with_a_time(http: httpx.AsyncClient):
    async def asked() -> httpx.Response:
        body = {"model": LLAMA, "prompt": "x", "max_tokens": 200, "ignore_eos": True}
        return await http.post("/v1/completions", json=body)

    answers = await asyncio.gather(*(asked() for _ in range(12)))
    refused = [answer for answer in answers if answer.status_code == 429]

    assert len(refused) >= 4
    assert all(int(answer.headers["retry-after"]) >= 1 for answer in refused)


async def test_a_model_that_is_added_to_the_registry_is_served(
    front: ProcessMesh, http: httpx.AsyncClient
):
    path = front.spec.registry
    registry = json.loads(path.read_text())
    added = registry["models"][0] | {"name": "added", "aliases": []}
    path.write_text(json.dumps(registry | {"models": [*registry["models"], added]}))

    body = {"model": "added", "prompt": "hello", "max_tokens": 4, "temperature": 0}
    answers: list[httpx.Response] = []

    async def served() -> bool:
        # Until the gateway has prepared the model, the client is asked to try again.
        answers.append(await http.post("/v1/completions", json=body))
        return answers[-1].status_code == 200

    await eventually(served)
    names = [each["id"] for each in (await http.get("/v1/models")).json()["data"]]
    assert "added" in names
    assert {each.status_code for each in answers} <= {200, 503}
    assert answers[-1].json()["usage"]["completion_tokens"] == 4


async def test_health_names_the_instances_of_each_model(http: httpx.AsyncClient):
    models = (await http.get("/health")).json()["models"]

    assert models[LLAMA]["able"] == models[QWEN]["able"] == 2
    assert models[LLAMA]["serving"] + models[QWEN]["serving"] <= 2
