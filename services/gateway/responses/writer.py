"""Stores the events of one response in small batches."""

import asyncio

import msgspec
import structlog

from services.gateway.responses.feed import Feed
from services.gateway.responses.objects import stored_event
from services.gateway.webhooks.settings import WebhookSettings
from shared.contracts.base import Seconds
from shared.contracts.errors import MeshError, StoreFullError, StoreUnavailableError
from shared.store.group_commit import GroupCommit
from shared.store.objects.responses import Appended, StoredResponse
from solver.storage.response_events import ENDS, LIFECYCLE, Event

log = structlog.get_logger()

BATCH_S: Seconds = 0.05
"""Time between two batches of one response."""
MAX_BATCH = 64
"""Maximum number of events of a batch."""
RETRY_S: Seconds = 0.5
"""Time after which a batch is tried again while the store is away."""


class RunLostError(MeshError):
    """The response has ended or is gone, or another gateway runs it."""


class EventWriter:
    """
    Takes the events of one response, and stores them in order.

    Args:
        response: The response as this gateway holds it.
        commits: Joins the batches of all responses into transactions.
        feed: Gets the stored events.
        webhooks: Receivers of an event about the end.
    """

    def __init__(
        self,
        response: StoredResponse,
        commits: GroupCommit[Appended, bool],
        feed: Feed,
        webhooks: WebhookSettings,
    ) -> None:
        self._response = response
        self._commits = commits
        self._feed = feed
        self._webhooks = webhooks
        self._waiting: list[Event] = []
        self._changed = asyncio.Event()
        self._is_closed = False
        self._waits = False
        """True while the store is away."""

    def add(self, event: Event) -> None:
        """Store *event* after those before."""
        self._waiting.append(event)
        self._changed.set()

    def close(self) -> None:
        """Let `run` return when everything is stored."""
        self._is_closed = True
        self._changed.set()

    async def run(self) -> None:
        """
        Store events until `close`; while the store is away, they wait.

        Raises:
            RunLostError: The response is not this gateway's any more; nothing more is stored.
        """
        while await self._has_events():
            events = self._waiting[:MAX_BATCH]
            await self._store(events)
            del self._waiting[: len(events)]
            if not self._is_closed and len(self._waiting) < MAX_BATCH:
                await asyncio.sleep(BATCH_S)

    async def _has_events(self) -> bool:
        while not self._waiting and not self._is_closed:
            self._changed.clear()
            await self._changed.wait()
        return bool(self._waiting)

    async def _store(self, events: list[Event]) -> None:
        batch = self._batch(events)
        while (is_stored := await self._submitted(batch)) is None:  # noqa: ASYNC110 - the end of an outage has no event
            await asyncio.sleep(RETRY_S)
        if not is_stored:
            raise RunLostError(f"response {self._response.id} has ended or runs elsewhere")
        self._feed.publish(self._response.id, batch.events)

    async def _submitted(self, batch: Appended) -> bool | None:
        """Whether the batch is stored; None while the store is away."""
        try:
            is_stored = await self._commits.submit(batch)
        except (StoreUnavailableError, StoreFullError) as error:
            if not self._waits:
                log.warning("events.waiting", response_id=self._response.id, error=str(error))
            self._waits = True
            return None
        self._waits = False
        return is_stored

    def _batch(self, events: list[Event]) -> Appended:
        response, last = self._response, events[-1]
        shown = [event["response"] for event in events if event["type"] in LIFECYCLE]
        status, notice = "in_progress", None
        if last["type"] in ENDS:
            status = last["type"].removeprefix("response.")
            if response.is_background:
                notice = self._webhooks.notice(response.tenant, last["type"], response.id)
        return Appended(
            response_id=response.id,
            epoch=response.epoch,
            events=tuple(stored_event(event) for event in events),
            status=status,
            object=msgspec.json.encode(shown[-1]) if shown else None,
            notice=notice,
        )
