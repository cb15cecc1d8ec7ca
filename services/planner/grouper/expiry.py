"""Ends requests at their ends, wherever they wait, with one final reply each."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from itertools import islice

import structlog
from cachetools import FIFOCache

from services.planner.grouper.watched_ends import Watched, WatchedEnds
from services.planner.state import GrouperState, identity
from shared.broker import topology
from shared.broker.finals import publish_final, stored_for
from shared.broker.protocol import Broker, OutMessage
from shared.broker.retry import send_best_effort
from shared.broker.stories import StoryOutbox
from shared.contracts.base import RequestId, TenantId
from shared.contracts.ends import (
    DEADLINE_EXPIRED,
    FIRST_TOKEN,
    end_without_token,
    expired_error,
    nearest_end,
)
from shared.contracts.errors import MeshError
from shared.contracts.requests import ErrorInfo, QueuedRequest, RequestFailed
from shared.contracts.stories.story import ended, story_of
from shared.contracts.telemetry import ExpiredRequest, RequestObserved, RequestsExpired
from shared.runtime.clock import Clock

log = structlog.get_logger()
AT_ONCE = 64
"""Number of final replies that are published concurrently."""
MOST_IN_NOTICE = 500
"""Number of requests in one notice to other groupers."""
_PLACES: Mapping[str, str] = {
    "headway": "global",
    "lane": "lane",
    "overflow": "overflow",
    "resume": "resume",
    "relegated": "relegated",
    "inbox": "inbox",
}
"""First word of a queue's name -> place in metrics."""


def place_of(queue: str) -> str:
    """Kind of *queue* in metrics."""
    return _PLACES.get(queue.partition(".")[0], "other")


async def _no_op() -> None:
    """Do nothing."""


@dataclass(slots=True)
class Expiry:
    """
    Watches the requests that this grouper has put into queues, and sends their last replies.

    Several processes may see the end of a request: this grouper, the grouper that reads the
    broker's dead letter, and an instance. Each notifies the others, and only the first one sends a
    reply. If a notice is late, the producer gets a second reply, which it ignores.

    Args:
        sender: Name of this process in notices.
        watched: Requests with ends.
        ended: Identities of requests whose producers know their ends.
        finish: Called when a request no longer counts for its tenant.
        hear_first_tokens: Begins to listen to the first tokens of requests.
        stories: Takes the record of each request that ends; None: there are no records.
    """

    broker: Broker
    state: GrouperState
    clock: Clock
    sender: str
    watched: WatchedEnds
    ended: FIFOCache[str, None]
    finish: Callable[[RequestId, TenantId], None]
    hear_first_tokens: Callable[[], Awaitable[None]] = _no_op
    stories: StoryOutbox | None = None
    _hears: bool = False
    _ending: dict[str, asyncio.Event] = field(default_factory=dict)
    """Identity of a request whose last reply is being sent -> set when it is sent, or not."""
    _unannounced: list[ExpiredRequest] = field(default_factory=list)

    async def watch(self, request: QueuedRequest, queue: str) -> None:
        """Watch a request that is about to be put into *queue*."""
        if not self._hears and end_without_token(request).param == FIRST_TOKEN:
            await self.hear_first_tokens()
            self._hears = True
        self.watched.add(identity(request.tenant, request.request_id), request, queue)

    def moved(self, request: QueuedRequest, queue: str) -> None:
        """Record the queue into which a watched request was put."""
        self.watched.moved(identity(request.tenant, request.request_id), queue)

    def forget(self, request: QueuedRequest) -> None:
        """Stop watching a request that was not put into a queue."""
        self.watched.remove(identity(request.tenant, request.request_id))

    def on_begun(self, request_id: RequestId, tenant: TenantId) -> None:
        """Handle the first token of a request."""
        self.watched.begun(identity(tenant, request_id))

    def on_observed(self, observed: RequestObserved) -> None:
        """Handle the end of a request on an instance."""
        key = identity(observed.tenant, observed.request_id)
        self.watched.remove(key)
        if observed.outcome == DEADLINE_EXPIRED:
            self.ended[key] = None

    def on_expired(self, expired: RequestsExpired) -> None:
        """Handle the notice of another grouper."""
        if expired.sender == self.sender:
            return
        for each in expired.requests:
            self.ended[identity(each.tenant, each.request_id)] = None
            self._forget(each.request_id, each.tenant)

    async def end_due(self) -> None:
        """
        Send the replies of requests that are past their ends, and notify other groupers.

        Raises:
            MeshError: A reply could not be sent; it is sent at the next call.
        """
        due = self.watched.due(self.clock.now())
        try:
            while batch := tuple(islice(due, AT_ONCE)):
                errors = await asyncio.gather(*(self._end_watched(each) for each in batch))
                for each, error in zip(batch, errors, strict=True):
                    if error is not None:
                        self.watched.restore(each)
                for error in filter(None, errors):
                    raise error
        finally:
            await self.announce()

    async def end_dead_letter(self, request: QueuedRequest, queue: str) -> None:
        """
        Handle a request that the broker has dropped from *queue* at its end; the producer may know
        it already.

        Raises:
            BrokerUnavailableError: The broker remained unavailable during all retries.
        """
        place = _waited(queue, self.clock.now() - request.grouped_at, request.progress.num_tokens)
        error = expired_error(nearest_end(request), arrived_at=request.arrived_at, place=place)
        await self._end(request, queue, error)

    async def announce(self) -> None:
        """Notify other groupers of the requests that this one has ended."""
        while self._unannounced:
            batch = self._unannounced[:MOST_IN_NOTICE]
            self._unannounced = self._unannounced[MOST_IN_NOTICE:]
            notice = RequestsExpired(sender=self.sender, requests=tuple(batch))
            message = OutMessage.transient(notice)
            await send_best_effort(self.broker, topology.TELEMETRY, topology.EXPIRED_KEY, message)

    async def _end_watched(self, watched: Watched) -> MeshError | None:
        """End a request; return the error if the reply could not be sent."""
        place = _waited(watched.queue, self.clock.now() - watched.grouped_at)
        error = expired_error(watched.end, arrived_at=watched.arrived_at, place=place)
        try:
            await self._end(watched, watched.queue, error)
        except MeshError as failure:
            return failure
        return None

    async def _end(self, request: QueuedRequest | Watched, queue: str, error: ErrorInfo) -> None:
        """Send the reply of a request, unless it was sent; return when the broker has it."""
        key = identity(request.tenant, request.request_id)
        while (ending := self._ending.get(key)) is not None:
            await ending.wait()
        if key in self.ended:
            return
        self.ended[key] = None
        ending = self._ending[key] = asyncio.Event()
        try:
            failed = RequestFailed(
                request_id=request.request_id,
                error=error,
                at=self.clock.now(),
                history=request.history,
            )
            await publish_final(
                self.broker, failed, reply_to=request.reply_to, stored_for=stored_for(request)
            )
        except BaseException:  # also if the process stops: another grouper gets the dead letter
            self.ended.pop(key, None)
            raise
        finally:
            del self._ending[key]
            ending.set()
        self._forget(request.request_id, request.tenant)
        self.state.expired[place_of(queue)] += 1
        qos_class = request.qos_class if isinstance(request, Watched) else request.slo.qos_class
        self.state.missed(qos_class, request.tenant)
        self._unannounced.append(
            ExpiredRequest(request_id=request.request_id, tenant=request.tenant)
        )
        if self.stories is not None:
            story = request.story if isinstance(request, Watched) else story_of(request)
            self.stories.ended(ended(story, outcome=DEADLINE_EXPIRED, at=self.clock.now()))
        log.info("request.expired", request_id=request.request_id, queue=queue)

    def _forget(self, request_id: RequestId, tenant: TenantId) -> None:
        self.watched.remove(identity(tenant, request_id))
        self.finish(request_id, tenant)


def never_grouped_error(queue: str) -> ErrorInfo:
    """The error of a message that the broker has dropped from a global queue at its end."""
    return ErrorInfo(
        message="the request ended without its whole answer at the end of its message's lifetime "
        f"(`expiration`): it was never grouped, and waited in {queue}",
        type="timeout_error",
        code=DEADLINE_EXPIRED,
        param="expiration",
        status=504,
    )


def _waited(queue: str, waited_s: float, num_tokens: int = 0) -> str:
    tokens = f" with {num_tokens} tokens of earlier runs" if num_tokens else ""
    since = max(0.0, waited_s)
    return f"it waited since its grouping {since:.3f} s ago, last put into {queue}{tokens}"
