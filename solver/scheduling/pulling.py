"""Choice of the queue to pull from next, without reading the contents of queues."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum

from shared.contracts.base import Seconds, UnixTime
from solver.scheduling.keys import FAR_S

WORK_WEIGHT_S_PER_TOKEN = 0.016
"""
Delay of a lane's head per token of its work, by which shorter requests are pulled first.

Differs: twice QoServe's alpha under load. In an overload, pulling then serves as many requests in
time as an engine that sees all requests. A larger weight would delay long requests also at loads at
which all requests can be in time.
"""
_SMOOTHING = 0.05
"""Weight of the last pulled request in the mean work of a queue's requests."""
_DEFERENCE_SHARE, _MOST_DEFERENCE_S = 0.1, 0.1
"""
Delay of a poll per second of held work, and its maximum; 0.1 s of work gives 10 ms, a few round
trips.
"""
FULL_DEFERENCE_S, TURNS_DEFERENCE_S = 0.01, 0.004
"""
Delay of a poll of an instance whose running slots are all taken, beside that of held work; the
second for instances that also take turns with others.
"""
_ABSENT_S = 600.0
"""
Time until a missing queue is polled again; long, because RabbitMQ logs an error for each poll. A
notice for the queue or `look_again` ends the time early.
"""
_UNSURE_S, _UNSURE_ABSENT_S = 60.0, 10.0
"""
Time after `look_again` in which notices may still be missed, and the period of polls of missing
queues during this time.
"""


class SourceKind(IntEnum):
    """Kinds of queues, in the order in which they are pulled at equal deadlines."""

    INBOX = 0
    """The instance's inbox, with the requests routed to the instance."""
    RESUME = 1
    LANE = 2
    OVERFLOW = 3
    RELEGATED = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A queue that the current segment may pull from."""

    queue: str
    kind: SourceKind
    time_left_s: Seconds
    """
    Least time from a request's ingest to its deadline in this queue; infinite for best effort.
    """
    is_important: bool = True
    behind: str | None = None
    """For an overflow queue, the lane that is pulled first while the lane has requests."""

    @property
    def best_effort(self) -> bool:
        return math.isinf(self.time_left_s) or self.kind is SourceKind.RELEGATED


@dataclass(frozen=True, slots=True, kw_only=True)
class Openings:
    """Which work may be pulled; the inbox is read in any case."""

    regular: bool = True
    yielding: bool
    """True if work may be pulled that yields: best effort, and work whose deadline is far."""
    patience_s: Seconds = FAR_S
    """Time to a deadline from which it is far."""
    patience_s_per_token: Seconds = 0.0
    """The same per token of the work, if that is longer."""
    aging_bound_s: Seconds = math.inf
    """Age from which a request no longer yields, so that none starves."""


@dataclass(slots=True)
class _Head:
    source: Source
    deadline_at: UnixTime
    since: UnixTime
    """Time before which the first request of the queue did not arrive."""
    work_tokens: float = 0.0
    """
    Mean work of the requests pulled from the queue, in tokens; 0 before the first pull, so that
    every source is tried.
    """
    quiet_until: UnixTime = 0.0
    noticed_at: UnixTime = 0.0
    num_empty: int = 0
    """Number of polls since the last request or notice, all of which found nothing."""


def deference_s(held_s: Seconds, taken: float, full_s: Seconds = FULL_DEFERENCE_S) -> Seconds:
    """
    Time for which an instance leaves a new request to other instances.

    Decided: instances do not coordinate, and the first instance that polls gets the request. So an
    instance that could begin the request sooner polls sooner, and of instances without held work
    the one with the smaller batch, whose iterations are shorter. The delay applies only to queues
    that were empty.

    Args:
        held_s: Predicted work that the instance has pulled and not begun.
        taken: Share of the running slots that pulled requests take, from 0 to 1.
        full_s: Delay for all slots.
    """
    return min(_MOST_DEFERENCE_S, _DEFERENCE_SHARE * held_s + full_s * taken)


class PullOrder:
    """
    Selects the source whose first request has the smallest priority key: deadline plus weighted
    work.

    The deadline of a head is estimated. FIFO inside a lane is EDF up to one band, so the deadline
    of the last pulled request is a lower bound of the next deadline. Before the first pull, the
    lower edge of the band is the bound. The work of a head is assumed to be the mean of earlier
    requests, because a lane has work of one class. Empty sources are not polled until a notice
    comes or *poll_s* has passed.

    Source: QoServe eqs 4-5, for the heads of lanes instead of requests.

    Args:
        poll_s: Time until an empty source is polled again without a notice.
        most_poll_s: The time doubles with each poll that finds nothing, up to this time; None: it
            does not.
        best_effort_every: One of this many pulls takes best-effort work, if there is any.
        work_weight_s_per_token: QoServe's alpha; 0 is earliest deadline first, which serves hardly
            any request in time in an overload.
    """

    def __init__(
        self,
        *,
        poll_s: Seconds,
        most_poll_s: Seconds | None = None,
        best_effort_every: int = 8,
        work_weight_s_per_token: Seconds = WORK_WEIGHT_S_PER_TOKEN,
    ) -> None:
        self._poll_s = poll_s
        self._most_poll_s = poll_s if most_poll_s is None else max(poll_s, most_poll_s)
        self._best_effort_every = best_effort_every
        self._work_weight = work_weight_s_per_token
        self._heads: dict[str, _Head] = {}
        self._held: dict[str, UnixTime] = {}
        self._since_best_effort = 0
        self._is_relegated_next = True
        self._unsure_until = 0.0

    def set_sources(self, sources: Iterable[Source], now: UnixTime) -> None:
        """Replace the sources; a source that remains keeps its learned deadline and work."""
        self._heads = {
            source.queue: self._heads.get(source.queue)
            or _Head(source, deadline_at=now + source.time_left_s, since=now)
            for source in sources
        }
        self._held = {queue: until for queue, until in self._held.items() if until > now}

    @property
    def queues(self) -> tuple[str, ...]:
        return tuple(self._heads)

    def next(
        self,
        now: UnixTime,
        openings: Openings,
        *,
        unimportant_delay_s: Seconds = 0.0,
    ) -> Source | None:
        """
        The source to pull from, or None if all sources seem empty.

        Args:
            now: Unix seconds.
            openings: Which work may be pulled.
            unimportant_delay_s: Delay of sources of low importance.
        """
        awake = [
            head
            for head in self._heads.values()
            if self._asleep_until(head) <= now and not self._is_behind(head, now)
            if _has_room(head, now, openings)
        ]
        urgent = [head for head in awake if not _yields(head, now, openings)]
        best_effort = [head for head in awake if _yields(head, now, openings)]
        owed = self._since_best_effort >= self._best_effort_every - 1
        pool = self._in_turn(best_effort) if best_effort and (owed or not urgent) else urgent
        if not pool:
            return None
        best = min(pool, key=lambda head: self._key(head, unimportant_delay_s))
        yields = _yields(best, now, openings)
        self._since_best_effort = 0 if yields else self._since_best_effort + 1
        return best.source

    def _in_turn(self, pool: list[_Head]) -> list[_Head]:
        """
        The heads of *pool* whose turn it is.

        Decided: relegated requests, whose clients wait already, precede work whose deadline
        is far; that becomes regular work in time. They take turns with best effort, which in a long
        overload would otherwise get nothing of the capacity that regular work leaves.
        """
        relegated = [head for head in pool if head.source.kind is SourceKind.RELEGATED]
        others = [head for head in pool if head.source.kind is not SourceKind.RELEGATED]
        if not relegated or not others:
            return pool
        if not any(head.source.best_effort for head in others):
            return relegated
        chosen = relegated if self._is_relegated_next else others
        self._is_relegated_next = not self._is_relegated_next
        return chosen

    def inbox(self, now: UnixTime) -> Source | None:
        """The instance's own inbox, unless it seems empty: no other instance polls it."""
        return (
            self._inbox.source if self._inbox and self._asleep_until(self._inbox) <= now else None
        )

    def inbox_at(self) -> UnixTime:
        """Time at which the inbox should be polled again; infinite without an inbox."""
        return self._asleep_until(self._inbox) if self._inbox else math.inf

    @property
    def _inbox(self) -> _Head | None:
        heads = self._heads.values()
        return next((head for head in heads if head.source.kind is SourceKind.INBOX), None)

    def pulled(
        self,
        queue: str,
        deadline_at: UnixTime,
        work_tokens: float = 0.0,
        arrived_at: UnixTime = 0.0,
    ) -> None:
        """
        Record that a request came from *queue*.

        Args:
            queue: The queue.
            deadline_at: Deadline of the request.
            work_tokens: Its work.
            arrived_at: Time of its arrival.
        """
        if (head := self._heads.get(queue)) is None:
            return
        head.deadline_at = deadline_at
        head.since = max(head.since, arrived_at)
        head.num_empty = 0
        first = head.work_tokens == 0.0
        head.work_tokens += (work_tokens - head.work_tokens) * (1.0 if first else _SMOOTHING)

    def empty(self, queue: str, now: UnixTime, *, asked_at: UnixTime | None = None) -> None:
        """
        Record that *queue* was empty.

        Args:
            queue: The queue.
            now: Unix seconds.
            asked_at: Time of the poll; None: now. If a notice has come since then, the request may
                be newer than the answer of the broker, and the queue is polled again.
        """
        if (head := self._heads.get(queue)) is None:
            return
        is_noticed = asked_at is not None and head.noticed_at > asked_at
        if head.quiet_until <= now and not is_noticed:  # the first of several concurrent polls
            poll_s = min(self._most_poll_s, self._poll_s * 2.0 ** min(head.num_empty, 30))
            head.quiet_until, head.num_empty = now + poll_s, head.num_empty + 1
        head.deadline_at, head.since = now + head.source.time_left_s, now

    def absent(self, queue: str, now: UnixTime, *, asked_at: UnixTime) -> None:
        """
        Record that *queue* did not exist.

        The process that creates the queue publishes a request to it and sends a notice.

        Args:
            queue: The missing queue.
            now: Unix seconds.
            asked_at: Time of the poll; if a notice has come since then, the queue exists now.
        """
        head = self._heads.get(queue)
        if head is not None and head.noticed_at <= asked_at:
            self.empty(queue, now)
            absent_s = _UNSURE_ABSENT_S if now < self._unsure_until else _ABSENT_S
            head.quiet_until = now + max(self._poll_s, absent_s)

    def pause(self, queue: str, until: UnixTime) -> None:
        """Do not poll *queue*, which is empty, before *until* or the next notice."""
        if (head := self._heads.get(queue)) is not None:
            head.quiet_until = max(head.quiet_until, until)

    def look_again(self, now: UnixTime) -> None:
        """
        Poll every queue again, because notices may have been missed; notices may also be missed for
        a while.
        """
        self._unsure_until = now + _UNSURE_S
        for head in self._heads.values():
            head.quiet_until, head.num_empty = 0.0, 0

    def nonempty(self, queue: str, now: UnixTime, *, after_s: Seconds = 0.0) -> bool:
        """
        Record a notice that *queue* got a request; return True if *queue* is a source.

        Args:
            now: Unix seconds.
            after_s: Time for which other instances may pull first; the inbox has no others.
        """
        head = self._heads.get(queue)
        if head is not None:
            head.noticed_at = now
            head.num_empty = 0
            ours_alone = head.source.kind is SourceKind.INBOX
            head.quiet_until = min(head.quiet_until, now + (0.0 if ours_alone else after_s))
        return head is not None

    def time_left_s(self, queue: str) -> Seconds | None:
        """`Source.time_left_s` of a lane; None for other queues and for what is not a source."""
        head = self._heads.get(queue)
        is_lane = head is not None and head.source.kind is SourceKind.LANE
        return head.source.time_left_s if head is not None and is_lane else None

    def hold(self, queue: str, until: UnixTime) -> None:
        """
        Do not poll *queue* before *until*, so that evicted requests do not return immediately.

        Notices do not end the pause, because the requeued request itself causes a notice.
        """
        self._held[queue] = until

    def wake_at(self, now: UnixTime, openings: Openings) -> UnixTime:
        """
        Time at which the first source should be polled again; infinite if no source may be polled.

        Args:
            now: Unix seconds.
            openings: Which work may be pulled.
        """
        asked = (
            self._asleep_until(head)
            for head in self._heads.values()
            if _has_room(head, now, openings)
            if not self._is_behind(head, now)
        )
        return min(asked, default=math.inf)

    def _key(self, head: _Head, unimportant_delay_s: Seconds) -> tuple[float, SourceKind, str]:
        key = head.deadline_at + self._work_weight * head.work_tokens
        if not head.source.is_important:
            key += unimportant_delay_s
        return (key, head.source.kind, head.source.queue)

    def _is_behind(self, head: _Head, now: UnixTime) -> bool:
        """True if the queue of *head* must wait until another source is empty."""
        before = self._heads.get(head.source.behind) if head.source.behind else None
        return before is not None and before.quiet_until <= now

    def _asleep_until(self, head: _Head) -> UnixTime:
        return max(head.quiet_until, self._held.get(head.source.queue, 0.0))


def _has_room(head: _Head, now: UnixTime, openings: Openings) -> bool:
    """True if the next request of *head* may be pulled."""
    if _yields(head, now, openings):
        return openings.yielding
    return openings.regular or head.source.kind is SourceKind.INBOX


def _yields(head: _Head, now: UnixTime, openings: Openings) -> bool:
    """True if the next request of *head* is pulled only into room for best-effort work."""
    if head.source.kind is SourceKind.INBOX:  # only this instance reads it, whatever comes next
        return False
    if now - head.since > openings.aging_bound_s:
        return False
    own_s = openings.patience_s_per_token * head.work_tokens
    is_far = head.deadline_at - now > max(openings.patience_s, own_s)
    return head.source.best_effort or is_far
