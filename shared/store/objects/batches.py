"""Rows of batches: what a tenant asked for, how far it is, and which files have the results."""

from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any

import msgspec
from sqlalchemy import Row, and_, delete, exists, false, insert, or_, select, update

from shared.contracts.base import Seconds, TenantId, UnixTime
from shared.store.database import Database
from shared.store.files import StoredFile, file_values
from shared.store.leases import Lease, Leases
from shared.store.objects.webhooks import Notice, enqueue
from shared.store.schema import batches, files, leases


class BatchStatus(Enum):
    """Status of a batch, with OpenAI's names."""

    VALIDATING = "validating"
    IN_PROGRESS = "in_progress"
    FINALIZING = "finalizing"
    CANCELLING = "cancelling"
    COMPLETED = "completed"
    FAILED = "failed"
    """The input cannot be read as a file of requests; nothing was run."""
    EXPIRED = "expired"
    """The window ended before all lines did."""
    CANCELLED = "cancelled"


OPEN = (
    BatchStatus.VALIDATING,
    BatchStatus.IN_PROGRESS,
    BatchStatus.FINALIZING,
    BatchStatus.CANCELLING,
)
"""Statuses of batches that need a runner."""
CANCELLABLE = (BatchStatus.VALIDATING, BatchStatus.IN_PROGRESS)
JOB = "batch:"
"""Prefix of the name of a batch's lease."""


class StoredBatch(msgspec.Struct, frozen=True, kw_only=True):
    """A row of the table `batches`; its columns have comments in `shared.store.schema`."""

    id: str
    tenant: TenantId
    endpoint: str
    input_file_id: str
    input_body: str
    completion_window: str
    slo: str | None = None
    metadata: str | None = None
    output_expires_s: Seconds | None = None
    status: BatchStatus = BatchStatus.VALIDATING
    created_at: UnixTime
    expires_at: UnixTime
    in_progress_at: UnixTime | None = None
    finalizing_at: UnixTime | None = None
    cancelling_at: UnixTime | None = None
    ended_at: UnixTime | None = None
    num_lines: int = 0
    num_completed: int = 0
    num_failed: int = 0
    submitted_lines: int = 0
    output_file_id: str | None = None
    error_file_id: str | None = None
    errors: str | None = None
    lines_per_s: float | None = None
    expected_at: UnixTime | None = None

    @property
    def is_open(self) -> bool:
        """True until the batch has ended."""
        return self.status in OPEN


class BatchCounts(msgspec.Struct, frozen=True, kw_only=True):
    """How far a batch is."""

    num_completed: int
    num_failed: int
    lines_per_s: float | None = None
    expected_at: UnixTime | None = None


class BatchEnd(msgspec.Struct, frozen=True, kw_only=True):
    """The end of a batch."""

    status: BatchStatus
    counts: BatchCounts
    output: StoredFile | None = None
    """File with the results; its body is in its place, as that of `errors_file`."""
    errors_file: StoredFile | None = None
    errors: str | None = None
    """JSON of the reasons, if the batch failed."""
    notice: Notice | None = None
    """Event for webhooks; None without a receiver."""


class KeptBatches(msgspec.Struct, frozen=True, kw_only=True):
    """Times since their ends for which records of batches are kept; None without a limit."""

    default_s: Seconds | None
    tenants_s: Mapping[TenantId, Seconds | None] = {}
    """Tenant -> its time, instead of `default_s`."""


class BatchRows:
    """
    The table `batches`. Writes of a runner are refused once another process has the batch's lease.

    Args:
        database: The store's database.
        leases: Its leases.
    """

    def __init__(self, database: Database, leases: Leases) -> None:
        self._database = database
        self._leases = leases

    async def add(self, batch: StoredBatch) -> None:
        """Add a batch; a runner finds it."""
        values = msgspec.structs.asdict(batch) | {"status": batch.status.value}
        async with self._database.write() as connection:
            await connection.execute(insert(batches).values(**values))

    async def get(self, tenant: TenantId, batch_id: str) -> StoredBatch | None:
        """The tenant's batch; None also for another tenant's."""
        query = select(batches).where(batches.c.tenant == tenant, batches.c.id == batch_id)
        async with self._database.read() as connection:
            row = (await connection.execute(query)).first()
        return None if row is None else _batch(row)

    async def page(
        self, tenant: TenantId, *, limit: int, after: str | None = None
    ) -> tuple[list[StoredBatch], bool]:
        """
        Batches of the tenant, the newest first.

        Args:
            tenant: The tenant.
            limit: Maximum number of batches.
            after: Id before the page.

        Returns:
            The batches, and whether there are more.
        """
        query = select(batches).where(batches.c.tenant == tenant)
        if after is not None:
            query = query.where(batches.c.id < after)
        query = query.order_by(batches.c.id.desc()).limit(limit + 1)
        async with self._database.read() as connection:
            rows = (await connection.execute(query)).all()
        return [_batch(row) for row in rows[:limit]], len(rows) > limit

    async def reads(self, tenant: TenantId, file_id: str) -> bool:
        """Return whether a batch that has not ended reads the file."""
        query = select(
            exists().where(
                batches.c.tenant == tenant, batches.c.input_file_id == file_id, _is_open()
            )
        )
        async with self._database.read() as connection:
            return bool((await connection.execute(query)).scalar())

    async def without_runner(self, *, limit: int) -> list[StoredBatch]:
        """At most *limit* batches that no process runs; those whose windows end first."""
        query = (
            select(batches)
            .outerjoin(leases, leases.c.name == JOB + batches.c.id)
            .where(_is_open(), or_(leases.c.name.is_(None), leases.c.until <= self._database.now))
            .order_by(batches.c.expires_at, batches.c.id)
            .limit(limit)
        )
        async with self._database.read() as connection:
            rows = (await connection.execute(query)).all()
        return [_batch(row) for row in rows]

    async def cancel(self, tenant: TenantId, batch_id: str) -> StoredBatch | None:
        """
        Ask for the cancellation of the tenant's batch, if it runs; its runner does it.

        Returns:
            The batch afterwards; None if the tenant has no such batch.
        """
        asked = (
            update(batches)
            .where(
                batches.c.tenant == tenant,
                batches.c.id == batch_id,
                batches.c.status.in_([each.value for each in CANCELLABLE]),
            )
            .values(status=BatchStatus.CANCELLING.value, cancelling_at=self._database.now)
        )
        async with self._database.write() as connection:
            await connection.execute(asked)
        return await self.get(tenant, batch_id)

    async def begin(self, lease: Lease, batch_id: str, *, num_lines: int, num_failed: int) -> None:
        """
        Note that the input was checked, unless the batch was cancelled meanwhile.

        Args:
            lease: Lease of the batch.
            batch_id: The batch.
            num_lines: Number of lines.
            num_failed: Number of lines that are invalid.

        Raises:
            StaleLeaseError: Another process runs the batch.
        """
        counts = {"num_lines": num_lines, "num_failed": num_failed}
        begun = {"status": BatchStatus.IN_PROGRESS.value, "in_progress_at": self._database.now}
        of_batch = batches.c.id == batch_id
        async with self._leases.fenced(lease) as connection:
            await connection.execute(update(batches).where(of_batch).values(**counts))
            await connection.execute(
                update(batches)
                .where(of_batch, batches.c.status == BatchStatus.VALIDATING.value)
                .values(**begun)
            )

    async def move_cursor(self, lease: Lease, batch_id: str, submitted_lines: int) -> None:
        """
        Note that all lines before *submitted_lines* were published or are invalid.

        Raises:
            StaleLeaseError: Another process runs the batch.
        """
        async with self._leases.fenced(lease) as connection:
            await connection.execute(
                update(batches)
                .where(batches.c.id == batch_id)
                .values(submitted_lines=submitted_lines)
            )

    async def count(self, lease: Lease, batch_id: str, counts: BatchCounts) -> BatchStatus:
        """
        Update the counts; return the status, by which a runner hears of a cancellation.

        Raises:
            StaleLeaseError: Another process runs the batch.
        """
        counted = (
            update(batches)
            .where(batches.c.id == batch_id)
            .values(**msgspec.structs.asdict(counts))
            .returning(batches.c.status)
        )
        async with self._leases.fenced(lease) as connection:
            return BatchStatus((await connection.execute(counted)).scalar_one())

    async def finalize(self, lease: Lease, batch_id: str) -> None:
        """
        Note that the results are being written, unless the batch is being cancelled.

        Raises:
            StaleLeaseError: Another process runs the batch.
        """
        async with self._leases.fenced(lease) as connection:
            await connection.execute(
                update(batches)
                .where(
                    batches.c.id == batch_id,
                    batches.c.status == BatchStatus.IN_PROGRESS.value,
                )
                .values(status=BatchStatus.FINALIZING.value, finalizing_at=self._database.now)
            )

    async def end(self, lease: Lease, batch_id: str, end: BatchEnd) -> None:
        """
        End a batch: its status and the rows of its files are one transaction, so that a batch has
        its results once.

        Raises:
            StaleLeaseError: Another process runs the batch; nothing was written.
        """
        made: Sequence[StoredFile] = [
            each for each in (end.output, end.errors_file) if each is not None
        ]
        values = msgspec.structs.asdict(end.counts) | {
            "status": end.status.value,
            "ended_at": self._database.now,
            "errors": end.errors,
            "output_file_id": None if end.output is None else end.output.id,
            "error_file_id": None if end.errors_file is None else end.errors_file.id,
        }
        async with self._leases.fenced(lease) as connection:
            for file in made:
                await connection.execute(insert(files).values(**file_values(file)))
            await connection.execute(
                update(batches).where(batches.c.id == batch_id).values(**values)
            )
            await enqueue(connection, self._database, [end.notice] if end.notice else [])

    async def remove_ended(self, lease: Lease, kept: KeptBatches, *, limit: int) -> int:
        """
        Remove at most *limit* batches whose time since their end has passed; return their number.

        Raises:
            StaleLeaseError: Another process holds the lease.
        """
        age_s = self._database.now - batches.c.ended_at
        others = batches.c.tenant.not_in(list(kept.tenants_s))
        over = [
            and_(batches.c.tenant == tenant, age_s >= kept_s)
            for tenant, kept_s in kept.tenants_s.items()
            if kept_s is not None
        ]
        if kept.default_s is not None:
            over.append(and_(others, age_s >= kept.default_s))
        expired = select(batches.c.id).where(or_(false(), *over)).limit(limit)
        async with self._leases.fenced(lease) as connection:
            ids = list((await connection.execute(expired)).scalars())
            await connection.execute(delete(batches).where(batches.c.id.in_(ids)))
        return len(ids)


def _is_open() -> Any:
    return batches.c.status.in_([each.value for each in OPEN])


def _batch(row: Row[Any]) -> StoredBatch:
    values = dict(row._mapping)  # noqa: SLF001 - a public name of SQLAlchemy
    return StoredBatch(status=BatchStatus(values.pop("status")), **values)
