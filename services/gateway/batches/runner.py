"""Runs the batches of the store: each in one gateway, and in another one after a crash."""

import asyncio
import contextlib

import structlog

from services.gateway.batches.publishing import BatchPorts
from services.gateway.batches.run import BatchRun
from shared.contracts.errors import MeshError, StaleLeaseError, StoreFullError, TransientError
from shared.runtime.tasks import every
from shared.store.leases import Lease
from shared.store.location import this_process
from shared.store.objects.batches import JOB, StoredBatch

log = structlog.get_logger()

ROUND_S = 1.0
"""Period of looking for batches without a runner."""
RENEWALS = 4.0
"""Number of renewals in the time of a lease."""


class BatchRunner:
    """
    The runner of one gateway.

    Args:
        ports: What all batches use.
    """

    def __init__(self, ports: BatchPorts) -> None:
        self._ports = ports
        self._store = ports.store
        self._holder = this_process()
        self._running: dict[str, asyncio.Task[None]] = {}

    async def follow(self, stop: asyncio.Event) -> None:
        """Run batches until *stop*; then leave them to other gateways."""
        if not self._ports.settings.max_running:
            return
        try:
            await every(ROUND_S, self.round, stop=stop)
        finally:
            for task in self._running.values():
                task.cancel()
            await asyncio.gather(*self._running.values(), return_exceptions=True)

    async def round(self) -> None:
        """
        Take batches without a runner, as many as this gateway may run.

        Raises:
            StoreUnavailableError: The store cannot be used now; the next round continues.
        """
        self._running = {name: task for name, task in self._running.items() if not task.done()}
        room = self._ports.settings.max_running - len(self._running)
        if room <= 0 or self._store.problem is not None:
            return
        for batch in await self._store.batches.without_runner(limit=room):
            if batch.id in self._running:
                continue  # the lease ended while the store was away, and is renewed again
            lease = await self._store.leases.acquire(
                JOB + batch.id, self._holder, duration_s=self._ports.settings.lease_s
            )
            if lease is not None:
                self._running[batch.id] = asyncio.create_task(
                    self._run(batch, lease), name=f"run {batch.id}"
                )

    async def _run(self, found: StoredBatch, lease: Lease) -> None:
        """Run a batch while this process has its lease."""
        leave = self._store.leases.release
        try:
            async with asyncio.TaskGroup() as group:
                keeping = group.create_task(self._keep(lease), name=f"keep {lease.name}")
                await self._run_alone(found, lease)
                leave = self._store.leases.forget
                keeping.cancel()
        except* StaleLeaseError:
            log.warning("batch.lost", batch_id=found.id)
        except* TransientError as errors:
            log.warning("batch.delayed", batch_id=found.id, error=str(errors.exceptions[0]))
        except* Exception:  # a bug: the log has it, and other batches continue
            log.exception("batch.broken", batch_id=found.id)
            await asyncio.sleep(self._ports.settings.lease_s)  # not again at once
        finally:
            with contextlib.suppress(MeshError):
                await leave(lease)

    async def _run_alone(self, found: StoredBatch, lease: Lease) -> None:
        # Read under the lease, since it may have ended after it was found.
        batch = await self._store.batches.get(found.tenant, found.id)
        if batch is not None and batch.is_open:
            log.info("batch.taken", batch_id=batch.id, submitted=batch.submitted_lines)
            await BatchRun(self._ports, batch, lease).run()

    async def _keep(self, lease: Lease) -> None:
        """
        Renew a lease.

        Raises:
            StaleLeaseError: Another process has taken it.
        """
        duration_s = self._ports.settings.lease_s
        while True:
            await asyncio.sleep(duration_s / RENEWALS)
            try:
                await self._store.leases.renew(lease, duration_s=duration_s)
            except (TransientError, StoreFullError) as error:
                log.warning("lease.not_renewed", name=lease.name, error=str(error))
