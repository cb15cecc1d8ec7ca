"""Rows of files: what was uploaded or produced, for which tenant, and where its body is."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal

import msgspec
from sqlalchemy import Row, and_, delete, func, insert, or_, select, update

from shared.contracts.base import TenantId, UnixTime
from shared.store.database import Database
from shared.store.ids import FILE, ids_in
from shared.store.leases import Lease, Leases
from shared.store.schema import files

FileStatus = Literal["stored", "lost"]
STORED: FileStatus = "stored"
LOST: FileStatus = "lost"
Order = Literal["asc", "desc"]
FILES = "files:"
"""Prefix of the lock on a tenant's totals."""


class StoredFile(msgspec.Struct, frozen=True, kw_only=True):
    """A file; its body is complete before the row exists."""

    id: str
    tenant: TenantId
    purpose: str
    filename: str
    num_bytes: int
    sha256: str
    created_at: UnixTime
    expires_at: UnixTime | None = None
    status: FileStatus = STORED
    """`lost` while the body is missing."""
    body: str
    """Path of the body in the folder of bodies."""


@dataclass(frozen=True, slots=True)
class Totals:
    """The files of one tenant."""

    num_files: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class FileStatusRow:
    """What a comparison of rows and bodies needs of a file."""

    id: str
    status: FileStatus


class FileRows:
    """
    The table `files`. Expired files are invisible, also before they are deleted.

    Args:
        database: The store's database.
        leases: Its leases.
    """

    def __init__(self, database: Database, leases: Leases) -> None:
        self._database = database
        self._leases = leases

    async def add(self, file: StoredFile, admit: Callable[[Totals], None]) -> None:
        """
        Add the row of a file whose body is in its place.

        Args:
            file: The file.
            admit: Called with the tenant's totals before the file; raises an error to refuse it.
                Rows of one tenant are added one after the other, so that limits hold.
        """
        async with self._database.write() as connection:
            await self._database.lock(connection, FILES + file.tenant)
            totals = (await connection.execute(_totals(file.tenant))).one()
            admit(Totals(totals.num_files, int(totals.num_bytes)))
            await connection.execute(insert(files).values(**file_values(file)))

    async def totals(self, tenant: TenantId) -> tuple[UnixTime, Totals]:
        """The database's time, and the totals of the tenant with expired files."""
        query = _totals(tenant).add_columns(self._database.now.label("now"))
        async with self._database.read() as connection:
            row = (await connection.execute(query)).one()
        return float(row.now), Totals(row.num_files, int(row.num_bytes))

    async def get(self, tenant: TenantId, file_id: str) -> StoredFile | None:
        """The file of the tenant; None also for another tenant's file."""
        query = select(files).where(self._visible(tenant), files.c.id == file_id)
        async with self._database.read() as connection:
            row = (await connection.execute(query)).first()
        return None if row is None else _file(row)

    async def page(
        self,
        tenant: TenantId,
        *,
        limit: int,
        order: Order = "desc",
        after: str | None = None,
        purpose: str | None = None,
    ) -> tuple[list[StoredFile], bool]:
        """
        Files of the tenant in the order of their creation.

        Args:
            tenant: The tenant.
            limit: Maximum number of files.
            order: `desc` begins with the newest.
            after: Id before the page; that file may have been deleted.
            purpose: Only files with this purpose.

        Returns:
            The files, and whether there are more.
        """
        query = select(files).where(self._visible(tenant))
        if purpose is not None:
            query = query.where(files.c.purpose == purpose)
        if after is not None:
            query = query.where(files.c.id > after if order == "asc" else files.c.id < after)
        ordered = query.order_by(files.c.id.asc() if order == "asc" else files.c.id.desc())
        async with self._database.read() as connection:
            rows = (await connection.execute(ordered.limit(limit + 1))).all()
        return [_file(row) for row in rows[:limit]], len(rows) > limit

    async def remove(self, tenant: TenantId, file_id: str) -> StoredFile | None:
        """Remove the row of the tenant's file and return it; its body is removed afterwards."""
        removed = delete(files).where(self._visible(tenant), files.c.id == file_id).returning(files)
        async with self._database.write() as connection:
            row = (await connection.execute(removed)).first()
        return None if row is None else _file(row)

    async def remove_expired(self, lease: Lease, *, limit: int) -> list[StoredFile]:
        """
        Remove the rows of at most *limit* expired files and return them.

        Raises:
            StaleLeaseError: Another process holds the lease.
        """
        expired = select(files.c.id).where(files.c.expires_at <= self._database.now).limit(limit)
        removed = delete(files).where(files.c.id.in_(expired)).returning(files)
        async with self._leases.fenced(lease) as connection:
            rows = (await connection.execute(removed)).all()
        return [_file(row) for row in rows]

    async def folders(self) -> set[str]:
        """Names of the folders in which bodies of files should be."""
        name = func.substr(files.c.id, len(FILE) + 1, 6)
        async with self._database.read() as connection:
            return set((await connection.execute(select(name).distinct())).scalars())

    async def in_folder(self, folder: str) -> list[FileStatusRow]:
        """The files whose bodies should be in *folder*, also expired ones."""
        first, end = ids_in(folder)
        query = select(files.c.id, files.c.status).where(files.c.id >= first, files.c.id < end)
        async with self._database.read() as connection:
            rows = (await connection.execute(query)).all()
        return [FileStatusRow(row.id, row.status) for row in rows]

    async def mark(self, lease: Lease, file_ids: Iterable[str], status: FileStatus) -> None:
        """
        Set the status of files.

        Raises:
            StaleLeaseError: Another process holds the lease.
        """
        async with self._leases.fenced(lease) as connection:
            for each in file_ids:
                await connection.execute(
                    update(files).where(files.c.id == each).values(status=status)
                )

    def _visible(self, tenant: TenantId) -> Any:
        lives = or_(files.c.expires_at.is_(None), files.c.expires_at > self._database.now)
        return and_(files.c.tenant == tenant, lives)


def file_values(file: StoredFile) -> dict[str, Any]:
    """Columns of the row of *file*."""
    values = msgspec.structs.asdict(file)
    values["bytes"] = values.pop("num_bytes")
    return values


def _totals(tenant: TenantId) -> Any:
    return select(
        func.count().label("num_files"),
        func.coalesce(func.sum(files.c.bytes), 0).label("num_bytes"),
    ).where(files.c.tenant == tenant)


def _file(row: Row[Any]) -> StoredFile:
    values = dict(row._mapping)  # noqa: SLF001 - a public name of SQLAlchemy
    return StoredFile(num_bytes=int(values.pop("bytes")), **values)
