"""Stores on both databases."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from ops.bench.postgres import PrivatePostgres
from shared.store.settings import StoreSettings
from shared.store.store import Store
from tests.stores import ManualClock, migrated_settings, open_store, settings_of

DATABASES = ("sqlite", "postgresql")


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
        yield asyncio.run(migrated_settings(None, tmp_path))
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
