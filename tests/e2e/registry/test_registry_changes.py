"""Models are added to and removed from a serving mesh, and no request fails."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from http import HTTPStatus
from pathlib import Path

import openai
import pytest

from services.mesh.cli import main
from services.mesh.processes import ProcessMesh
from services.mesh.top import View, watch
from shared.contracts.base import ModelName
from shared.contracts.requests import ReplyMode, RequestCompleted
from shared.models.registry import ModelRegistry, digest_of
from shared.models.registry_edit import registry_edit
from shared.models.tiny import make_tiny_models
from shared.producer.generation import Generation
from shared.producer.producer import Producer
from tests.brokers import RabbitServer, eventually, rabbit_targets
from tests.e2e.meshes import LLAMA, QWEN, mesh_spec, producer_of, read, request

pytestmark = pytest.mark.rabbitmq

ADDED = "tiny-llama-b"
PATIENCE_S = 120.0


class Load:
    """HTTP and AMQP requests for one model, one after the other, until it is stopped."""

    def __init__(self) -> None:
        self.completed = 0
        self.failures: list[object] = []
        self.stop = asyncio.Event()

    async def over_http(self, client: openai.AsyncOpenAI, model: str) -> None:
        while not self.stop.is_set():
            try:
                await client.completions.create(model=model, prompt="a queue", max_tokens=8)
                self.completed += 1
            except openai.APIError as error:
                self.failures.append(error)

    async def over_amqp(self, producer: Producer, model: str) -> None:
        number = 0
        while not self.stop.is_set():
            number += 1
            answer = await read(await submit(producer, number, model))
            if isinstance(answer.final, RequestCompleted):
                self.completed += 1
            else:
                self.failures.append(answer.final)


async def submit(producer: Producer, number: int, model: str) -> Generation:
    body = request(number, model=model, max_tokens=8)
    return await producer.submit(body, reply=ReplyMode.FINAL)


@asynccontextmanager
async def loaded(mesh: ProcessMesh, producer: Producer, model: str) -> AsyncIterator[Load]:
    """Load on *model* during the block."""
    load = Load()
    async with client_of(mesh) as client, asyncio.TaskGroup() as tasks:
        tasks.create_task(load.over_http(client, model))
        tasks.create_task(load.over_amqp(producer, model))
        try:
            yield load
        finally:
            load.stop.set()


def client_of(mesh: ProcessMesh) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(
        base_url=f"{mesh.spec.gateway_url}/v1", api_key="any", max_retries=0, timeout=60.0
    )


async def seconds_to_answer(client: openai.AsyncOpenAI, model: str) -> float:
    """Time until a request for a model that was just added is answered; only 503 is allowed."""
    begun = time.monotonic()
    while (status := await status_of(client, model)) != HTTPStatus.OK:
        assert status == HTTPStatus.SERVICE_UNAVAILABLE
        await asyncio.sleep(0.1)
    return time.monotonic() - begun


async def status_of(client: openai.AsyncOpenAI, model: str) -> int:
    try:
        await client.completions.create(model=model, prompt="hello", max_tokens=4)
    except openai.APIStatusError as error:
        return error.status_code
    return HTTPStatus.OK


async def is_unknown(client: openai.AsyncOpenAI, model: str) -> bool:
    return await status_of(client, model) == HTTPStatus.NOT_FOUND


async def view_of(mesh: ProcessMesh) -> View:
    async with mesh.open_broker("headway-view") as broker:
        return await watch(broker, duration_s=2.5, live=False)


async def is_released(mesh: ProcessMesh, model: str) -> bool:
    """Return whether no agent knows the model any more."""
    view = await view_of(mesh)
    known = {each.model for s in view.instances.values() for each in s.models}
    releasing = {name for status in view.instances.values() for name in status.releasing}
    return model not in known | releasing


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["simulated", pytest.param("vllm", marks=pytest.mark.vllm)])
async def test_changes_of_the_registry_take_effect_in_a_serving_mesh(
    engine: str, rabbit_servers: Callable[[str], RabbitServer], tmp_path: Path
) -> None:
    made = make_tiny_models(tmp_path / "models", weights=engine == "vllm")
    written = ModelRegistry.load(made)
    path = tmp_path / "registry.json"
    with registry_edit(path) as edit:
        for name in (LLAMA, QWEN):
            edit.add(written.entry(ModelName(name)))
    with rabbit_servers(rabbit_targets()[0]).fresh_url() as url:
        spec = mesh_spec(url, tmp_path, engine=engine, registry=path)
        async with (
            ProcessMesh(spec) as mesh,
            producer_of(mesh) as producer,
            client_of(mesh) as client,
        ):
            async with loaded(mesh, producer, LLAMA) as load:
                await eventually(lambda: load.completed >= 4)
                # More requests for the removed model than both agents run at once.
                queued = [asyncio.create_task(submit(producer, n, QWEN)) for n in range(40)]
                generations = await asyncio.gather(*queued)
                with registry_edit(path) as edit:
                    edit.add(written.entry(ModelName(ADDED)))
                async with asyncio.timeout(PATIENCE_S):
                    duration_s = await seconds_to_answer(client, ADDED)
                assert main(["models", "remove", QWEN, "--registry", str(path)]) == 0
                await eventually(lambda: is_unknown(client, QWEN))
                finals = [(await read(each)).final for each in generations]
                assert all(isinstance(final, RequestCompleted) for final in finals)
                await eventually(lambda: is_released(mesh, QWEN))
                assert load.failures == []
                assert load.completed > 10
            print(f"{engine}: an added model answers after {duration_s:.2f} s")
            view = await view_of(mesh)
            states = [s.registry for s in (*view.instances.values(), *view.gateways.values())]
            assert len(states) == 3
            digest = digest_of(path.read_bytes())
            assert {(s.digest, tuple(s.pending)) for s in states if s} == {(digest, ())}


async def test_an_amqp_request_waits_for_a_model_that_is_about_to_be_added(
    rabbit_servers: Callable[[str], RabbitServer], tmp_path: Path
) -> None:
    """Its producer may know of the model before the grouper has read the registry."""
    written = ModelRegistry.load(make_tiny_models(tmp_path / "models", weights=False))
    path = tmp_path / "registry.json"
    with registry_edit(path) as edit:
        edit.add(written.entry(ModelName(LLAMA)))
    with rabbit_servers(rabbit_targets()[0]).fresh_url() as url:
        spec = mesh_spec(url, tmp_path, agents=1, registry=path)
        async with ProcessMesh(spec) as mesh, producer_of(mesh) as producer:
            early = await submit(producer, 1, ADDED)
            await asyncio.sleep(1.0)
            with registry_edit(path) as edit:
                edit.add(written.entry(ModelName(ADDED)))

            assert isinstance((await read(early)).final, RequestCompleted)
