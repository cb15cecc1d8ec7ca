"""
Pooling models over HTTP: a mesh with real engines answers like vLLM's own server, also after kills.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
import pytest_asyncio

from ops.bench.vllm_serve import stock_server
from services.engine_core.serve_arguments import serve_arguments
from services.mesh.processes import ProcessMesh
from shared.api.pooling import MAX_INPUTS
from shared.contracts.base import ModelName
from shared.models.registry import ModelRegistry
from shared.models.tiny import TINY_MODELS, TINY_POOLING_MODELS, make_tiny_models
from tests.brokers import RabbitServer, rabbit_targets
from tests.e2e.meshes import LLAMA, kill, mesh_spec
from tests.e2e.pooling.vectors import TEXTS, TOLERANCE, close

pytestmark = [
    pytest.mark.slow,
    pytest.mark.rabbitmq,
    pytest.mark.vllm,
    pytest.mark.asyncio(loop_scope="module"),
]
EMBED, SCORE, CLASSIFY = "tiny-embed", "tiny-score", "tiny-classify"
MODELS = TINY_POOLING_MODELS | {LLAMA: TINY_MODELS[LLAMA]}
PAIRS: dict[str, dict[str, Any]] = {
    "/score": {"text_1": TEXTS[0], "text_2": TEXTS[1:]},
    "/v1/score": {"queries": TEXTS[:2], "documents": TEXTS[2:]},
    "/rerank": {"query": TEXTS[0], "documents": TEXTS[1:]},
    "/v1/rerank": {"query": TEXTS[0], "documents": TEXTS[1:], "top_n": 2},
    "/v2/rerank": {"query": TEXTS[0], "documents": TEXTS[1:]},
}
CASES: list[tuple[str, str, dict[str, Any]]] = [
    *((EMBED, path, body) for path, body in PAIRS.items()),
    *((SCORE, path, body) for path, body in PAIRS.items()),
    *(
        (EMBED, "/v1/embeddings", body)
        for body in (
            {"input": TEXTS[0]},
            {"input": TEXTS},
            {"input": [10, 20, 30]},
            {"input": [[10, 20, 30], [40, 50]]},
            {"input": TEXTS, "user": "someone", "truncate_prompt_tokens": 2},
            {"messages": [{"role": "user", "content": "hello"}]},
            {"input": TEXTS, "dimensions": 8},
            {"input": TEXTS, "encoding_format": "none"},
            {"input": []},
            {"input": "word " * 5000},
            {"input": [[10, 100_000]]},
            {"input": {"text": "a"}},
        )
    ),
    (EMBED, "/pooling", {"input": TEXTS[:2]}),
    (EMBED, "/pooling", {"input": TEXTS[:2], "task": "token_embed"}),
    (EMBED, "/pooling", {"input": TEXTS[:2], "task": "classify"}),
    (EMBED, "/classify", {"input": TEXTS}),
    (EMBED, "/v1/completions", {"prompt": "hello"}),
    (EMBED, "/v1/chat/completions", {"messages": [{"role": "user", "content": "hello"}]}),
    (EMBED, "/tokenize", {"prompt": "hello"}),
    (SCORE, "/classify", {"input": TEXTS}),
    (SCORE, "/classify", {"input": TEXTS[0], "use_activation": False}),
    (SCORE, "/pooling", {"input": TEXTS[:2]}),
    (SCORE, "/v1/embeddings", {"input": TEXTS}),
    (SCORE, "/score", {"text_1": TEXTS[:2], "text_2": TEXTS[:3]}),
]


@dataclass(frozen=True, slots=True)
class Servers:
    """A mesh, and vLLM's own server of each model with which it is compared."""

    mesh: ProcessMesh
    client: httpx.AsyncClient
    stock: dict[str, httpx.AsyncClient]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def servers(
    rabbit_servers: Callable[[str], RabbitServer], tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Servers]:
    directory = tmp_path_factory.mktemp("mesh")
    registry = make_tiny_models(directory / "models", models=MODELS)
    with rabbit_servers(rabbit_targets()[0]).fresh_url() as url:
        spec = mesh_spec(
            url,
            directory,
            engine="vllm",
            registry=registry,
            agent_settings={"initial_model": EMBED},
        )
        async with AsyncExitStack() as stack:
            stock = {
                name: await _stock(stack, registry, ModelName(name), directory)
                for name in (EMBED, SCORE)
            }
            mesh = await stack.enter_async_context(ProcessMesh(spec))
            client = httpx.AsyncClient(base_url=spec.gateway_url, timeout=240.0)
            yield Servers(mesh, await stack.enter_async_context(client), stock)


async def _stock(
    stack: AsyncExitStack, registry: Path, name: ModelName, directory: Path
) -> httpx.AsyncClient:
    entry = ModelRegistry.load(registry).entry(name)
    arguments = serve_arguments(entry, [name])
    stock = await stack.enter_async_context(stock_server(arguments, directory / f"{name}.log"))
    return await stack.enter_async_context(httpx.AsyncClient(base_url=stock.url, timeout=120.0))


@pytest.mark.parametrize(
    ("model", "path", "body"),
    CASES,
    ids=[f"{n} {model} {path}" for n, (model, path, _) in enumerate(CASES)],
)
async def test_mesh_answers_like_vllms_own_server(
    servers: Servers, model: str, path: str, body: dict[str, Any]
):
    asked = {"model": model} | body
    expected = await servers.stock[model].post(path, json=asked)
    found = await servers.client.post(path, json=asked)

    assert found.status_code == expected.status_code, found.text
    if expected.status_code == 200:
        assert close(expected.json(), found.json())
    elif "error" in expected.json():
        assert found.json()["error"]["param"] == expected.json()["error"]["param"]
    else:  # a route that the model does not have
        assert expected.status_code == 404


async def test_classes_have_labels_and_probabilities(servers: Servers):
    body = {"model": CLASSIFY, "input": TEXTS}
    answer = (await servers.client.post("/classify", json=body)).json()

    assert [len(each["probs"]) for each in answer["data"]] == [3] * len(TEXTS)
    assert all(abs(sum(each["probs"]) - 1) < TOLERANCE for each in answer["data"])
    assert {each["label"] for each in answer["data"]} <= {f"label-{n}" for n in range(3)}


async def test_openais_client_gets_vectors_in_both_formats(servers: Servers):
    async with openai.AsyncOpenAI(
        base_url=f"{servers.mesh.spec.gateway_url}/v1", api_key="none", max_retries=0
    ) as client:
        floats = await client.embeddings.create(model=EMBED, input=TEXTS, encoding_format="float")
        packed = await client.embeddings.create(model=EMBED, input=TEXTS)
        one = await client.embeddings.create(model=EMBED, input=TEXTS[0])
    vectors = np.array([each.embedding for each in floats.data])

    assert [each.index for each in floats.data] == [0, 1, 2, 3]
    assert np.allclose(vectors, [each.embedding for each in packed.data], atol=TOLERANCE)
    assert np.allclose(vectors[0], one.data[0].embedding, atol=TOLERANCE)
    assert np.allclose(np.linalg.norm(vectors, axis=1), 1, atol=TOLERANCE)
    assert floats.usage.prompt_tokens == floats.usage.total_tokens > len(TEXTS)


async def test_responses_that_are_not_json_are_refused_by_name(servers: Servers):
    body = {"model": EMBED, "input": TEXTS, "encoding_format": "bytes_only"}
    found = await servers.client.post("/v1/embeddings", json=body)

    assert (found.status_code, found.json()["error"]["param"]) == (400, "encoding_format")


async def test_one_call_is_one_request_of_the_mesh(servers: Servers):
    body = {"model": EMBED, "input": [[10, 20 + n % 400] for n in range(MAX_INPUTS)]}
    answer = (await servers.client.post("/v1/embeddings", json=body)).json()
    too_many = await servers.client.post(
        "/v1/embeddings", json={"model": EMBED, "input": [[10]] * (MAX_INPUTS + 1)}
    )

    assert len(answer["data"]) == MAX_INPUTS
    assert isinstance(answer["headway"], dict)
    assert (too_many.status_code, too_many.json()["error"]["code"]) == (400, "too_many_inputs")


async def test_targets_are_of_the_whole_answer(servers: Servers):
    body = {"model": EMBED, "input": TEXTS, "slo": {"ttft_s": 20}}
    answer = (await servers.client.post("/v1/embeddings", json=body)).json()["headway"]

    assert answer["slo_attained"]
    assert answer["ttft_s"] == pytest.approx(answer["ttlt_s"], abs=0.5)
    assert answer["max_tbt_s"] == 0


async def test_generating_model_has_no_pooling_routes(servers: Servers):
    answer = await servers.client.post("/v1/embeddings", json={"model": LLAMA, "input": "a"})

    assert answer.status_code == 404


async def test_killed_agents_change_no_vector(servers: Servers):
    bodies = [
        {"model": EMBED, "input": [[10 + call, 20 + n % 400] * 50 for n in range(300)], "slo": {}}
        for call in range(3)
    ]

    async def vectors() -> list[Any]:
        calls = (servers.client.post("/v1/embeddings", json=body) for body in bodies)
        answers = [answer.json() for answer in await asyncio.gather(*calls)]
        return [[each["embedding"] for each in answer["data"]] for answer in answers]

    calm = await vectors()
    storm = asyncio.create_task(vectors())
    await asyncio.sleep(0.3)
    for agent in ("agent-a0", "agent-a1"):
        assert not storm.done()
        await kill(servers.mesh, agent)
        await servers.mesh.processes[agent].start()

    assert np.allclose(calm, await storm, rtol=0, atol=TOLERANCE)
