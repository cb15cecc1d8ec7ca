"""Rows of webhook deliveries: what is sent to which URL, and how it went."""

from collections.abc import Sequence
from typing import Any

import msgspec
from sqlalchemy import Row, delete, func, insert, select, tuple_, update
from sqlalchemy.ext.asyncio import AsyncConnection

from shared.contracts.base import Seconds, TenantId, UnixTime
from shared.store.database import Database
from shared.store.ids import new_webhook_event_id
from shared.store.leases import Lease, Leases
from shared.store.schema import webhook_deliveries

DELIVERED = "delivered"


class Notice(msgspec.Struct, frozen=True, kw_only=True):
    """An event about a stored object, and the URLs that get it."""

    tenant: TenantId
    type: str
    """E.g. `response.completed`."""
    object_id: str
    urls: tuple[str, ...]


class Delivery(msgspec.Struct, frozen=True, kw_only=True):
    """One event for one URL."""

    event_id: str
    url: str
    tenant: TenantId
    type: str
    payload: bytes
    created_at: UnixTime
    attempts: int
    """Number of attempts that were made."""
    age_s: Seconds
    """Time since the event."""


class Attempted(msgspec.Struct, frozen=True, kw_only=True):
    """The result of an attempt."""

    event_id: str
    url: str
    outcome: str
    """`delivered`, or what failed."""
    retry_in_s: Seconds | None
    """Time until the next attempt; None if the delivery has ended."""


async def enqueue(connection: AsyncConnection, database: Database, notices: list[Notice]) -> None:
    """
    Add deliveries in the transaction that ends the objects, so that none is lost or sent in vain.

    Args:
        connection: The transaction.
        database: Its database.
        notices: The events; those without URLs have no effect.
    """
    sent = [notice for notice in notices if notice.urls]
    if not sent:
        return
    now = float((await connection.execute(select(database.now))).scalar_one())
    rows = []
    for notice in sent:
        event_id = new_webhook_event_id()
        payload = {
            "id": event_id,
            "object": "event",
            "created_at": int(now),
            "type": notice.type,
            "data": {"id": notice.object_id},
        }
        rows += [
            {
                "event_id": event_id,
                "url": url,
                "tenant": notice.tenant,
                "type": notice.type,
                "payload": msgspec.json.encode(payload),
                "created_at": now,
                "attempts": 0,
                "next_at": now,
            }
            for url in dict.fromkeys(notice.urls)
        ]
    await connection.execute(insert(webhook_deliveries), rows)


class DeliveryRows:
    """
    The table `webhook_deliveries`.

    Args:
        database: The store's database.
        leases: Its leases.
    """

    def __init__(self, database: Database, leases: Leases) -> None:
        self._database = database
        self._leases = leases

    async def due(self, *, limit: int, limit_per_url: int) -> list[Delivery]:
        """
        Deliveries whose next attempt is due, those that wait longest first.

        Args:
            limit: Maximum number.
            limit_per_url: Maximum number for one URL, so that a receiver that does not answer does
                not hold up the others.
        """
        rows = webhook_deliveries
        place = func.row_number().over(partition_by=rows.c.url, order_by=rows.c.next_at)
        due = (
            select(
                rows,
                (self._database.now - rows.c.created_at).label("age_s"),
                place.label("place"),
            )
            .where(rows.c.next_at <= self._database.now)
            .subquery()
        )
        query = (
            select(due)
            .where(due.c.place <= limit_per_url)
            .order_by(due.c.next_at, due.c.event_id)
            .limit(limit)
        )
        async with self._database.read() as connection:
            found = (await connection.execute(query)).all()
        return [_delivery(row) for row in found]

    async def settle(self, lease: Lease, attempted: Sequence[Attempted]) -> None:
        """
        Note the results of attempts.

        Raises:
            StaleLeaseError: Another process holds the lease.
        """
        rows, now = webhook_deliveries, self._database.now
        async with self._leases.fenced(lease) as connection:
            for each in attempted:
                has_ended = each.retry_in_s is None
                await connection.execute(
                    update(rows)
                    .where(rows.c.event_id == each.event_id, rows.c.url == each.url)
                    .values(
                        attempts=rows.c.attempts + 1,
                        outcome=each.outcome,
                        next_at=None if has_ended else now + each.retry_in_s,
                        ended_at=now if has_ended else None,
                    )
                )

    async def remove_ended(self, lease: Lease, *, older_than_s: Seconds, limit: int) -> int:
        """
        Remove at most *limit* deliveries that ended more than *older_than_s* ago.

        Raises:
            StaleLeaseError: Another process holds the lease.
        """
        rows = webhook_deliveries
        old = (
            select(rows.c.event_id, rows.c.url)
            .where(rows.c.ended_at <= self._database.now - older_than_s)
            .limit(limit)
        )
        async with self._leases.fenced(lease) as connection:
            removed = await connection.execute(
                delete(rows).where(tuple_(rows.c.event_id, rows.c.url).in_(old))
            )
        return removed.rowcount


def _delivery(row: Row[Any]) -> Delivery:
    return Delivery(
        event_id=row.event_id,
        url=row.url,
        tenant=row.tenant,
        type=row.type,
        payload=bytes(row.payload),
        created_at=row.created_at,
        attempts=row.attempts,
        age_s=float(row.age_s),
    )
