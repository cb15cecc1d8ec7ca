"""
Migrations of the store's schema, and the check that a process can use the schema it finds.

Alembic loads `shared.store.migrations.env`, and through it the revisions.
"""

import asyncio
import fcntl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from sqlalchemy import Connection, inspect, select, text
from sqlalchemy.ext.asyncio import AsyncConnection

from shared.contracts.base import Seconds
from shared.contracts.errors import StoreSchemaError, StoreUnavailableError
from shared.store.database import Database
from shared.store.location import PRIVATE, Location
from shared.store.migrations import HEAD, revision_id
from shared.store.schema import schema_info

if TYPE_CHECKING:
    from alembic.config import Config

TIMEOUT_S = 600.0
"""Time limit of a migration, including the wait for another process that migrates."""
LOCK = "headway-store-schema"
LOCK_POLL_S = 0.05
VERSIONS = "alembic_version"
COMMAND = "headway store migrate"


@dataclass(frozen=True, slots=True)
class Schema:
    """Schema of a database."""

    revision: int
    """Number of its revision; 0 for an empty database."""
    min_reader: int
    """Oldest revision of code that can use it."""

    def problem(self, head: int = HEAD) -> str | None:
        """
        Why code of the revision *head* cannot use the schema; None if it can.

        A newer schema is usable until a migration says otherwise in `min_reader`.
        """
        if self.revision == 0:
            return f"the store has no schema: run `{COMMAND}`"
        if self.revision < head:
            return (
                f"the store's schema has revision {self.revision}, and this version of Headway "
                f"needs {head}: run `{COMMAND}`"
            )
        if self.min_reader > head:
            return (
                f"the store's schema has revision {self.revision}, which needs code of revision "
                f"{self.min_reader} or later, and this version of Headway has {head}: upgrade it"
            )
        return None


async def read_schema(connection: AsyncConnection) -> Schema:
    """The schema that the database of *connection* has."""
    if not await connection.run_sync(lambda sync: inspect(sync).has_table(VERSIONS)):
        return Schema(0, 0)
    found = (await connection.execute(text(f"SELECT version_num FROM {VERSIONS}"))).scalar()  # noqa: S608 - a constant
    if found is None:
        return Schema(0, 0)
    oldest = (await connection.execute(select(schema_info.c.min_reader))).scalar_one()
    return Schema(int(found), oldest)


async def check_schema(database: Database) -> Schema:
    """
    The schema of *database*, which this version of Headway can use.

    Raises:
        StoreSchemaError: It is too old, or too new; the message has the remedy.
        StoreUnavailableError: The database does not answer.
    """
    async with database.read() as connection:
        schema = await read_schema(connection)
    if (problem := schema.problem()) is not None:
        raise StoreSchemaError(problem)
    return schema


async def migrate(location: Location, *, timeout_s: Seconds = TIMEOUT_S) -> tuple[Schema, Schema]:
    """
    Bring the schema to the revision `HEAD`; a newer schema stays as it is.

    Any number of processes may migrate at the same time: one does, the others wait for it.

    Returns:
        The schema before and after.

    Raises:
        StoreUnavailableError: The database does not answer, or another process migrates for longer
            than *timeout_s*.
        StoreSchemaError: The schema is newer, and does not allow this version of Headway.
    """
    async with _turn(location, timeout_s):
        database = Database(location.url, timeout_s=timeout_s, foreign_keys=False)
        try:
            async with database.write(timeout_s=timeout_s) as connection:
                await database.lock(connection, LOCK)
                before = await read_schema(connection)
                if before.revision < HEAD:
                    await connection.run_sync(_upgrade)
                after = await read_schema(connection)
                await _check_references(database, connection)
        finally:
            await database.close()
    if (problem := after.problem()) is not None:
        raise StoreSchemaError(problem)
    return before, after


@asynccontextmanager
async def _turn(location: Location, timeout_s: Seconds) -> AsyncIterator[None]:
    """
    Context in which no other process migrates an SQLite file.

    A lock file, since the first connection changes the mode of a new database, and SQLite does not
    wait for locks then. PostgreSQL needs none.
    """
    if location.sqlite_file is None:
        yield
        return
    # Files of all tenants are below this directory.
    location.sqlite_file.parent.mkdir(mode=PRIVATE, parents=True, exist_ok=True)
    lock = location.sqlite_file.with_name(f"{location.sqlite_file.name}.migrate-lock")
    with lock.open("w") as held:
        try:
            async with asyncio.timeout(timeout_s):
                while not _locked(held.fileno()):  # noqa: ASYNC110 - another process's lock
                    await asyncio.sleep(LOCK_POLL_S)
        except TimeoutError as error:
            raise StoreUnavailableError(f"another process holds {lock}: it migrates") from error
        yield


def _locked(file: int) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def alembic_config(connection: Connection | None = None) -> "Config":
    """Alembic's configuration for the revisions of `shared.store.migrations`."""
    from alembic.config import Config  # noqa: PLC0415 - services only check the schema

    spec = find_spec("shared.store.migrations")
    assert spec is not None  # noqa: S101 - a package of the wheel
    assert spec.origin is not None  # noqa: S101 - as above
    config = Config()
    config.set_main_option("script_location", str(Path(spec.origin).parent).replace("%", "%%"))
    config.set_main_option("path_separator", "os")
    if connection is not None:
        config.attributes["connection"] = connection
    return config


def _upgrade(connection: Connection) -> None:
    from alembic import command  # noqa: PLC0415 - as above

    command.upgrade(alembic_config(connection), revision_id(HEAD))


async def _check_references(database: Database, connection: AsyncConnection) -> None:
    """Roll a migration of SQLite back that leaves references to missing rows."""
    if not database.is_sqlite:
        return
    broken = (await connection.execute(text("PRAGMA foreign_key_check"))).first()
    if broken is not None:
        raise StoreSchemaError(f"the migration would leave a reference to a missing row: {broken}")
