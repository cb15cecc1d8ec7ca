"""
The tables of requests whose ids mean something.

The queue knows what runs; a row has only what a repeat of the id, or a question about it, needs.
"""

from collections.abc import Iterable, Sequence
from typing import Any
from uuid import uuid4

from sqlalchemy import (
    Double,
    Row,
    Text,
    Update,
    and_,
    bindparam,
    case,
    delete,
    func,
    insert,
    select,
    tuple_,
    update,
)
from sqlalchemy.ext.asyncio import AsyncConnection

from shared.contracts.base import RequestId, Seconds, TenantId
from shared.store.database import Database
from shared.store.leases import Lease, Leases
from shared.store.requests.records import (
    Asked,
    Claim,
    ClaimAsked,
    ClaimOutcome,
    Ended,
    Grouped,
    Kept,
    Key,
    RequestState,
    Started,
    StoredRequest,
    Waiter,
)
from shared.store.schema import requests, waiters

CLAIM_S: Seconds = 30.0
"""Time for which a grouper may put a request into its queue; then another grouper may."""
UNENDED_S: Seconds = 7 * 24 * 3600.0
"""Time after which a row without a final is deleted: its request was lost or never published."""


class RequestRows:
    """
    The tables `requests` and `waiters`. Every method with several items is one transaction, and
    locks rows in the order of their keys.

    Args:
        database: The store's database.
        leases: Its leases.
        memory_mesh: Mesh of this process; None if its broker is not in memory.
    """

    def __init__(
        self, database: Database, leases: Leases, *, memory_mesh: str | None = None
    ) -> None:
        self._database = database
        self._leases = leases
        self._memory_mesh = memory_mesh

    async def ask(self, asked: Sequence[Asked]) -> list[bool]:
        """
        Make the rows of requests that are published afterwards.

        Returns:
            For each request, True if the row is new; False if the id was used before.
        """
        now = self._database.now
        rows = [_values(each) | {"is_asked": True} for each in asked]
        keys = sorted(each.key for each in asked)
        expired = and_(
            tuple_(requests.c.tenant, requests.c.id).in_(keys), requests.c.expires_at <= now
        )
        async with self._database.write() as connection:
            await connection.execute(delete(requests).where(expired))
            made = await self._inserted(connection, rows)
        return [each.key in made for each in asked]

    async def withdraw(self, key: Key) -> None:
        """Remove the row of a request that was not published, unless a message has claimed it."""
        unclaimed = and_(
            _is(key),
            requests.c.claimed_by.is_(None),
            requests.c.grouped_at.is_(None),
            requests.c.final.is_(None),
        )
        async with self._database.write() as connection:
            await connection.execute(delete(requests).where(unclaimed))

    async def claim(self, asked: Sequence[ClaimAsked], holder: str) -> list[Claim]:
        """
        Decide about messages under ids, whose keys must differ.

        Args:
            asked: The messages.
            holder: Name of this grouper.
        """
        rows = [_values(each) | {"is_asked": False, "claimed_by": holder} for each in asked]
        async with self._database.write() as connection:
            made = await self._inserted(
                connection, rows, claimed_until=self._database.now + CLAIM_S
            )
            others = sorted(each.key for each in asked if each.key not in made)
            known = await self._locked(connection, others)
            claims = {key: Claim(outcome=ClaimOutcome.CLAIMED) for key in made}
            joined, taken = [], []
            for each in asked:
                if each.key in made:
                    continue
                claim = _claim(each, known.get(each.key), holder)
                claims[each.key] = claim
                if claim.outcome is ClaimOutcome.CLAIMED:
                    taken.append(each)
                elif claim.outcome is ClaimOutcome.JOINED and each.reply_to is not None:
                    joined.append(_waiter(each, each.reply_to))
            if taken:
                keys_taken = [_given(each.key) | {"to_digest": each.digest} for each in taken]
                await connection.execute(self._take(holder), keys_taken)
            if joined:
                await connection.execute(insert(waiters), joined)
        return [claims[each.key] for each in asked]

    def _take(self, holder: str) -> Update:
        """The statement by which *holder* takes rows, as they were when they were made."""
        return (
            update(requests)
            .where(_is_given())
            .values(
                claimed_by=holder,
                claimed_until=self._database.now + CLAIM_S,
                digest=bindparam("to_digest"),
                final=None,
                outcome=None,
                ended_at=None,
                grouped_at=None,
                expires_at=self._database.now + UNENDED_S,
                memory_mesh=self._memory_mesh,
            )
        )

    async def mark_grouped(self, grouped: Sequence[Grouped]) -> list[None]:
        """Note that queues have these requests: repeats of their ids wait for their finals."""
        mark = (
            update(requests)
            .where(_is_given())
            .values(
                grouped_at=func.coalesce(requests.c.grouped_at, bindparam("to_grouped_at")),
                lane=bindparam("to_lane"),
                expected_at=bindparam("to_expected_at"),
            )
        )
        marks = [
            _given(each.key)
            | {
                "to_grouped_at": each.at,
                "to_lane": each.lane,
                "to_expected_at": each.expected_at,
            }
            for each in sorted(grouped, key=lambda one: one.key)
        ]
        if marks:
            async with self._database.write() as connection:
                await connection.execute(mark, marks)
        return [None] * len(grouped)

    async def release(self, key: Key, holder: str) -> None:
        """
        Forget the claim of *holder* on a request that was refused; a row that was asked stays. No
        effect if another grouper has taken the request over.
        """
        mine = and_(
            _is(key),
            requests.c.claimed_by == holder,
            requests.c.grouped_at.is_(None),
            requests.c.final.is_(None),
        )
        async with self._database.write() as connection:
            await connection.execute(delete(requests).where(mine, requests.c.is_asked.is_(False)))
            await connection.execute(
                update(requests).where(mine).values(claimed_by=None, claimed_until=None)
            )

    async def mark_started(self, started: Sequence[Started]) -> list[None]:
        """Note that runs of these requests began."""
        mark = (
            update(requests)
            .where(_is_given(), requests.c.final.is_(None))
            .values(
                instance_id=bindparam("to_instance_id"),
                started_at=bindparam("to_started_at"),
                runs=requests.c.runs + 1,
            )
        )
        marks = [
            _given(each.key) | {"to_instance_id": each.instance_id, "to_started_at": each.at}
            for each in sorted(started, key=lambda one: one.key)
        ]
        if marks:
            async with self._database.write() as connection:
                await connection.execute(mark, marks)
        return [None] * len(started)

    async def end(self, ended: Sequence[Ended]) -> list[Kept]:
        """
        Keep finals; the first one of a request counts.

        Returns:
            For each request, the final that counts, and the reply queues that wait for it.
        """
        keys = sorted({each.key for each in ended})
        answered = and_(requests.c.runs == 0, bindparam("to_instance_id", type_=Text).is_not(None))
        keep = (
            update(requests)
            .where(_is_given())
            .values(
                final=bindparam("to_final"),
                outcome=bindparam("to_outcome"),
                ended_at=bindparam("to_ended_at"),
                expires_at=self._database.now + requests.c.kept_s,
                instance_id=func.coalesce(
                    bindparam("to_instance_id", type_=Text), requests.c.instance_id
                ),
                started_at=func.coalesce(
                    bindparam("to_started_at", type_=Double), requests.c.started_at
                ),
                runs=case((answered, 1), else_=requests.c.runs),
            )
        )
        kept: list[dict[str, Any]] = []
        async with self._database.write() as connection:
            rows = await self._locked(connection, keys)
            finals = {key: row.final for key, row in rows.items()}
            for each in ended:
                row = rows.get(each.key)
                if row is None or finals[each.key] is not None:
                    continue
                if each.is_refusal and (row.grouped_at is not None or not row.is_asked):
                    continue  # a repeat was refused, or the same id may be asked again
                finals[each.key] = each.final
                kept.append(_given(each.key) | _values_of_end(each))
            if kept:
                await connection.execute(keep, kept)
            waiting = await self._waiting(connection, keys)
        return [
            Kept(final=finals.get(each.key), waiters=tuple(waiting.get(each.key, ())))
            for each in ended
        ]

    async def forget_waiters(self, ids: Sequence[str]) -> None:
        """Remove reply queues that have got their finals."""
        async with self._database.write() as connection:
            await connection.execute(delete(waiters).where(waiters.c.id.in_(ids)))

    async def get(self, tenant: TenantId, request_id: RequestId) -> StoredRequest | None:
        """The tenant's request; None also for another tenant's."""
        query = select(requests).where(_is((tenant, request_id)), self._lives())
        async with self._database.read() as connection:
            row = (await connection.execute(query)).first()
        return None if row is None else _request(row)

    async def ended(
        self, tenant: TenantId, request_ids: Iterable[RequestId]
    ) -> dict[RequestId, bytes]:
        """The finals of those requests that have ended."""
        query = select(requests.c.id, requests.c.final).where(
            requests.c.tenant == tenant,
            requests.c.id.in_(list(request_ids)),
            requests.c.final.is_not(None),
        )
        async with self._database.read() as connection:
            rows = (await connection.execute(query)).all()
        return {row.id: bytes(row.final) for row in rows}

    async def states(
        self, tenant: TenantId, request_ids: Iterable[RequestId]
    ) -> dict[RequestId, RequestState]:
        """How far requests are; those without a row are left out."""
        columns = (requests.c.id, requests.c.started_at, requests.c.outcome)
        query = select(*columns).where(
            requests.c.tenant == tenant, requests.c.id.in_(list(request_ids))
        )
        async with self._database.read() as connection:
            rows = (await connection.execute(query)).all()
        return {
            row.id: RequestState(has_started=row.started_at is not None, outcome=row.outcome)
            for row in rows
        }

    async def remove(self, tenant: TenantId, request_ids: Iterable[RequestId]) -> None:
        """Remove rows; a request that still runs continues, and its final is not kept."""
        ids = list(request_ids)
        async with self._database.write() as connection:
            await connection.execute(
                delete(waiters).where(waiters.c.tenant == tenant, waiters.c.request_id.in_(ids))
            )
            await connection.execute(
                delete(requests).where(requests.c.tenant == tenant, requests.c.id.in_(ids))
            )

    async def remove_expired(self, lease: Lease, *, limit: int) -> int:
        """
        Remove at most *limit* rows that have expired; return their number.

        Raises:
            StaleLeaseError: Another process holds the lease.
        """
        key = tuple_(requests.c.tenant, requests.c.id)
        expired = (
            select(requests.c.tenant, requests.c.id)
            .where(requests.c.expires_at <= self._database.now)
            .limit(limit)
        )
        async with self._leases.fenced(lease) as connection:
            removed = await connection.execute(delete(requests).where(key.in_(expired)))
        return removed.rowcount

    async def _inserted(
        self,
        connection: AsyncConnection,
        rows: list[dict[str, Any]],
        **expressions: Any,
    ) -> set[Key]:
        """Insert the rows whose keys are new, which have the same columns; return these keys."""
        if not rows:
            return set()
        database = self._database
        # One expression for each column: SQLAlchemy would miscount the parameters of a shared one.
        inserted = (
            database.insert(requests)
            .values(
                created_at=database.now,
                expires_at=database.now + UNENDED_S,
                runs=0,
                memory_mesh=self._memory_mesh,
                **expressions,
            )
            .on_conflict_do_nothing()
            .returning(requests.c.tenant, requests.c.id)
        )
        ordered = sorted(rows, key=lambda each: (each["tenant"], each["id"]))
        made = (await connection.execute(inserted, ordered)).all()
        return {(row.tenant, row.id) for row in made}

    async def _locked(
        self, connection: AsyncConnection, keys: Sequence[Key]
    ) -> dict[Key, Row[Any]]:
        """
        The rows of *keys* with the time as `read_at`; no other transaction changes them until the
        end of this one.
        """
        if not keys:
            return {}
        query = (
            select(requests, self._database.now.label("read_at"))
            .where(tuple_(requests.c.tenant, requests.c.id).in_(keys))
            .order_by(requests.c.tenant, requests.c.id)
            .with_for_update()
        )
        rows = (await connection.execute(query)).all()
        return {(row.tenant, row.id): row for row in rows}

    async def _waiting(
        self, connection: AsyncConnection, keys: Sequence[Key]
    ) -> dict[Key, list[Waiter]]:
        query = select(waiters).where(tuple_(waiters.c.tenant, waiters.c.request_id).in_(keys))
        found: dict[Key, list[Waiter]] = {}
        for row in (await connection.execute(query)).all():
            waiter = Waiter(id=row.id, reply_to=row.reply_to)
            found.setdefault((row.tenant, row.request_id), []).append(waiter)
        return found

    def _lives(self) -> Any:
        return requests.c.expires_at > self._database.now


def _claim(asked: ClaimAsked, row: Row[Any] | None, holder: str) -> Claim:
    """Decide about a message whose id had a row already; None if it was deleted since."""
    if row is None:
        return Claim(outcome=ClaimOutcome.BUSY)
    if row.expires_at <= row.read_at:
        return Claim(outcome=ClaimOutcome.CLAIMED)
    if row.digest != asked.digest:
        return Claim(outcome=ClaimOutcome.CONFLICT)
    if row.final is not None:
        return Claim(outcome=ClaimOutcome.ENDED, final=bytes(row.final))
    if row.grouped_at is not None:
        return Claim(outcome=ClaimOutcome.JOINED)
    is_free = row.claimed_by in {None, holder} or row.claimed_until <= row.read_at
    return Claim(outcome=ClaimOutcome.CLAIMED if is_free else ClaimOutcome.BUSY)


def _values(asked: Asked | ClaimAsked) -> dict[str, Any]:
    return {
        "tenant": asked.tenant,
        "id": asked.request_id,
        "digest": asked.digest,
        "model": asked.model,
        "endpoint": asked.endpoint,
        "kept_s": asked.kept_s,
    }


def _values_of_end(ended: Ended) -> dict[str, Any]:
    run = ended.answered_by
    return {
        "to_final": ended.final,
        "to_outcome": ended.outcome,
        "to_ended_at": ended.at,
        "to_instance_id": None if run is None else run.instance_id,
        "to_started_at": None if run is None else run.at,
    }


def _waiter(asked: ClaimAsked, reply_to: str) -> dict[str, Any]:
    return {
        "id": uuid4().hex,
        "tenant": asked.tenant,
        "request_id": asked.request_id,
        "reply_to": reply_to,
    }


def _is_given() -> Any:
    """The row of the key in the parameters of `_given`, for statements about several rows."""
    return and_(requests.c.tenant == bindparam("of_tenant"), requests.c.id == bindparam("of_id"))


def _given(key: Key) -> dict[str, Any]:
    return {"of_tenant": key[0], "of_id": key[1]}


def _is(key: Key) -> Any:
    return and_(requests.c.tenant == key[0], requests.c.id == key[1])


def _request(row: Row[Any]) -> StoredRequest:
    return StoredRequest(**dict(row._mapping))  # noqa: SLF001 - a public name of SQLAlchemy
