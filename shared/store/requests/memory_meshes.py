"""
Meshes whose broker is in memory: their queues end with their process, their requests' rows do not.
"""

import contextlib
from collections.abc import Sequence

import msgspec
from sqlalchemy import ColumnElement, and_, delete, select, tuple_

from shared.contracts.base import RequestId, Seconds, TenantId
from shared.contracts.errors import StaleLeaseError, StoreFullError, StoreUnavailableError
from shared.store.database import Database
from shared.store.leases import Lease, Leases
from shared.store.requests.records import Key
from shared.store.schema import leases, requests, waiters

JOB = "memory-mesh:"
"""First part of the names of leases; the name of a mesh follows."""
HELD_S: Seconds = 10.0
"""Time after the last sign of life of a mesh after which its requests count as lost."""
HOLD_PERIOD_S: Seconds = HELD_S / 4


class LostRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A request without a final, whose mesh is gone."""

    tenant: TenantId
    id: RequestId
    is_asked: bool
    """True if its final is looked up later: the row stays."""

    @property
    def key(self) -> Key:
        return self.tenant, self.id


class MemoryMeshes:
    """
    The leases that show which meshes live, and the requests of those that are gone.

    Args:
        database: The store's database.
        leases: Its leases.
    """

    def __init__(self, database: Database, leases: Leases) -> None:
        self._database = database
        self._leases = leases

    async def hold(self, mesh: str) -> Lease | None:
        """Show for `HELD_S` that *mesh* lives; None if another process ends its requests now."""
        return await self._leases.acquire(JOB + mesh, mesh, duration_s=HELD_S)

    async def keep(self, lease: Lease) -> Lease:
        """
        Show for another `HELD_S` that the mesh of *lease* lives.

        Raises:
            StaleLeaseError: The mesh was taken for gone.
        """
        return await self._leases.renew(lease, duration_s=HELD_S)

    async def gone(self, holder: str, *, own: str | None) -> list[Lease]:
        """
        Take the leases of meshes that are gone, in order to end their requests.

        Args:
            holder: Name of this process.
            own: Mesh of this process, which lives whatever its lease says; None if its broker is
                not in memory.
        """
        ended = select(leases.c.name).where(
            leases.c.name.startswith(JOB, autoescape=True),
            leases.c.name != JOB + (own or ""),
            leases.c.until <= self._database.now,
        )
        async with self._database.read() as connection:
            names = (await connection.execute(ended)).scalars().all()
        taken = [
            await self._leases.acquire(name, holder, duration_s=HELD_S) for name in sorted(names)
        ]
        return [lease for lease in taken if lease is not None]

    async def lost(self, lease: Lease, *, limit: int) -> list[LostRequest]:
        """At most *limit* requests of the mesh of *lease* that have no final."""
        query = (
            select(requests.c.tenant, requests.c.id, requests.c.is_asked)
            .where(_is_lost(lease))
            .limit(limit)
        )
        async with self._database.read() as connection:
            rows = (await connection.execute(query)).all()
        return [LostRequest(tenant=row.tenant, id=row.id, is_asked=row.is_asked) for row in rows]

    async def free(self, lease: Lease, keys: Sequence[Key]) -> dict[Key, list[str]]:
        """
        Delete the rows of lost requests, so that their ids can be asked again.

        Returns:
            The reply queues that wait for their finals.

        Raises:
            StaleLeaseError: Another process ends these requests.
        """
        waits = tuple_(waiters.c.tenant, waiters.c.request_id).in_(sorted(keys))
        is_one = tuple_(requests.c.tenant, requests.c.id).in_(sorted(keys))
        found: dict[Key, list[str]] = {}
        async with self._leases.fenced(lease) as connection:
            for row in (await connection.execute(select(waiters).where(waits))).all():
                found.setdefault((row.tenant, row.request_id), []).append(row.reply_to)
            await connection.execute(delete(waiters).where(waits))
            await connection.execute(delete(requests).where(is_one, _is_lost(lease)))
        return found

    async def forget(self, lease: Lease) -> None:
        """Forget a mesh that has no lost requests any more."""
        await self._leases.forget(lease)

    async def release(self, lease: Lease) -> None:
        """End *lease* now: a mesh has stopped, or a part of its requests was ended."""
        await self._leases.release(lease)


class MeshHold:
    """
    Shows in the store that a mesh lives.

    Args:
        meshes: The leases of meshes.
        name: Name of the mesh, which no other has.
    """

    def __init__(self, meshes: MemoryMeshes, name: str) -> None:
        self._meshes = meshes
        self._name = name
        self._lease: Lease | None = None

    async def show(self) -> None:
        """
        Show for another `HELD_S` that the mesh lives; called each `HOLD_PERIOD_S`.

        Raises:
            StoreUnavailableError: The store cannot be used now.
            StaleLeaseError: The mesh was taken for gone, since it was stopped for a while; the next
                call shows it again.
        """
        if self._lease is None:
            self._lease = await self._meshes.hold(self._name)
            return
        try:
            self._lease = await self._meshes.keep(self._lease)
        except StaleLeaseError:
            self._lease = None
            raise

    async def end(self) -> None:
        """Show that the mesh has ended; if the store is away, its lease ends by itself."""
        if self._lease is not None:
            with contextlib.suppress(StoreUnavailableError, StoreFullError):
                await self._meshes.release(self._lease)


def _is_lost(lease: Lease) -> ColumnElement[bool]:
    mesh = lease.name.removeprefix(JOB)
    return and_(requests.c.memory_mesh == mesh, requests.c.final.is_(None))
