"""Meshes and brokers shared by several tests."""

from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from ops.broker import PrivateNode
from services.agent.backends.vllm.front.process import vllm_unavailable_reason
from services.mesh.processes import ProcessMesh
from shared.producer.producer import Producer
from tests.brokers import RabbitServer, rabbit_targets, release_of
from tests.e2e.meshes import mesh_spec, producer_of
from tests.requirements import absent


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def mesh(
    rabbit_servers: Callable[[str], RabbitServer], tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[ProcessMesh]:
    """A mesh of processes with simulated engines, on its own RabbitMQ virtual host."""
    with rabbit_servers(rabbit_targets()[0]).fresh_url() as url:
        spec = mesh_spec(
            url,
            tmp_path_factory.mktemp("mesh"),
            gateway=GATEWAY,
            planner={"grouper": {"unknown_model_wait_s": 0.2}},
        )
        async with ProcessMesh(spec) as running:
            yield running


@pytest.fixture
def vllm_broker(rabbit_servers: Callable[[str], RabbitServer]) -> Iterator[str]:
    """A RabbitMQ virtual host of its own, for a test that needs vLLM."""
    if (reason := vllm_unavailable_reason()) is not None:
        absent(reason, "vllm")
    with rabbit_servers(rabbit_targets()[0]).fresh_url() as url:
        yield url


@pytest.fixture
def release() -> str:
    """Target of `release_of`; tests choose another by parameters."""
    return "rabbitmq"


@pytest.fixture
def node(tmp_path: Path, release: str) -> Iterator[PrivateNode]:
    """A broker that the test may stop."""
    node = PrivateNode(tmp_path / "node", release=release_of(release))
    node.start()
    yield node
    node.close()


@pytest_asyncio.fixture(loop_scope="module")
async def producer(mesh: ProcessMesh) -> AsyncIterator[Producer]:
    async with producer_of(mesh) as running:
        yield running


GATEWAY: dict[str, Any] = {"api_keys": {"secret-of-acme": "acme"}}
