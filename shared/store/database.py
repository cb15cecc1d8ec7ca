"""Transactions on the store's database, the same on SQLite and PostgreSQL."""

import asyncio
import errno
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from typing import Any

import asyncpg
from sqlalchemy import (
    ColumnElement,
    Connection,
    Double,
    Table,
    event,
    func,
    literal_column,
    select,
)
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.engine import URL
from sqlalchemy.exc import (
    DataError,
    DBAPIError,
    IntegrityError,
    NotSupportedError,
    ProgrammingError,
)
from sqlalchemy.exc import TimeoutError as PoolTimeoutError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, create_async_engine

from shared.contracts.base import Seconds, UnixTime
from shared.contracts.errors import MeshError, StoreFullError, StoreUnavailableError
from shared.store.location import SQLITE

BUGS = (DataError, IntegrityError, NotSupportedError, ProgrammingError)
"""Errors of statements; all other errors of a driver are the database's."""
DRIVER_ERRORS = (
    OSError,
    asyncpg.PostgresError,
    asyncpg.InterfaceError,
    asyncpg.InternalClientError,
)
"""Errors while a connection is made, which SQLAlchemy does not translate."""
FULL_DISK = (errno.ENOSPC, errno.EDQUOT)
PG_DISK_FULL = "53100"
PG_DATA_ERRORS = "22"
"""Class of the codes of errors of values."""
POOL_SIZE = 8
CONNECT_TIMEOUT_S = 10.0
_WRITES = "headway_writes"
_NO_TURN = nullcontext()

Now = Callable[[bool], ColumnElement[float]]
"""SQL expression of the time in Unix seconds; the argument is True for SQLite."""


def database_clock(is_sqlite: bool) -> ColumnElement[float]:  # noqa: FBT001 - see `Now`
    """
    The time of the database's host, so that hosts with different clocks agree on what has expired.
    """
    if is_sqlite:
        return literal_column("((julianday('now') - 2440587.5) * 86400.0)", Double)
    # The time of the statement: `now()` would be the time of the transaction's begin.
    return literal_column("CAST(extract(epoch FROM clock_timestamp()) AS double precision)", Double)


class Database:
    """
    The store's database; nothing is connected before the first transaction.

    Args:
        url: URL with the driver.
        timeout_s: Time limit of a transaction, including the wait for a connection and locks.
        clock: Expression of the time; tests replace it.
        foreign_keys: False for migrations, which replace tables on SQLite.
    """

    def __init__(
        self,
        url: URL,
        *,
        timeout_s: Seconds,
        clock: Now = database_clock,
        foreign_keys: bool = True,
    ) -> None:
        self.is_sqlite = url.drivername == SQLITE
        self._timeout_s = timeout_s
        self._clock = clock
        self._engine = _engine(url, timeout_s, foreign_keys=foreign_keys)
        self._writing = self._engine.execution_options(**{_WRITES: True})
        # SQLite's wait for its lock is not fair: a writer may wait while others of the same process
        # write again and again.
        self._turn = asyncio.Lock() if self.is_sqlite else _NO_TURN

    @property
    def now(self) -> ColumnElement[float]:
        """The database's time in Unix seconds, for use in a statement."""
        return self._clock(self.is_sqlite)

    async def time(self) -> UnixTime:
        """The database's time."""
        async with self.read() as connection:
            return float((await connection.execute(select(self.now))).scalar_one())

    @asynccontextmanager
    async def read(self) -> AsyncIterator[AsyncConnection]:
        """
        Transaction that changes nothing.

        Raises:
            StoreUnavailableError: The database does not answer in time.
        """
        async with self._transaction(self._engine) as connection:
            yield connection

    @asynccontextmanager
    async def write(self, *, timeout_s: Seconds | None = None) -> AsyncIterator[AsyncConnection]:
        """
        Transaction that is committed at the end of the context, or rolled back after an error.

        On SQLite, at most one such transaction is open at a time.

        Raises:
            StoreUnavailableError: The database does not answer in time; the transaction may or may
                not be committed.
            StoreFullError: The database's disk is full.
        """
        async with self._transaction(self._writing, timeout_s, self._turn) as connection:
            if not self.is_sqlite:
                await connection.execute(_limits(timeout_s or self._timeout_s))
            yield connection

    def insert(self, table: Table) -> sqlite.Insert | postgresql.Insert:
        """An INSERT whose conflicts can be resolved, in the database's dialect."""
        return sqlite.insert(table) if self.is_sqlite else postgresql.insert(table)

    async def lock(self, connection: AsyncConnection, name: str) -> None:
        """Let transactions that lock the same *name* run in turn; SQLite's writes always do."""
        if not self.is_sqlite:
            key = func.hashtextextended(name, 0)
            await connection.execute(select(func.pg_advisory_xact_lock(key)))

    async def close(self) -> None:
        """Close all connections."""
        await self._engine.dispose()

    @asynccontextmanager
    async def _transaction(
        self,
        engine: AsyncEngine,
        timeout_s: Seconds | None = None,
        turn: AbstractAsyncContextManager[None] = _NO_TURN,
    ) -> AsyncIterator[AsyncConnection]:
        limit_s = timeout_s or self._timeout_s
        limit = asyncio.timeout(limit_s)
        try:
            async with limit, turn, engine.begin() as connection:
                yield connection
        except MeshError:
            raise
        except TimeoutError as error:
            raise StoreUnavailableError(f"the database did not answer in {limit_s:g} s") from error
        except PoolTimeoutError as error:
            raise StoreUnavailableError("all connections to the database are in use") from error
        except DBAPIError as error:
            if _is_full(error):
                raise StoreFullError("the disk of the database is full") from error
            is_bug = isinstance(error, BUGS) or _is_data_error(error)
            if is_bug and not error.connection_invalidated:
                raise
            if limit.expired():  # the driver fails to roll back in the middle of an operation
                raise StoreUnavailableError(
                    f"the database did not answer in {limit_s:g} s"
                ) from error
            raise StoreUnavailableError(f"the database failed: {error.orig}") from error
        except DRIVER_ERRORS as error:
            raise StoreUnavailableError(f"the database cannot be reached: {error}") from error


def _engine(url: URL, timeout_s: Seconds, *, foreign_keys: bool) -> AsyncEngine:
    if url.drivername != SQLITE:
        return create_async_engine(
            url,
            pool_size=POOL_SIZE,
            max_overflow=0,
            pool_timeout=timeout_s,
            pool_pre_ping=True,
            connect_args={
                "timeout": min(timeout_s, CONNECT_TIMEOUT_S),
                "server_settings": {"application_name": "headway"},
            },
        )
    # The wait for a lock ends before the transaction's limit, which would close the connection.
    engine = create_async_engine(url, connect_args={"timeout": timeout_s * 0.8})

    @event.listens_for(engine.sync_engine, "connect")
    def on_connect(connection: Any, _record: object) -> None:
        # The driver would begin transactions by itself, and only before some statements.
        connection.isolation_level = None
        cursor = connection.cursor()
        # FULL, since with NORMAL a power failure takes back the last transactions.
        for pragma in ("journal_mode = WAL", "synchronous = FULL"):
            cursor.execute(f"PRAGMA {pragma}")
        cursor.execute(f"PRAGMA foreign_keys = {'ON' if foreign_keys else 'OFF'}")
        cursor.close()

    @event.listens_for(engine.sync_engine, "begin")
    def on_begin(connection: Connection) -> None:
        writes = connection.get_execution_options().get(_WRITES, False)
        # A transaction that reads first could not become a writing one after another's commit.
        connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")

    return engine


def _limits(timeout_s: Seconds) -> Any:
    """
    Limits of the transaction at the server, so that a process that stops in the middle of a
    transaction does not hold its locks.
    """
    limit = f"{timeout_s * 1000:.0f}ms"
    names = ("statement_timeout", "idle_in_transaction_session_timeout")
    return select(*(func.set_config(name, limit, True) for name in names))


def _is_full(error: DBAPIError) -> bool:
    return _sqlstate(error) == PG_DISK_FULL or "disk is full" in str(error.orig)


def _is_data_error(error: DBAPIError) -> bool:
    """Whether PostgreSQL refuses a value; SQLAlchemy does not map this error of asyncpg."""
    return _sqlstate(error).startswith(PG_DATA_ERRORS)


def _sqlstate(error: DBAPIError) -> str:
    return getattr(error.orig, "sqlstate", None) or ""
