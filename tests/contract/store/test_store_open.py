"""A store that is opened: hosts, places of bodies, and a database that is away."""

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
from sqlalchemy import text

from ops.bench.postgres import PrivatePostgres
from shared.contracts.errors import SettingsError, StoreUnavailableError
from shared.store.location import Host
from shared.store.migrating import migrate
from shared.store.settings import StoreSettings
from shared.store.store import HOST_LEASE_S
from tests.brokers import eventually
from tests.stores import ManualClock, a_file, open_store, place, put, settings_of
from tests.tcp_proxy import TcpProxy

HOST = Host(boot="boot-1", machine="machine-1", name="one")
OTHER_HOST = Host(boot="boot-2", machine="machine-2", name="two")
ONLY_SQLITE = pytest.mark.parametrize("database_kind", ["sqlite"], indirect=True)


@ONLY_SQLITE
async def test_a_second_host_is_refused_while_the_first_uses_the_file(migrated: StoreSettings):
    clock = ManualClock()
    async with (
        open_store(migrated, clock=clock, host=HOST) as first,
        open_store(migrated, clock=clock, host=OTHER_HOST) as second,
    ):
        await first.check()
        clock.now += HOST_LEASE_S - 1.0
        with pytest.raises(SettingsError, match=r"host one uses .*store\.db.*PostgreSQL"):
            await second.check()
        with pytest.raises(StoreUnavailableError, match="host one uses"):
            second.require()
        await first.check()
        clock.now += HOST_LEASE_S - 1.0
        with pytest.raises(SettingsError, match="host one uses"):
            await second.check()
        clock.now += HOST_LEASE_S
        await second.check()
        with pytest.raises(SettingsError, match="host two uses"):
            await first.check()


@ONLY_SQLITE
@pytest.mark.parametrize(
    "again",
    [
        Host(boot="boot-1", machine="", name="container"),
        Host(boot="boot-9", machine="machine-1", name="one"),
    ],
    ids=["a container of the same host", "the host after a restart"],
)
async def test_the_same_host_is_not_refused(migrated: StoreSettings, again: Host):
    async with open_store(migrated, host=HOST) as first, open_store(migrated, host=again) as second:
        await first.check()
        await second.check()

        second.require()


async def test_stores_of_one_database_share_their_bodies(migrated: StoreSettings):
    async with open_store(migrated) as first, open_store(migrated) as second:
        await asyncio.gather(first.check(), second.check())
        file = await put(first, b"hello")

        assert await second.files.get(file.tenant, file.id) == file
        assert await second.bodies.exists(file.body)


async def test_another_folder_of_bodies_is_refused(
    migrated: StoreSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    elsewhere = msgspec.structs.replace(migrated, files=f"file://{tmp_path}/elsewhere")
    async with open_store(migrated) as first, open_store(elsewhere) as second:
        await first.check()

        with pytest.raises(SettingsError, match=r"elsewhere does not have the file bodies"):
            await second.check()


async def test_a_folder_with_the_bodies_of_another_store_is_refused(
    migrated: StoreSettings, tmp_path: Path
):
    """Its sweep would delete them, since it has no rows for them."""
    async with open_store(migrated) as store:
        await store.bodies.set_marker("another store")
        await store.check()
        await put(store, b"x")
    other = settings_of(None, tmp_path / "other", files=f"file://{tmp_path}/files")
    await migrate(place(other))
    async with open_store(other) as second:
        for _ in range(2):
            with pytest.raises(SettingsError, match="has the file bodies of another store"):
                await second.check()


async def test_a_table_that_is_gone_is_a_problem_not_an_end(migrated: StoreSettings):
    async with open_store(migrated) as store:
        await store.check()
        async with store.database.write() as connection:
            await connection.execute(text("DROP TABLE schema_info"))
        with pytest.raises(StoreUnavailableError):
            await store.check()

        assert store.problem is not None


async def test_bodies_that_are_not_mounted_are_noticed(migrated: StoreSettings, tmp_path: Path):
    async with open_store(migrated) as store:
        await store.check()
        await store.require_bodies()
        (tmp_path / "files").rename(tmp_path / "unmounted")

        with pytest.raises(StoreUnavailableError, match="does not have the file bodies"):
            await store.require_bodies()


async def test_a_missing_database_file_is_not_created(tmp_path: Path):
    async with open_store(settings_of(None, tmp_path)) as store:
        with pytest.raises(SettingsError, match="run `headway store migrate`"):
            await store.check()

    assert not (tmp_path / "store.db").exists()


@contextlib.contextmanager
def cut(proxy: TcpProxy) -> Iterator[None]:
    """Context in which connections are reset and refused."""
    proxy.refusing = True
    proxy.drop()
    yield
    proxy.refusing = False


@contextlib.contextmanager
def silent(proxy: TcpProxy) -> Iterator[None]:
    """Context in which nothing is answered."""
    proxy.answering.clear()
    yield
    proxy.answering.set()


@pytest.mark.parametrize("away", [cut, silent])
async def test_a_database_that_is_away_is_used_again_when_it_returns(
    postgres: PrivatePostgres,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    away: Callable[[TcpProxy], contextlib.AbstractContextManager[None]],
):
    monkeypatch.setattr("shared.store.store.CHECK_PERIOD_S", 0.05)
    name = await postgres.create()
    await migrate(place(settings_of(postgres.url(name), tmp_path)))
    async with TcpProxy("127.0.0.1", postgres.port) as proxy:
        url = postgres.url(name, port=proxy.port)
        settings = msgspec.structs.replace(settings_of(url, tmp_path), timeout_s=2.0)
        stop = asyncio.Event()
        async with open_store(settings) as store:
            following = asyncio.create_task(store.follow(stop))
            await eventually(lambda: store.problem is None)
            file = await put(store, b"before")
            with away(proxy):
                with pytest.raises(StoreUnavailableError):
                    await store.files.get(file.tenant, file.id)
                await eventually(lambda: store.problem is not None)
            await eventually(lambda: store.problem is None)
            await store.files.add(later := a_file(), lambda _: None)

            assert await store.files.get(file.tenant, file.id) == file
            assert await store.files.get(later.tenant, later.id) == later
            stop.set()
            await following
