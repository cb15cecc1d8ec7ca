"""Ends the requests of meshes in memory that are gone."""

from dataclasses import dataclass

import structlog

from shared.broker.finals import publish_final
from shared.broker.protocol import Broker
from shared.contracts.errors import StaleLeaseError
from shared.contracts.requests import ErrorInfo, RequestFailed
from shared.runtime.clock import Clock
from shared.store.leases import Lease
from shared.store.requests.memory_meshes import LostRequest
from shared.store.store import Store

log = structlog.get_logger()
AT_ONCE = 500
MESH_STOPPED = ErrorInfo(
    message="the mesh stopped before the request ended, and its queues were in memory: send the "
    "request again, under another Idempotency-Key if it has one",
    type="server_error",
    code="mesh_stopped",
    status=503,
    retry_after_s=1.0,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class LostRequests:
    """
    What is left of meshes whose broker was in memory. All groupers with the store look for it,
    whatever their broker.

    A request whose answer is looked up later fails as `mesh_stopped`; its batch publishes it again.
    The id of another one is free again, and a repeat that waits for it fails.

    Args:
        broker: The broker.
        store: The store.
        holder: Name of this grouper.
        own: Mesh in memory of this process, if it is in one.
        clock: Time of the failures.
    """

    broker: Broker
    store: Store
    holder: str
    own: str | None
    clock: Clock

    async def end_some(self) -> None:
        """
        End some requests of each mesh that is gone; called periodically.

        Raises:
            StoreUnavailableError: The store cannot be used now.
            BrokerUnavailableError: The broker cannot be used now.
        """
        if self.store.problem is not None:
            return
        for lease in await self.store.memory_meshes.gone(self.holder, own=self.own):
            try:
                await self._end_of(lease)
            except StaleLeaseError:
                log.info("lost_requests.left", mesh=lease.name)

    async def _end_of(self, lease: Lease) -> None:
        meshes = self.store.memory_meshes
        lost = await meshes.lost(lease, limit=AT_ONCE)
        if not lost:
            await meshes.forget(lease)
            return
        log.warning("lost_requests.ended", mesh=lease.name, requests=len(lost))
        repeats = await meshes.free(lease, [each.key for each in lost if not each.is_asked])
        for each in lost:
            failed = self._failed(each)
            if each.is_asked:
                await publish_final(self.broker, failed, reply_to=None, stored_for=each.tenant)
            for reply_to in repeats.get(each.key, ()):
                await publish_final(self.broker, failed, reply_to=reply_to)
        # The finals are stored meanwhile; the next look finds what is left.
        await meshes.release(lease)

    def _failed(self, request: LostRequest) -> RequestFailed:
        return RequestFailed(request_id=request.id, error=MESH_STOPPED, at=self.clock.now())
