"""Events of stored responses, from any number on, and as they are stored by any gateway."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field

from shared.store.objects.responses import ResponseRows, StoredEvent
from solver.storage.response_events import ENDS

PAGE = 256
"""Number of events that are read at once."""
MAX_PENDING = 2048
"""Number of events that wait for a slow reader; then it reads from the store again."""


@dataclass(eq=False)
class _Reader:
    """A caller of `follow`."""

    pending: list[StoredEvent] = field(default_factory=list)
    is_behind: bool = False
    """True if events may be missing in `pending`."""
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    def put(self, events: Sequence[StoredEvent]) -> None:
        """Add events that were stored."""
        if len(self.pending) + len(events) > MAX_PENDING:
            self.fall_behind()
            return
        self.pending += events
        self.changed.set()

    def fall_behind(self) -> None:
        """Let the reader look into the store."""
        self.pending.clear()
        self.is_behind = True
        self.changed.set()

    def begin(self) -> None:
        """Note that the store is about to be read."""
        self.pending.clear()
        self.is_behind = False
        self.changed.clear()

    async def taken(self) -> list[StoredEvent]:
        """Wait for events and return them; none if the store must be read."""
        await self.changed.wait()
        self.changed.clear()
        events, self.pending = self.pending, []
        return [] if self.is_behind else events


class Feed:
    """
    Passes events to all callers that follow a response in this process.

    Runners of this process publish what they have stored; for other responses, one query for all of
    them looks for news periodically.

    Args:
        rows: The stored responses.
    """

    def __init__(self, rows: ResponseRows) -> None:
        self._rows = rows
        self._readers: dict[str, set[_Reader]] = {}
        self._local: set[str] = set()
        self._counts: dict[str, int] = {}
        """Followed response of another gateway -> number of its events at the last look."""

    def run_here(self, response_id: str) -> None:
        """Note that a runner of this process publishes the events of a response."""
        self._local.add(response_id)

    def run_elsewhere(self, response_id: str) -> None:
        """Note that the runner of this process has ended."""
        self._local.discard(response_id)
        self._behind(response_id)

    def publish(self, response_id: str, events: Sequence[StoredEvent]) -> None:
        """Pass events on that have been stored."""
        for reader in self._readers.get(response_id, ()):
            reader.put(events)

    async def poll(self) -> None:
        """
        Look for news of followed responses that run elsewhere.

        Raises:
            StoreUnavailableError: The store cannot be used now.
        """
        followed = [each for each in self._readers if each not in self._local]
        if not followed:
            return
        found = await self._rows.progress(followed)
        changed = dict[str, int]()
        for response_id in followed:
            progress, known = found.get(response_id), self._counts.get(response_id)
            if progress is None or known is None:
                self._behind(response_id)
            elif progress.num_events > known:
                changed[response_id] = known - 1
            self._count(response_id, 0 if progress is None else progress.num_events)
        if changed:
            for response_id, events in (await self._rows.news(changed)).items():
                # More may have been stored since the first query.
                self._count(response_id, events[-1].number + 1)
                self.publish(response_id, events)

    def _count(self, response_id: str, number: int) -> None:
        if response_id in self._readers:
            self._counts[response_id] = number

    def _behind(self, response_id: str) -> None:
        for reader in self._readers.get(response_id, ()):
            reader.fall_behind()

    async def follow(
        self, response_id: str, *, after: int = -1
    ) -> AsyncGenerator[list[StoredEvent], None]:
        """
        The events with numbers above *after*, in order, until the response ends or is deleted.

        Raises:
            StoreUnavailableError: The store cannot be used now.
        """
        reader = _Reader()
        self._readers.setdefault(response_id, set()).add(reader)
        try:
            position = after
            while True:
                reader.begin()
                async for events in self._stored(response_id, position):
                    position = events[-1].number
                    yield events
                if await self._has_ended(response_id, position):
                    return
                while events := await reader.taken():
                    fresh = [event for event in events if event.number > position]
                    if fresh and fresh[0].number > position + 1:
                        break
                    if fresh:
                        position = fresh[-1].number
                        yield fresh
                    # Also if the caller has asked for events after the end.
                    if events[-1].type in ENDS:
                        return
        finally:
            self._leave(response_id, reader)

    async def ended(self, response_id: str) -> None:
        """Wait until a response has ended or was deleted."""
        async for _ in self.follow(response_id):
            pass

    async def _stored(
        self, response_id: str, position: int
    ) -> AsyncGenerator[list[StoredEvent], None]:
        """The stored events after *position*, in pages."""
        while events := await self._rows.events(response_id, after=position, limit=PAGE):
            yield events
            if len(events) < PAGE:
                return
            position = events[-1].number

    async def _has_ended(self, response_id: str, position: int) -> bool:
        """True if no event will follow *position*."""
        progress = (await self._rows.progress([response_id])).get(response_id)
        if progress is None:
            return True
        return not progress.is_running and progress.num_events <= position + 1

    def _leave(self, response_id: str, reader: _Reader) -> None:
        readers = self._readers[response_id]
        readers.discard(reader)
        if not readers:
            del self._readers[response_id]
            self._counts.pop(response_id, None)
