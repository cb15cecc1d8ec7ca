"""
Rows of stored responses and their events.

A running response is held by one gateway, which says so again and again; when it stops, another one
takes the response over with a higher `epoch`, and writes of the former holder are refused.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import msgspec
from sqlalchemy import Row, and_, bindparam, delete, insert, or_, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from shared.contracts.base import Seconds, TenantId, UnixTime
from shared.store.database import Database
from shared.store.leases import Lease, Leases
from shared.store.objects.webhooks import Notice, enqueue
from shared.store.schema import response_events, responses

NEWS_OF = 32
"""Number of responses that one query for news has."""
RUNNING = ("queued", "in_progress")
"""Statuses of a response that has not ended."""


class StoredEvent(msgspec.Struct, frozen=True, kw_only=True):
    """An event of a response."""

    number: int
    """Its sequence number, from 0."""
    type: str
    data: bytes
    """The JSON object that is sent."""


class StoredResponse(msgspec.Struct, frozen=True, kw_only=True):
    """A row of the table `responses`; its columns have comments in `shared.store.schema`."""

    id: str
    tenant: TenantId
    model: str
    status: str
    is_background: bool
    asked: bytes
    headers: bytes
    previous_response_id: str | None = None
    created_at: UnixTime
    ended_at: UnixTime | None = None
    expires_at: UnixTime | None = None
    object: bytes
    num_events: int = 0
    runner: str | None = None
    held_until: UnixTime | None = None
    epoch: int = 1

    @property
    def is_running(self) -> bool:
        """True until the response has ended."""
        return self.status in RUNNING


class Appended(msgspec.Struct, frozen=True, kw_only=True):
    """Events that the runner of a response adds."""

    response_id: str
    epoch: int
    events: tuple[StoredEvent, ...]
    """At least one; their numbers follow those of the stored events."""
    status: str
    object: bytes | None = None
    """The response object, if it has changed."""
    notice: Notice | None = None
    """What is delivered about the end."""


class Ending(msgspec.Struct, frozen=True, kw_only=True):
    """How a response ends that is not ended by its own last event."""

    status: str
    object: bytes
    event: StoredEvent
    notice: Notice | None = None


class Progress(msgspec.Struct, frozen=True, kw_only=True):
    """How far a response is."""

    num_events: int
    is_running: bool


class ResponseRows:
    """
    The tables `responses` and `response_events`. Expired responses are invisible, also before they
    are deleted. Methods that write several responses lock them in the order of their ids.

    Args:
        database: The store's database.
        leases: Its leases.
    """

    def __init__(self, database: Database, leases: Leases) -> None:
        self._database = database
        self._leases = leases

    async def add(
        self, response: StoredResponse, events: Sequence[StoredEvent], *, held_s: Seconds
    ) -> tuple[StoredResponse, bool]:
        """
        Add a response that `response.runner` runs, with its first events.

        Args:
            response: The response; `num_events` and `held_until` are set here.
            events: Its first events.
            held_s: Time for which the runner holds it.

        Returns:
            The response under this id, and True if it is new: else the id was used before.
        """
        values = msgspec.structs.asdict(response)
        values |= {"num_events": len(events), "held_until": self._database.now + held_s}
        added = (
            self._database.insert(responses)
            .values(**values)
            .on_conflict_do_nothing()
            .returning(responses)
        )
        async with self._database.write() as connection:
            row = (await connection.execute(added)).first()
            if row is None:
                same = select(responses).where(responses.c.id == response.id)
                return _response((await connection.execute(same)).one()), False
            await _insert_events(connection, [(response.id, event) for event in events])
        return _response(row), True

    async def get(self, tenant: TenantId, response_id: str) -> StoredResponse | None:
        """The tenant's response; None also for another tenant's."""
        async with self._database.read() as connection:
            return await self._get(connection, tenant, response_id)

    async def chain(self, tenant: TenantId, response_id: str) -> list[StoredResponse]:
        """
        The response and those that it continues, the oldest first.

        The list begins with a response that names a previous one if that one was deleted.
        """
        found: list[StoredResponse] = []
        wanted: str | None = response_id
        async with self._database.read() as connection:
            while wanted is not None:
                response = await self._get(connection, tenant, wanted)
                if response is None:
                    break
                found.append(response)
                wanted = response.previous_response_id
        return found[::-1]

    async def events(
        self, response_id: str, *, after: int = -1, limit: int | None = None
    ) -> list[StoredEvent]:
        """Events of a response with numbers above *after*, in order."""
        async with self._database.read() as connection:
            return await _events(connection, response_id, after=after, limit=limit)

    async def news(self, positions: Mapping[str, int]) -> dict[str, list[StoredEvent]]:
        """
        Events of several responses, each with numbers above its own position.

        Args:
            positions: Response -> number of the last event that is known.
        """
        found: dict[str, list[StoredEvent]] = {}
        pairs = list(positions.items())
        async with self._database.read() as connection:
            for begin in range(0, len(pairs), NEWS_OF):
                some = pairs[begin : begin + NEWS_OF]
                # Always the same number of parameters, so that the statement is compiled once.
                padded = some + [("", 0)] * (NEWS_OF - len(some))
                values: dict[str, str | int] = {}
                for place, (response_id, position) in enumerate(padded):
                    values |= {f"id{place}": response_id, f"number{place}": position}
                for row in (await connection.execute(_NEWS, values)).all():
                    found.setdefault(row.response_id, []).append(_event(row))
        return found

    async def progress(self, response_ids: Iterable[str]) -> dict[str, Progress]:
        """How far responses are; those that do not exist are left out."""
        query = select(responses.c.id, responses.c.num_events, responses.c.status).where(
            responses.c.id.in_(list(response_ids))
        )
        async with self._database.read() as connection:
            rows = (await connection.execute(query)).all()
        return {
            row.id: Progress(num_events=row.num_events, is_running=row.status in RUNNING)
            for row in rows
        }

    async def append(self, batches: Sequence[Appended]) -> list[bool]:
        """
        Add events of different responses in one transaction.

        Returns:
            For each batch, True if its events are stored, also by an earlier call; False if the
            response has ended or is gone, or if another gateway runs it.
        """
        ids = sorted(each.response_id for each in batches)
        query = (
            select(responses.c.id, responses.c.epoch, responses.c.num_events, responses.c.status)
            .where(responses.c.id.in_(ids))
            .order_by(responses.c.id)
            .with_for_update()
        )
        async with self._database.write() as connection:
            rows = {row.id: row for row in (await connection.execute(query)).all()}
            fresh, results = [], []
            for each in batches:
                row = rows.get(each.response_id)
                if row is None or row.epoch != each.epoch:
                    results.append(False)
                elif row.status in RUNNING and row.num_events == each.events[0].number:
                    fresh.append(each)
                    results.append(True)
                else:
                    # An earlier call may have committed although its answer was lost.
                    results.append(row.num_events == each.events[-1].number + 1)
            await self._append(connection, fresh)
        return results

    async def end(
        self,
        response_id: str,
        ending: Callable[[StoredResponse, list[StoredEvent]], Ending],
        *,
        epoch: int | None = None,
    ) -> StoredResponse | None:
        """
        End a running response; its runner learns it at its next write.

        Args:
            response_id: The response.
            ending: Makes the end from the response and its events.
            epoch: Only in this epoch; None: in any.

        Returns:
            The response as it is then, also if it had ended before; None if there is none.
        """
        query = select(responses).where(responses.c.id == response_id).with_for_update()
        async with self._database.write() as connection:
            row = (await connection.execute(query)).first()
            if row is None:
                return None
            response = _response(row)
            if not response.is_running or epoch not in (None, response.epoch):
                return response
            end = ending(response, await _events(connection, response_id))
            await _insert_events(connection, [(response_id, end.event)])
            ended = (
                update(responses)
                .where(responses.c.id == response_id)
                .values(
                    status=end.status,
                    object=end.object,
                    num_events=end.event.number + 1,
                    epoch=responses.c.epoch + 1,
                    ended_at=self._database.now,
                    held_until=None,
                )
                .returning(responses)
            )
            response = _response((await connection.execute(ended)).one())
            await enqueue(connection, self._database, [end.notice] if end.notice else [])
        return response

    async def hold(self, runner: str, response_ids: Iterable[str], *, held_s: Seconds) -> set[str]:
        """
        Hold running responses of *runner* for *held_s* from now.

        Returns:
            Those that are still its own; the others have ended, are gone, or run elsewhere.
        """
        held = and_(
            responses.c.id.in_(list(response_ids)),
            responses.c.runner == runner,
            responses.c.held_until.is_not(None),
        )
        query = select(responses.c.id).where(held).order_by(responses.c.id).with_for_update()
        async with self._database.write() as connection:
            ids = list((await connection.execute(query)).scalars())
            if ids:
                await connection.execute(
                    update(responses).where(held).values(held_until=self._database.now + held_s)
                )
        return set(ids)

    async def take_over(self, runner: str, *, held_s: Seconds, limit: int) -> list[StoredResponse]:
        """Take at most *limit* running responses over that no gateway holds any more."""
        is_left = responses.c.held_until <= self._database.now
        left = select(responses.c.id).where(is_left).order_by(responses.c.held_until).limit(limit)
        taken = (
            update(responses)
            # The condition again: another gateway may have taken them meanwhile.
            .where(responses.c.id.in_(left), is_left)
            .values(
                runner=runner,
                epoch=responses.c.epoch + 1,
                held_until=self._database.now + held_s,
            )
            .returning(responses)
        )
        async with self._database.write() as connection:
            rows = (await connection.execute(taken)).all()
        return [_response(row) for row in rows]

    async def let_go(self, runner: str) -> None:
        """Leave the responses of *runner* to other gateways now."""
        held = and_(responses.c.runner == runner, responses.c.held_until.is_not(None))
        async with self._database.write() as connection:
            await connection.execute(update(responses).where(held).values(held_until=0.0))

    async def remove(self, tenant: TenantId, response_id: str) -> StoredResponse | None:
        """Remove the tenant's response with its events, and return it; None if there is none."""
        removed = (
            delete(responses)
            .where(self._visible(tenant), responses.c.id == response_id)
            .returning(responses)
        )
        async with self._database.write() as connection:
            row = (await connection.execute(removed)).first()
            if row is None:
                return None
            await connection.execute(
                delete(response_events).where(response_events.c.response_id == response_id)
            )
        return _response(row)

    async def remove_expired(self, lease: Lease, *, limit: int) -> int:
        """
        Remove at most *limit* responses that have expired, with their events; return their number.

        Raises:
            StaleLeaseError: Another process holds the lease.
        """
        expired = (
            select(responses.c.id).where(responses.c.expires_at <= self._database.now).limit(limit)
        )
        async with self._leases.fenced(lease) as connection:
            ids = list((await connection.execute(expired)).scalars())
            await connection.execute(delete(responses).where(responses.c.id.in_(ids)))
            await connection.execute(
                delete(response_events).where(response_events.c.response_id.in_(ids))
            )
        return len(ids)

    async def _append(self, connection: AsyncConnection, batches: Sequence[Appended]) -> None:
        """Write batches whose responses are locked."""
        if not batches:
            return
        await _insert_events(
            connection, [(each.response_id, event) for each in batches for event in each.events]
        )
        changed = update(responses).where(responses.c.id == bindparam("response"))
        counted: dict[str, Any] = {
            "num_events": bindparam("count"),
            "status": bindparam("now_status"),
        }
        shown: dict[str, Any] = {"object": bindparam("now_object")}
        ended = {"ended_at": self._database.now, "held_until": None}
        plain, with_object, at_end = [], [], []
        for each in batches:
            values = {
                "response": each.response_id,
                "count": each.events[-1].number + 1,
                "now_status": each.status,
            }
            if each.status not in RUNNING:
                at_end.append(values | {"now_object": each.object})
            elif each.object is not None:
                with_object.append(values | {"now_object": each.object})
            else:
                plain.append(values)
        for statement, rows in (
            (changed.values(**counted), plain),
            (changed.values(**counted, **shown), with_object),
            (changed.values(**counted, **shown, **ended), at_end),
        ):
            if rows:
                await connection.execute(statement, rows)
        notices = [each.notice for each in batches if each.notice is not None]
        await enqueue(connection, self._database, notices)

    async def _get(
        self, connection: AsyncConnection, tenant: TenantId, response_id: str
    ) -> StoredResponse | None:
        query = select(responses).where(self._visible(tenant), responses.c.id == response_id)
        row = (await connection.execute(query)).first()
        return None if row is None else _response(row)

    def _visible(self, tenant: TenantId) -> Any:
        lives = or_(responses.c.expires_at.is_(None), responses.c.expires_at > self._database.now)
        return and_(responses.c.tenant == tenant, lives)


_NEWS = (
    select(response_events)
    .where(
        or_(
            *(
                and_(
                    response_events.c.response_id == bindparam(f"id{place}"),
                    response_events.c.number > bindparam(f"number{place}"),
                )
                for place in range(NEWS_OF)
            )
        )
    )
    .order_by(response_events.c.response_id, response_events.c.number)
)


async def _events(
    connection: AsyncConnection, response_id: str, *, after: int = -1, limit: int | None = None
) -> list[StoredEvent]:
    table = response_events
    query = (
        select(table.c.number, table.c.type, table.c.data)
        .where(table.c.response_id == response_id, table.c.number > after)
        .order_by(table.c.number)
        .limit(limit)
    )
    rows = (await connection.execute(query)).all()
    return [_event(row) for row in rows]


def _event(row: Any) -> StoredEvent:
    return StoredEvent(number=row.number, type=row.type, data=bytes(row.data))


async def _insert_events(
    connection: AsyncConnection, events: Sequence[tuple[str, StoredEvent]]
) -> None:
    if events:
        await connection.execute(
            insert(response_events),
            [{"response_id": name} | msgspec.structs.asdict(event) for name, event in events],
        )


def _response(row: Row[Any]) -> StoredResponse:
    values = dict(row._mapping)  # noqa: SLF001 - a public name of SQLAlchemy
    for name in ("asked", "headers", "object"):
        values[name] = bytes(values[name])
    return StoredResponse(**values)
