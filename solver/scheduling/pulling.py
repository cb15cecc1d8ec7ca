"""Which queue to take the next request from, without seeing inside any of them."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum

from shared.contracts.base import Seconds, UnixTime

WORK_WEIGHT_S_PER_TOKEN = 0.008
"""QoServe's alpha under load."""
_SMOOTHING = 0.05
_DEFERENCE_SHARE, _MOST_DEFERENCE_S = 0.1, 0.1
"""A tenth of a second of work is ten milliseconds, some round trips to the broker."""
_ABSENT_S = 10.0
"""How long a queue that is not there stays unasked, should a notice of it be lost."""


class SourceKind(IntEnum):
    """The inbox, a lane and its companions, in the order they are taken at equal deadlines."""

    INBOX = 0
    """Of the instance itself: what was routed to it."""
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
    """Least time to the deadline that its requests had at ingest; infinite for best effort."""
    behind: str | None = None
    """Queue that goes first while it has anything: an overflow's lane."""

    @property
    def best_effort(self) -> bool:
        return math.isinf(self.time_left_s) or self.kind is SourceKind.RELEGATED


@dataclass(slots=True)
class _Head:
    source: Source
    deadline_at: UnixTime
    work_tokens: float = 0.0
    """Mean of what was pulled from there; 0 until then, so that every source is tried."""
    quiet_until: UnixTime = 0.0


def deference_s(held_s: Seconds) -> Seconds:
    """
    How long an instance with *held_s* of work before it leaves a new request to others.

    Decided: instances know nothing of each other, and whoever asks first gets the request; so
    whoever could begin it sooner asks sooner. A queue that has not been empty is asked at once.
    """
    return min(_MOST_DEFERENCE_S, _DEFERENCE_SHARE * held_s)


class PullOrder:
    """
    Picks the source whose head has the smallest priority key: deadline plus weighted work.

    A head's deadline is estimated: FIFO inside a lane is EDF up to one band, so the last
    deadline seen there is a lower bound of the next, and a band's lower edge is one before
    anything was seen. Its work is taken to be the mean of what came from there: a lane holds
    work of one class. Empty sources are left alone until told otherwise or *poll_s* has passed.

    Source: QoServe eqs 4-5, for the heads of lanes instead of requests.

    Args:
        poll_s: How long a source that was empty stays unasked.
        best_effort_every: Of so many pulls one is kept for best effort, if it has any.
        work_weight_s_per_token: QoServe's alpha; 0 is earliest deadline first, which serves
            hardly anybody in time once there is more work than time for it.
    """

    def __init__(
        self,
        *,
        poll_s: Seconds,
        best_effort_every: int = 8,
        work_weight_s_per_token: Seconds = WORK_WEIGHT_S_PER_TOKEN,
    ) -> None:
        self._poll_s = poll_s
        self._best_effort_every = best_effort_every
        self._work_weight = work_weight_s_per_token
        self._heads: dict[str, _Head] = {}
        self._held: dict[str, UnixTime] = {}
        self._since_best_effort = 0

    def set_sources(self, sources: Iterable[Source], now: UnixTime) -> None:
        """Replace the sources; those that stay keep what was learnt about them."""
        self._heads = {
            source.queue: self._heads.get(source.queue)
            or _Head(source, deadline_at=now + source.time_left_s)
            for source in sources
        }
        self._held = {queue: until for queue, until in self._held.items() if until > now}

    @property
    def queues(self) -> tuple[str, ...]:
        return tuple(self._heads)

    def next(self, now: UnixTime, *, best_effort_room: bool) -> Source | None:
        """
        The source to pull from, or None when all seem empty.

        Args:
            now: Unix seconds.
            best_effort_room: Whether best-effort work may be pulled at all.
        """
        awake = [
            head
            for head in self._heads.values()
            if self._asleep_until(head) <= now and not self._is_behind(head, now)
        ]
        urgent = [head for head in awake if not head.source.best_effort]
        filler = [head for head in awake if head.source.best_effort] if best_effort_room else []
        owed = self._since_best_effort >= self._best_effort_every - 1
        pool = filler if filler and (owed or not urgent) else urgent
        if not pool:
            return None
        best = min(pool, key=self._key)
        self._since_best_effort = 0 if best.source.best_effort else self._since_best_effort + 1
        return best.source

    def inbox(self, now: UnixTime) -> Source | None:
        """The instance's own inbox, unless it seems empty: nobody else asks it."""
        return (
            self._inbox.source if self._inbox and self._asleep_until(self._inbox) <= now else None
        )

    def inbox_at(self) -> UnixTime:
        """When the inbox should be asked; infinite if there is none."""
        return self._asleep_until(self._inbox) if self._inbox else math.inf

    @property
    def _inbox(self) -> _Head | None:
        heads = self._heads.values()
        return next((head for head in heads if head.source.kind is SourceKind.INBOX), None)

    def pulled(self, queue: str, deadline_at: UnixTime, work_tokens: float = 0.0) -> None:
        """A request with *deadline_at* and so much predicted work came from *queue*."""
        if (head := self._heads.get(queue)) is None:
            return
        head.deadline_at = deadline_at
        first = head.work_tokens == 0.0
        head.work_tokens += (work_tokens - head.work_tokens) * (1.0 if first else _SMOOTHING)

    def empty(self, queue: str, now: UnixTime) -> None:
        """*queue* had nothing."""
        if (head := self._heads.get(queue)) is not None:
            head.quiet_until = now + self._poll_s
            head.deadline_at = now + head.source.time_left_s

    def absent(self, queue: str, now: UnixTime) -> None:
        """There is no such queue: whoever creates it puts something into it, and tells so."""
        self.empty(queue, now)
        if (head := self._heads.get(queue)) is not None:
            head.quiet_until = now + max(self._poll_s, _ABSENT_S)

    def nonempty(self, queue: str, now: UnixTime, *, held_s: Seconds = 0.0) -> bool:
        """
        Something was put into *queue*; whether it is one of ours.

        Args:
            queue: Which.
            now: Unix seconds.
            held_s: Predicted work that the instance has pulled and not begun; see `deference_s`.
        """
        head = self._heads.get(queue)
        if head is not None:
            ours_alone = head.source.kind is SourceKind.INBOX
            after_s = 0.0 if ours_alone else deference_s(held_s)
            head.quiet_until = min(head.quiet_until, now + after_s)
        return head is not None

    def hold(self, queue: str, until: UnixTime) -> None:
        """
        Leave *queue* alone: what was just evicted must not come straight back.

        Notices do not end it, since putting the request back is what they tell of.
        """
        self._held[queue] = until

    def wake_at(self, now: UnixTime, *, best_effort_room: bool) -> UnixTime:
        """
        When the first source should be asked again; infinite if none may be.

        Args:
            now: Unix seconds.
            best_effort_room: As `next` takes it.
        """
        asked = (
            self._asleep_until(head)
            for head in self._heads.values()
            if best_effort_room or not head.source.best_effort
            if not self._is_behind(head, now)
        )
        return min(asked, default=math.inf)

    def _key(self, head: _Head) -> tuple[float, SourceKind, str]:
        key = head.deadline_at + self._work_weight * head.work_tokens
        return (key, head.source.kind, head.source.queue)

    def _is_behind(self, head: _Head, now: UnixTime) -> bool:
        """Whether *head* waits for another source to be empty."""
        before = self._heads.get(head.source.behind) if head.source.behind else None
        return before is not None and before.quiet_until <= now

    def _asleep_until(self, head: _Head) -> UnixTime:
        return max(head.quiet_until, self._held.get(head.source.queue, 0.0))
