"""
Images over HTTP: a mesh with real engines answers as vLLM's own server does, also if every answer
is evicted once and continued by another engine.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
import pytest_asyncio

from ops.bench.vllm_serve import stock_server
from ops.ports import free_port
from services.agent.backends import registry as backends
from services.engine_core.serve_arguments import serve_arguments
from services.mesh.spec import AgentSpec, MeshSpec
from shared.contracts.base import ModelName
from shared.contracts.ingress import CallRequest
from shared.contracts.models import ImageLimits
from shared.contracts.requests import ReplyMode, RequestCompleted
from shared.models.registry import ModelRegistry, write_registry
from shared.models.tiny import TINY_IMAGE_MODELS, TINY_MODELS, make_tiny_models
from shared.producer.producer import Producer
from shared.runtime.clock import SystemClock
from tests.brokers import RabbitServer, rabbit_targets
from tests.differential.answers import Answer, ask, difference, succeeded
from tests.differential.cells import Asked, Cell
from tests.differential.evicting import EvictingEngine, Evictions, RabbitEmbeddedMesh
from tests.e2e.meshes import LLAMA
from tests.image_bodies import CHAT, MAKERS, MESSAGES, Body, chat_body, data_url, seeded_bodies

pytestmark = [
    pytest.mark.slow,
    pytest.mark.rabbitmq,
    pytest.mark.vllm,
    pytest.mark.asyncio(loop_scope="module"),
]
(MODEL,) = map(ModelName, TINY_IMAGE_MODELS)
SEED, NUMBER = 0, 24
ONE = (data_url(1),)


@dataclass(frozen=True, slots=True)
class Servers:
    """Answers of vLLM's own server, and clients of the mesh over HTTP and AMQP."""

    expected: list[Answer]
    mesh: httpx.AsyncClient
    producer: Producer
    evictions: Evictions


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def servers(
    rabbit_servers: Callable[[str], RabbitServer], tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Servers]:
    directory = tmp_path_factory.mktemp("images")
    models = TINY_IMAGE_MODELS | {LLAMA: TINY_MODELS[LLAMA]}
    registry = _limited(make_tiny_models(directory / "models", models=models))
    evictions, numbers = Evictions(SEED), count()
    vllm = backends.BACKENDS["vllm"]

    def evicting(*arguments: object) -> EvictingEngine:
        return EvictingEngine(vllm(*arguments), f"engine-{next(numbers)}", evictions)

    with (
        rabbit_servers(rabbit_targets()[0]).fresh_url() as url,
        pytest.MonkeyPatch.context() as patch,
    ):
        expected = await _expected(registry, directory / "stock.log")
        spec = _spec(registry, directory)
        patch.setitem(backends.BACKENDS, "vllm", evicting)
        mesh = RabbitEmbeddedMesh(spec, url)
        async with (
            mesh,
            httpx.AsyncClient(base_url=spec.gateway_url, timeout=120.0) as http,
            mesh.open_broker("headway-test") as broker,
            Producer(broker, name="test", clock=SystemClock(), user_id="guest") as producer,
        ):
            yield Servers(expected, http, producer, evictions)


def _limited(registry: Path) -> Path:
    """The registry with limits of the images of each model."""
    models = ModelRegistry.load(registry)
    limits = ImageLimits(max_images=4, max_pixels=10_000)
    entries = [msgspec.structs.replace(models.entry(each), images=limits) for each in models.bases]
    write_registry(registry, entries)
    return registry


async def _expected(registry: Path, log: Path) -> list[Answer]:
    """Answers of vLLM's own server, which ends before the mesh starts: both need the CPUs."""
    arguments = serve_arguments(ModelRegistry.load(registry).entry(MODEL), [MODEL])
    async with (
        stock_server(arguments, log) as own,
        httpx.AsyncClient(base_url=own.url, timeout=120.0) as client,
    ):
        return await answers(client, bodies())


def _spec(registry: Path, directory: Path) -> MeshSpec:
    return MeshSpec(
        broker="embedded",
        registry=registry,
        log_dir=directory / "log",
        gateway_port=free_port(),
        agents=tuple(
            AgentSpec(
                instance_id=f"a{number}",
                engine="vllm",
                settings={"initial_model": MODEL, "pull": {"evict_hold_s": 0.1}},
            )
            for number in range(2)
        ),
    )


def bodies() -> list[Asked]:
    """Seeded bodies, every second one streamed; each image of the last two is sent twice."""
    twice: list[Any] = ["first", ONE, "second", ONE, "which?"]
    made = seeded_bodies(SEED, NUMBER - 2)
    made += [(endpoint, MAKERS[endpoint](twice)) for endpoint in (CHAT, MESSAGES)]
    return [
        Asked(
            number,
            Cell(endpoint, "image", lambda _: {}, streamed=number % 2 == 1),
            body | {"model": MODEL} | ({"stream": True} if number % 2 else {}),
        )
        for number, (endpoint, body) in enumerate(made)
    ]


async def answers(client: httpx.AsyncClient, asked: list[Asked]) -> list[Answer]:
    room = asyncio.Semaphore(4)

    async def one(body: Asked) -> Answer:
        async with room:
            return await ask(client, body)

    return list(await asyncio.gather(*map(one, asked)))


async def test_mesh_answers_images_like_vllms_own_server(servers: Servers):
    asked = bodies()
    expected = servers.expected
    undisturbed = await answers(servers.mesh, asked)
    servers.evictions.active = True
    evicted = await answers(servers.mesh, asked)
    servers.evictions.active = False

    assert all(map(succeeded, expected))
    for found in (undisturbed, evicted):
        each = zip(asked, expected, found, strict=True)
        assert [difference(*three) for three in each] == [None] * NUMBER
    assert servers.evictions.evicted.keys() == servers.evictions.continued
    # As in the comparison of text: an answer may end before the engine sees the eviction.
    assert len(servers.evictions.evicted) >= NUMBER / 4


def _image(url: str) -> Body:
    return {"type": "image_url", "image_url": {"url": url}}


@pytest.mark.parametrize(
    ("parts", "param", "reason"),
    [
        ([_image("http://127.0.0.1/a.png")], "image_url", "allowed_media_hosts"),
        ([_image("file:///etc/passwd")], "image_url", "'file'"),
        ([_image(data_url(1, width=101, height=100))], "image_url", "limit is 10000 pixels"),
        ([_image(ONE[0])] * 5, "image_url", "limit is 4"),
        ([_image("data:image/png;base64,AAAA")], "image_url", "cannot be read"),
        ([{"type": "audio_url", "audio_url": {"url": "data:,"}}], "audio", "audio"),
        ([{"type": "video_url", "video_url": {"url": "data:,"}}], "video", "video"),
    ],
)
async def test_other_media_are_refused_by_name(
    servers: Servers, parts: list[Body], param: str, reason: str
):
    body = {"model": MODEL, "messages": [{"role": "user", "content": parts}]}
    answer = await servers.mesh.post(CHAT, json=body)
    error = answer.json()["error"]

    assert (answer.status_code, error["param"]) == (400, param)
    assert reason in error["message"]
    anthropic = MAKERS[MESSAGES]([(part["image_url"]["url"],) for part in parts if len(parts) > 4])
    if len(parts) > 4:
        refused = await servers.mesh.post(MESSAGES, json={"model": MODEL} | anthropic)
        assert refused.status_code == 400
        assert reason in refused.json()["error"]["message"]


@pytest.mark.parametrize("field", ["mm_processor_kwargs", "media_io_kwargs"])
async def test_sizes_of_images_are_not_the_clients_choice(servers: Servers, field: str):
    body = chat_body(["hello", ONE]) | {"model": MODEL, field: {"size": {"longest_edge": 9000}}}
    answer = await servers.mesh.post(CHAT, json=body)

    assert (answer.status_code, answer.json()["error"]["param"]) == (400, field)


async def test_model_of_text_refuses_images(servers: Servers):
    answer = await servers.mesh.post(CHAT, json=chat_body(["hello", ONE]) | {"model": LLAMA})

    assert answer.status_code == 400
    assert "multimodal" in answer.json()["error"]["message"]


async def test_images_over_amqp_get_the_answer_of_http(servers: Servers):
    body = chat_body(["hello", ONE]) | {"model": MODEL}
    expected = (await servers.mesh.post(CHAT, json=body)).json()
    request = CallRequest(endpoint=CHAT, body=msgspec.Raw(msgspec.json.encode(body)))
    async with asyncio.timeout(120):
        final = await (await servers.producer.submit(request, reply=ReplyMode.FINAL)).final()
    assert isinstance(final, RequestCompleted), final
    found = msgspec.json.decode(bytes(final.response or b""))

    assert found["choices"] == expected["choices"]
    assert found["usage"]["prompt_tokens"] == expected["usage"]["prompt_tokens"]
