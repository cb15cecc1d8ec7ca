"""A store for gateways' parts."""

from pathlib import Path

import pytest

from ops.bench.postgres import PrivatePostgres
from shared.store.migrating import migrate
from shared.store.settings import StoreSettings
from tests.stores import ManualClock, place, settings_of


@pytest.fixture(params=["sqlite", "postgresql"])
def url(request: pytest.FixtureRequest) -> str | None:
    """URL of an empty database; None for SQLite in the data directory."""
    if request.param == "sqlite":
        return None
    server: PrivatePostgres = request.getfixturevalue("postgres")
    return server.url(server.fresh())


@pytest.fixture
async def settings(url: str | None, tmp_path: Path) -> StoreSettings:
    """Settings of a store with its schema."""
    made = settings_of(url, tmp_path / "data")
    await migrate(place(made))
    return made


@pytest.fixture
def clock() -> ManualClock:
    """The databases' clock, so that a gateway is gone when a test says so."""
    return ManualClock()
