"""The store of one process: opened lazily, checked again and again, away without harm."""

import asyncio
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec
import structlog
from sqlalchemy import select, update
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncConnection

from shared.contracts.errors import (
    MeshError,
    SettingsError,
    StoreSchemaError,
    StoreUnavailableError,
)
from shared.runtime.tasks import pause
from shared.store.bodies import MARKER, Bodies
from shared.store.database import Database, Now, database_clock
from shared.store.documents import DocumentRows
from shared.store.files import FileRows
from shared.store.leases import Leases
from shared.store.location import Host, Location, location_of, this_host
from shared.store.migrating import check_schema
from shared.store.objects.batches import BatchRows
from shared.store.objects.responses import ResponseRows
from shared.store.objects.webhooks import DeliveryRows
from shared.store.requests.memory_meshes import MemoryMeshes
from shared.store.requests.rows import RequestRows
from shared.store.schema import leases, schema_info
from shared.store.settings import StoreSettings

log = structlog.get_logger()

CHECK_PERIOD_S = 5.0
HOST_LEASE = "sqlite-host"
HOST_LEASE_S = 30.0
"""Time after which another host may use an SQLite file that no process has used."""
BODY_TIMEOUT_FACTOR = 10.0
"""A file system may take longer for a block than the database for a transaction."""


class Store:
    """
    The store as one process uses it.

    Args:
        location: Database and file bodies.
        settings: Time limits.
        host: Identity of this host.
        clock: Expression of the database's time; tests replace it.

    Raises:
        SettingsError: The place of file bodies is not usable.
    """

    def __init__(
        self,
        location: Location,
        settings: StoreSettings,
        *,
        host: Host | None = None,
        clock: Now = database_clock,
    ) -> None:
        self.location = location
        self.database = Database(location.url, timeout_s=settings.timeout_s, clock=clock)
        self.leases = Leases(self.database)
        self.files = FileRows(self.database, self.leases)
        self.documents = DocumentRows(self.database)
        self.requests = RequestRows(self.database, self.leases, memory_mesh=settings.memory_mesh)
        self.memory_meshes = MemoryMeshes(self.database, self.leases)
        self.batches = BatchRows(self.database, self.leases)
        self.responses = ResponseRows(self.database, self.leases)
        self.deliveries = DeliveryRows(self.database, self.leases)
        self.bodies = Bodies(location.files, timeout_s=settings.timeout_s * BODY_TIMEOUT_FACTOR)
        self.problem: str | None = "the store has not been checked yet"
        """Why the store cannot be used now; None if it can."""
        self._host = host or this_host()
        self._has_marker = False

    def require(self) -> None:
        """
        Check that the store can be used.

        Raises:
            StoreUnavailableError: It could not be reached at the last check, or this process may
                not use it; the message has the reason.
        """
        if self.problem is not None:
            raise StoreUnavailableError(self.problem)

    async def check(self) -> None:
        """
        Check that this process can use the store, and keep the result in `problem`.

        Raises:
            SettingsError: The schema is too old or too new, another host uses the SQLite file, or
                the file bodies of this store are elsewhere.
            StoreUnavailableError: The database or the file system does not answer.
        """
        try:
            await self._check()
        except MeshError as error:
            self.problem = str(error)
            raise
        except SQLAlchemyError as error:
            self.problem = f"the store has another schema than it says: {error}"
            raise StoreUnavailableError(self.problem) from error
        self.problem = None

    async def require_bodies(self) -> None:
        """
        Check that the folder of file bodies is this store's, before a missing body counts as lost.

        Raises:
            StoreUnavailableError: It is not, e.g. since its disk is not mounted.
        """
        async with self.database.read() as connection:
            expected = await self._marker(connection)
        if await self.bodies.marker() != expected:
            raise StoreUnavailableError(
                f"store.files: {self.location.files} does not have the file bodies of this store"
            )

    async def follow(self, stop: asyncio.Event) -> None:
        """Check the store periodically until *stop*; changes are logged."""
        while not stop.is_set():
            before = self.problem
            try:
                await self.check()
            except MeshError as error:
                if before != self.problem:
                    log.error("store.unavailable", error=str(error))
            else:
                if before is not None:
                    log.info("store.available", database=self.location.shown)
            await pause(stop, CHECK_PERIOD_S)

    async def close(self) -> None:
        """Close the connections and end the threads."""
        self.bodies.close()
        await self.database.close()

    async def _check(self) -> None:
        file = self.location.sqlite_file
        if file is not None and not file.exists():
            # A connection would create an empty database.
            raise StoreSchemaError(
                f"the store has no database at {file}: run `headway store migrate`"
            )
        await check_schema(self.database)
        if file is not None:
            await self._claim_for_host()
        if not self._has_marker:
            await self._find_marker()
            self._has_marker = True

    async def _claim_for_host(self) -> None:
        """
        Claim an SQLite file for this host.

        Raises:
            SettingsError: Another host uses it.
        """
        database = self.database
        row_of_host = select(leases, database.now.label("now")).where(leases.c.name == HOST_LEASE)
        async with database.write() as connection:
            row = (await connection.execute(row_of_host)).first()
            if row is not None:
                holder = msgspec.json.decode(row.holder, type=Host)
                if not holder.is_same(self._host) and row.until > row.now:
                    raise SettingsError(
                        f"store: host {holder.name} uses {self.location.sqlite_file}, and SQLite "
                        "serves one host: stop Headway there, or use PostgreSQL for both: "
                        "store.url=postgresql://user:password@host/name"
                    )
                if holder == self._host and row.until - row.now > HOST_LEASE_S / 2:
                    return
            values = {
                "holder": msgspec.json.encode(self._host).decode(),
                "until": database.now + HOST_LEASE_S,
            }
            claim = database.insert(leases).values(name=HOST_LEASE, token=1, **values)
            await connection.execute(
                claim.on_conflict_do_update(index_elements=[leases.c.name], set_=values)
            )

    async def _find_marker(self) -> None:
        """
        Check that the file bodies belong to this database; a new store claims its folder.

        Raises:
            SettingsError: The folder has no marker, or that of another store.
        """
        async with self.database.write() as connection:
            await self.database.lock(connection, MARKER)
            expected = await self._marker(connection)
            found = await self.bodies.marker()
            if expected is None:
                # A marker without bodies may be this store's own, after a crash before the commit.
                if found is not None and await self.bodies.folders():
                    raise SettingsError(
                        f"store.files: {self.location.files} has the file bodies of another store; "
                        "use another place, or restore the database of those files"
                    )
                expected = found or secrets.token_hex(16)
                if found is None:
                    await self.bodies.set_marker(expected)
                await connection.execute(update(schema_info).values(files_marker=expected))
                return
        if found != expected:
            raise SettingsError(
                f"store.files: {self.location.files} does not have the file bodies of this store: "
                f"its file {MARKER!r} contains {found!r} instead of {expected!r}. Gateways on "
                "several hosts need a place that all of them reach; after a restore of that place, "
                "write the file again"
            )

    async def _marker(self, connection: AsyncConnection) -> str | None:
        """Marker of this store's folder; None until it has claimed one."""
        query = select(schema_info.c.files_marker)
        marker: str | None = (await connection.execute(query)).scalar_one()
        return marker


def state_of(store: Store | None) -> str:
    """State of the store, for /health: a service without it does all but stored work."""
    if store is None:
        return "none"
    return store.problem or "ok"


@asynccontextmanager
async def opened_store(settings: StoreSettings) -> AsyncIterator[Store | None]:
    """
    Context with the store of *settings*; None if they name none.

    A store that does not answer is opened anyway, and usable when `Store.follow` has found it.

    Raises:
        SettingsError: This process cannot use the store.
    """
    location = location_of(settings)
    if location is None:
        yield None
        return
    store = Store(location, settings)
    try:
        try:
            await store.check()
        except SettingsError:
            raise
        except MeshError as error:
            log.error("store.unavailable", error=str(error))
        yield store
    finally:
        await store.close()
