"""Tiny models, and stores for gateways."""

from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
import pytest_asyncio

from ops.bench.postgres import PrivatePostgres
from shared.models.tiny import make_tiny_models
from shared.store.settings import StoreSettings
from tests.brokers import MEMORY, BrokerRig, MemoryRig, RabbitRig, RabbitServer
from tests.conftest import RABBIT_PARAMS
from tests.stores import migrated_settings


@pytest.fixture(scope="session")
def registry(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A registry of tiny models without weights."""
    return make_tiny_models(tmp_path_factory.mktemp("models"), weights=False)


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=[MEMORY, *RABBIT_PARAMS])
async def shared_brokers(
    request: pytest.FixtureRequest, rabbit_servers: Callable[[str], RabbitServer]
) -> AsyncIterator[BrokerRig]:
    """As `broker_rig`, for tests of one file that do not disturb each other."""
    if request.param == MEMORY:
        memory = MemoryRig()
        yield memory
        await memory.close()
        return
    with rabbit_servers(request.param).fresh_url() as url:
        rabbit = RabbitRig(url)
        yield rabbit
        await rabbit.close()


@pytest.fixture(params=["sqlite", "postgresql"])
def url(request: pytest.FixtureRequest) -> str | None:
    """URL of a database with the schema; None for SQLite in the data directory."""
    if request.param == "sqlite":
        return None
    server: PrivatePostgres = request.getfixturevalue("postgres")
    return server.url(server.fresh(template=request.getfixturevalue("migrated_template")))


@pytest.fixture
async def settings(url: str | None, tmp_path: Path) -> StoreSettings:
    """Settings of a store with its schema."""
    return await migrated_settings(url, tmp_path / "data")
