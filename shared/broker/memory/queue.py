"""Queue of the in-process broker."""

import asyncio
import math
from bisect import insort
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from itertools import count

from shared.broker.memory.message import StoredMessage
from shared.broker.memory.subscription import MemorySession, MemorySubscription
from shared.broker.protocol import (
    Delivery,
    OutMessage,
    QueueDepth,
    QueueSpec,
    QueueType,
    Settlement,
)
from shared.contracts.base import UnixTime
from shared.runtime.clock import Clock


class MemoryQueue:
    """
    One queue: order of messages, length limits, delivery counts and consumers.

    Args:
        spec: Properties of the queue.
        owner: Client that owns an exclusive queue; None for other queues.
        on_dead: Receives dead-lettered messages with RabbitMQ's reason.
        clock: Time by which messages get old.
    """

    def __init__(
        self,
        spec: QueueSpec,
        *,
        owner: object | None,
        on_dead: Callable[["MemoryQueue", StoredMessage, str], None],
        clock: Clock,
    ) -> None:
        self.spec = spec
        self.owner = owner
        self._on_dead = on_dead
        self._clock = clock
        self._timer: asyncio.TimerHandle | None = None
        self._numbers = count()
        self._returned: deque[StoredMessage] = deque()
        self._ready: deque[StoredMessage] = deque()
        self._ready_bytes = 0
        self._consumers: deque[MemorySubscription] = deque()
        self._unsettled: dict[StoredMessage, tuple[MemorySession, MemorySubscription | None]] = {}

    @property
    def _num_ready(self) -> int:
        return len(self._returned) + len(self._ready)

    @property
    def depth(self) -> QueueDepth:
        """
        Depth of the queue, counted as in RabbitMQ.

        For a quorum queue, sessions with unsettled messages from `get` count as consumers.
        """
        holders = {session for session, consumer in self._unsettled.values() if consumer is None}
        num_holders = len(holders) if self.spec.type is QueueType.QUORUM else 0
        return QueueDepth(ready=self._num_ready, consumers=len(self._consumers) + num_holders)

    def offer(self, exchange: str, routing_key: str, message: OutMessage) -> bool:
        """Append a message; return False if the queue is full. Only ready messages count."""
        stored = StoredMessage(
            seq=next(self._numbers),
            exchange=exchange,
            routing_key=routing_key,
            message=message,
            dies_at=self._dies_at(),
        )
        if not self.spec.drop_head and self._over(1, stored.size_bytes):
            return False
        self._ready.append(stored)
        self._ready_bytes += stored.size_bytes
        self._run()
        return True

    def get(self, session: MemorySession) -> Delivery | None:
        """Deliver the first ready message to *session*; None if no message is ready."""
        self.bury_old()
        return self._deliver(session) if self._num_ready else None

    def take_back(self, session: MemorySession) -> None:
        """Requeue the unsettled messages of *session* in their original order."""
        left = [each for each, (holder, _) in self._unsettled.items() if holder is session]
        for stored in left:
            del self._unsettled[stored]
        self._requeue(sorted(left, key=lambda stored: stored.seq))

    def purge(self) -> int:
        num_ready = self._num_ready
        self._returned.clear()
        self._ready.clear()
        self._ready_bytes = 0
        return num_ready

    def forget_transient(self) -> None:
        """Drop messages that are not persistent, as a broker restart does."""
        if self.spec.type is QueueType.CLASSIC:
            self._ready = deque(stored for stored in self._ready if stored.message.persistent)
            self._ready_bytes = sum(stored.size_bytes for stored in self._ready)

    def bury_old(self) -> None:
        """Dead-letter the messages that have been in the queue for its `message_ttl_s`."""
        if self.spec.message_ttl_s is None:
            return
        now = self._clock.now()
        # All messages have the same lifetime, so the first ones of both deques are the oldest.
        for ready in (self._returned, self._ready):
            while ready and ready[0].dies_at <= now:
                stored = ready.popleft()
                self._ready_bytes -= stored.size_bytes
                self._on_dead(self, stored, "expired")
        first_at = min(
            (ready[0].dies_at for ready in (self._returned, self._ready) if ready), default=None
        )
        if first_at is not None and self._timer is None:
            delay_s = first_at - now
            self._timer = asyncio.get_running_loop().call_later(delay_s, self._on_timer)

    def close(self) -> None:
        """Drop all messages and the timer of a queue that is deleted, and end its consumers."""
        self.purge()
        for consumer in self._consumers:
            consumer.on_broken()
        if self._timer is not None:
            self._timer.cancel()

    def _on_timer(self) -> None:
        self._timer = None
        self.bury_old()

    def _dies_at(self) -> UnixTime:
        ttl_s = self.spec.message_ttl_s
        return math.inf if ttl_s is None else self._clock.now() + ttl_s

    def attach(self, consumer: MemorySubscription) -> None:
        self._consumers.append(consumer)
        self._run()

    def detach(self, consumer: MemorySubscription) -> None:
        if consumer in self._consumers:
            self._consumers.remove(consumer)
            self._run()

    def _run(self) -> None:
        """
        Push messages to consumers with free prefetch, in turn; then drop messages above the length
        limit.
        """
        self.bury_old()
        while self._num_ready and (consumer := self._next_consumer()) is not None:
            consumer.push(self._deliver(consumer.session, consumer))
        while self.spec.drop_head and self._over(0, 0):
            self._on_dead(self, self._first(), "maxlen")

    def _next_consumer(self) -> MemorySubscription | None:
        if self.spec.single_active_consumer:
            active = self._consumers[0] if self._consumers else None
            return active if active is not None and active.has_credit else None
        for _ in range(len(self._consumers)):
            consumer = self._consumers[0]
            self._consumers.rotate(-1)
            if consumer.has_credit:
                return consumer
        return None

    def _first(self) -> StoredMessage:
        """Remove and return the first ready message, which must exist."""
        stored = (self._returned or self._ready).popleft()
        self._ready_bytes -= stored.size_bytes
        return stored

    def _deliver(
        self, session: MemorySession, consumer: MemorySubscription | None = None
    ) -> Delivery:
        stored = self._first()
        self._unsettled[stored] = session, consumer
        return stored.delivery(
            self.spec.name,
            settler=partial(self._settle, stored, session),
            has_returned=lambda: not session.open,
        )

    async def _settle(self, stored: StoredMessage, session: MemorySession, how: Settlement) -> bool:
        if not session.open:
            return False
        _, consumer = self._unsettled.pop(stored)
        if how is Settlement.REQUEUE:
            self._requeue([stored])
        elif how is Settlement.REJECT:
            self._on_dead(self, stored, "rejected")
        if consumer is not None:
            consumer.unsettled -= 1
            self._run()
        return True

    def _requeue(self, messages: Iterable[StoredMessage]) -> None:
        """Requeue messages after failed deliveries, in the given order."""
        quorum = self.spec.type is QueueType.QUORUM
        limit = self.spec.delivery_limit
        for stored in messages:
            stored.redelivered = True
            if quorum:
                stored.delivery_count += 1
            if limit is not None and stored.delivery_count > limit:
                self._on_dead(self, stored, "delivery_limit")
                continue
            self._ready_bytes += stored.size_bytes
            if quorum:
                # Returned messages come before all new messages, in the order of their return.
                self._returned.append(stored)
            else:
                # The message returns to its original position.
                insort(self._ready, stored, key=lambda other: other.seq)
        self._run()

    def _over(self, more_messages: int, more_bytes: int) -> bool:
        spec = self.spec
        return (
            spec.max_length is not None and self._num_ready + more_messages > spec.max_length
        ) or (
            spec.max_length_bytes is not None
            and self._ready_bytes + more_bytes > spec.max_length_bytes
        )
