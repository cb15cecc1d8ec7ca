"""A mesh for clients, and the built wheel in an environment that holds nothing else."""

from collections.abc import AsyncIterator, Callable
from pathlib import Path

import msgspec
import pytest
import pytest_asyncio

from ops.clients.installed import python_with
from ops.clients.wheel import build_wheel
from services.mesh.processes import ProcessMesh
from tests.brokers import RabbitServer, rabbit_targets
from tests.e2e.meshes import mesh_spec
from tests.stores import migrated_settings


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def mesh(
    rabbit_servers: Callable[[str], RabbitServer], tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[ProcessMesh]:
    """A mesh with simulated engines, whose planners have a store."""
    directory = tmp_path_factory.mktemp("mesh")
    settings = await migrated_settings(None, directory / "data")
    with rabbit_servers(rabbit_targets()[0]).fresh_url() as url:
        planner = {"store": msgspec.to_builtins(settings)}
        async with ProcessMesh(mesh_spec(url, directory, planner=planner)) as running:
            yield running


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_wheel(tmp_path_factory.mktemp("dist"))


@pytest.fixture(scope="module")
def python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Interpreter of an environment with the wheel alone."""
    return python_with(wheel, tmp_path_factory.mktemp("python") / "venv")
