"""Stores on both databases."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from ops.bench.postgres import PrivatePostgres
from shared.store.migrating import migrate
from shared.store.settings import StoreSettings
from shared.store.store import Store
from tests.stores import ManualClock, open_store, place, settings_of

DATABASES = ("sqlite", "postgresql")


@pytest.fixture(scope="session")
def migrated_template(postgres: PrivatePostgres, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Name of a database of PostgreSQL with the current schema."""
    name = postgres.fresh()
    settings = settings_of(postgres.url(name), tmp_path_factory.mktemp("template"))
    asyncio.run(migrate(place(settings)))
    return name


@pytest.fixture(params=DATABASES)
def database_kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def empty(
    request: pytest.FixtureRequest, database_kind: str, tmp_path: Path
) -> Iterator[StoreSettings]:
    """Settings of a store without a schema."""
    if database_kind == "sqlite":
        yield settings_of(None, tmp_path)
        return
    server: PrivatePostgres = request.getfixturevalue("postgres")
    yield settings_of(server.url(server.fresh()), tmp_path)


@pytest.fixture
def migrated(
    request: pytest.FixtureRequest, database_kind: str, tmp_path: Path
) -> Iterator[StoreSettings]:
    """Settings of a store with the current schema."""
    if database_kind == "sqlite":
        settings = settings_of(None, tmp_path)
        asyncio.run(migrate(place(settings)))
        yield settings
        return
    server: PrivatePostgres = request.getfixturevalue("postgres")
    name = server.fresh(template=request.getfixturevalue("migrated_template"))
    yield settings_of(server.url(name), tmp_path)


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
async def store(migrated: StoreSettings, clock: ManualClock) -> AsyncIterator[Store]:
    """A store that is ready for use, with a clock that the test sets."""
    async with open_store(migrated, clock=clock) as opened:
        await opened.check()
        yield opened
