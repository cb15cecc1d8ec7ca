"""Leases: one process at a time does a job, and writes of a former holder are refused."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec
from sqlalchemy import and_, delete, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from shared.contracts.base import Seconds, UnixTime
from shared.contracts.errors import StaleLeaseError
from shared.store.database import Database
from shared.store.schema import leases


class Lease(msgspec.Struct, frozen=True, kw_only=True):
    """The right to do the job *name*, until another process takes it over after its end."""

    name: str
    holder: str
    token: int
    """Fencing token: grows with every takeover."""
    until: UnixTime
    """End by the database's clock."""


class Leases:
    """
    The leases in the store. All times are the database's.

    Args:
        database: Database with the table `leases`.
    """

    def __init__(self, database: Database) -> None:
        self._database = database

    async def acquire(self, name: str, holder: str, *, duration_s: Seconds) -> Lease | None:
        """
        Take the lease *name*, if no other process holds it.

        Args:
            name: Name of the job.
            holder: Name of the process, which no other process has.
            duration_s: Time until the lease ends, unless it is renewed.

        Returns:
            The lease; None while it is held, also by the same holder.
        """
        now = self._database.now
        insert = self._database.insert(leases).values(
            name=name, holder=holder, token=1, until=now + duration_s
        )
        taken = insert.on_conflict_do_update(
            index_elements=[leases.c.name],
            set_={
                "holder": insert.excluded.holder,
                "token": leases.c.token + 1,
                "until": insert.excluded.until,
            },
            where=leases.c.until <= now,
        ).returning(leases.c.token, leases.c.until)
        async with self._database.write() as connection:
            row = (await connection.execute(taken)).first()
        if row is None:
            return None
        return Lease(name=name, holder=holder, token=row.token, until=row.until)

    async def renew(self, lease: Lease, *, duration_s: Seconds) -> Lease:
        """
        Move the end of *lease* to *duration_s* from now; also after its end, while it is not taken.

        Raises:
            StaleLeaseError: Another process has taken the lease over.
        """
        renewed = (
            update(leases)
            .where(leases.c.name == lease.name, leases.c.token == lease.token)
            .values(until=self._database.now + duration_s)
            .returning(leases.c.until)
        )
        async with self._database.write() as connection:
            until = (await connection.execute(renewed)).scalar_one_or_none()
        if until is None:
            raise _stale(lease)
        return msgspec.structs.replace(lease, until=until)

    async def release(self, lease: Lease) -> None:
        """End *lease* now; no effect if another process has taken it over."""
        ended = (
            update(leases)
            .where(leases.c.name == lease.name, leases.c.token == lease.token)
            .values(until=0.0)
        )
        async with self._database.write() as connection:
            await connection.execute(ended)

    async def forget(self, lease: Lease) -> None:
        """
        End *lease* and forget its name, after a job that is never done again; no effect if another
        process has taken it over.
        """
        mine = and_(leases.c.name == lease.name, leases.c.token == lease.token)
        async with self._database.write() as connection:
            await connection.execute(delete(leases).where(mine))

    @asynccontextmanager
    async def fenced(self, lease: Lease) -> AsyncIterator[AsyncConnection]:
        """
        Transaction that is committed only if *lease* has not been taken over.

        A takeover waits for the end of the transaction. The token decides, not the time: an ended
        lease that no process has taken is still exclusive.

        Raises:
            StaleLeaseError: Another process has taken the lease over; nothing is written.
        """
        current = select(leases.c.token).where(leases.c.name == lease.name)
        async with self._database.write() as connection:
            # SHARE, so that transactions of the same holder do not wait for each other.
            token = (await connection.execute(current.with_for_update(read=True))).scalar()
            if token != lease.token:
                raise _stale(lease)
            yield connection


def _stale(lease: Lease) -> StaleLeaseError:
    return StaleLeaseError(f"lease {lease.name}: {lease.holder} no longer holds it")
