"""Deletes from the store what has expired or was left behind; one gateway at a time does it."""

import structlog

from shared.contracts.base import TenantId, UnixTime
from shared.contracts.errors import StaleLeaseError
from shared.store.files import LOST, STORED
from shared.store.ids import created_at_of, folder_ends_at
from shared.store.leases import Lease
from shared.store.location import this_process
from shared.store.objects.batches import KeptBatches
from shared.store.settings import BATCH_RECORD, StoreSettings
from shared.store.store import Store
from solver.storage.retention import broken_off, sweep

log = structlog.get_logger()

JOB = "retention"
LEASE_PERIODS = 4.0
"""Periods without a round after which another gateway takes the job over."""
BATCH = 100


class Retention:
    """
    The job of one gateway; `round` is called periodically.

    Args:
        store: The store.
        settings: Periods and grace.
    """

    def __init__(self, store: Store, settings: StoreSettings) -> None:
        self._store = store
        self._settings = settings
        self._holder = this_process()
        self._lease: Lease | None = None
        self._swept_at: UnixTime | None = None

    async def round(self) -> None:
        """
        Do what is due, if this gateway has the job or can take it.

        Raises:
            StoreUnavailableError: The store cannot be used now; the next round continues.
        """
        if self._store.problem is not None:
            return
        try:
            if await self._has_job():
                await self._expire()
                await self._expire_requests()
                await self._expire_responses()
                await self._expire_batches()
                await self._sweep_if_due()
        except StaleLeaseError as error:
            log.warning("retention.lost", error=str(error))
            self._lease = None

    async def release(self) -> None:
        """Leave the job to another gateway."""
        if self._lease is not None and self._store.problem is None:
            await self._store.leases.release(self._lease)
        self._lease = None

    async def _has_job(self) -> bool:
        duration_s = self._settings.retention_period_s * LEASE_PERIODS
        if self._lease is None:
            self._lease = await self._store.leases.acquire(JOB, self._holder, duration_s=duration_s)
        else:
            self._lease = await self._store.leases.renew(self._lease, duration_s=duration_s)
        return self._lease is not None

    async def _renewed(self) -> Lease:
        """
        The lease for the next step of a long round.

        Raises:
            StaleLeaseError: Another gateway has the job.
        """
        if not await self._has_job() or self._lease is None:
            raise StaleLeaseError(f"lease {JOB}: another gateway has it")
        return self._lease

    async def _expire(self) -> None:
        """Delete expired files: rows first, so that no row is left without a body."""
        while True:
            expired = await self._store.files.remove_expired(await self._renewed(), limit=BATCH)
            for file in expired:
                await self._store.bodies.remove(file.body)
                log.info("file.expired", file_id=file.id, tenant=file.tenant)
            if len(expired) < BATCH:
                return

    async def _expire_requests(self) -> None:
        requests = self._store.requests
        while await requests.remove_expired(await self._renewed(), limit=BATCH) == BATCH:
            pass

    async def _expire_responses(self) -> None:
        responses = self._store.responses
        while await responses.remove_expired(await self._renewed(), limit=BATCH) == BATCH:
            pass

    async def _expire_batches(self) -> None:
        settings, batches = self._settings, self._store.batches
        kept = KeptBatches(
            default_s=settings.retention_s.get(BATCH_RECORD),
            tenants_s={
                TenantId(tenant): settings.retention_of(tenant, BATCH_RECORD)
                for tenant in settings.tenant_retention_s
            },
        )
        while await batches.remove_ended(await self._renewed(), kept, limit=BATCH) == BATCH:
            pass

    async def _sweep_if_due(self) -> None:
        now = await self._store.database.time()
        if self._swept_at is not None and now < self._swept_at + self._settings.sweep_period_s:
            return
        # Without the disk of bodies, all of them would seem lost.
        await self._store.require_bodies()
        bodies, grace_s = self._store.bodies, self._settings.orphan_grace_s
        uploads = {each: created_at_of(each) for each in await bodies.uploads()}
        for each in broken_off(uploads, now=now, grace_s=grace_s):
            await bodies.remove_upload(each)
            log.info("upload.removed", file_id=each)
        for folder in sorted(await bodies.folders() | await self._store.files.folders()):
            await self._sweep_folder(folder, now)
        self._swept_at = now

    async def _sweep_folder(self, folder: str, now: UnixTime) -> None:
        store, grace_s = self._store, self._settings.orphan_grace_s
        lease = await self._renewed()
        there = await store.bodies.in_folder(folder)
        rows = await store.files.in_folder(folder)
        found = sweep(
            {each: created_at_of(each) for each in there},
            {row.id: row.status == LOST for row in rows},
            now=now,
            grace_s=grace_s,
        )
        for each in found.orphans:
            await store.bodies.remove(store.bodies.body_of(each))
            log.info("body.removed", file_id=each)
        # A file that was stored after its folder was listed is not lost.
        lost = [e for e in found.lost if not await store.bodies.exists(store.bodies.body_of(e))]
        for each in lost:
            log.error("file.lost", file_id=each)
        if lost:
            await store.files.mark(lease, lost, LOST)
        if found.found:
            await store.files.mark(lease, found.found, STORED)
        if there == found.orphans and folder_ends_at(folder) < now - grace_s:
            await store.bodies.remove_folder(folder)
