"""Streams that wait longer than a proxy allows, with stock clients behind nginx."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable

import openai
import pytest
import pytest_asyncio

from services.mesh.processes import ProcessMesh
from shared.models.tiny import make_tiny_models
from tests.brokers import RabbitServer, rabbit_targets
from tests.clients.streaming import CLIENTS, chat
from tests.e2e.front.nginx import nginx
from tests.e2e.meshes import mesh_spec

pytestmark = [pytest.mark.rabbitmq, pytest.mark.asyncio(loop_scope="module")]
READ_TIMEOUT_S, KEEP_ALIVE_S, HELD_S = 3, 1.0, 5.0


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def front(
    rabbit_servers: Callable[[str], RabbitServer], tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[ProcessMesh]:
    """A mesh with simulated engines; `tests/clients` has the same with vLLM."""
    directory = tmp_path_factory.mktemp("mesh")
    gateway = {"stream_keep_alive_s": KEEP_ALIVE_S}
    with rabbit_servers(rabbit_targets()[0]).fresh_url() as url:
        registry = make_tiny_models(directory / "models", weights=False)
        spec = mesh_spec(url, directory, registry=registry, gateway=gateway)
        async with ProcessMesh(spec) as running:
            yield running


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def proxy(front: ProcessMesh, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[str]:
    """URL of the proxy."""
    directory = tmp_path_factory.mktemp("nginx")
    async with nginx(front.spec.gateway_url, directory, read_timeout_s=READ_TIMEOUT_S) as url:
        yield url


async def test_held_streams_pass_a_proxy_that_closes_silent_connections(
    front: ProcessMesh, proxy: str
):
    clients = [client for client in CLIENTS.values() for _ in range(5)]
    undisturbed = [await client(front.spec.gateway_url, {}) for client in clients[::5]]
    held = {"not_before": time.time() + HELD_S}
    answers = await asyncio.gather(*(client(proxy, held) for client in clients))
    assert answers == [answer for answer in undisturbed for _ in range(5)]
    assert all(undisturbed)


async def test_a_request_that_ends_while_it_waits_is_an_error_of_the_client(proxy: str):
    # It is held until after its end, which is refused at once; this one ends in its queue.
    ends = {"not_before": time.time() + HELD_S, "ttl_s": 0.001}
    with pytest.raises(openai.APIError, match=r"end|expire"):
        await chat(proxy, ends)


async def test_a_refusal_before_the_first_interval_keeps_its_status(proxy: str):
    with pytest.raises(openai.APIStatusError) as refused:
        await chat(proxy, {"expires_at": 1.0})
    assert refused.value.status_code == 504
