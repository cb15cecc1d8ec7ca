"""Stream of the in-process broker: a log that keeps what was read."""

from collections import deque
from collections.abc import Callable
from functools import partial
from itertools import count

from shared.broker.memory.message import StoredMessage
from shared.broker.memory.queue import MemoryQueue
from shared.broker.memory.subscription import MemorySession, MemorySubscription
from shared.broker.protocol import Delivery, OutMessage, QueueDepth, QueueSpec, Settlement
from shared.contracts.base import UnixTime
from shared.runtime.clock import Clock


class MemoryStream(MemoryQueue):
    """One stream: each of its readers gets all messages that it keeps; see `MemoryQueue`."""

    def __init__(
        self,
        spec: QueueSpec,
        *,
        owner: object | None,
        on_dead: Callable[[MemoryQueue, StoredMessage, str], None],
        clock: Clock,
    ) -> None:
        super().__init__(spec, owner=owner, on_dead=on_dead, clock=clock)
        self._offsets = count()
        self._kept: deque[tuple[UnixTime, StoredMessage]] = deque()
        """The messages with their times, the oldest first."""
        self._kept_bytes = 0
        self._next: dict[MemorySubscription, int] = {}
        """Reader -> offset of its next message."""

    @property
    def depth(self) -> QueueDepth:
        return QueueDepth(ready=0, consumers=len(self._next))

    def offer(self, exchange: str, routing_key: str, message: OutMessage) -> bool:
        stored = StoredMessage(
            seq=next(self._offsets), exchange=exchange, routing_key=routing_key, message=message
        )
        self._kept.append((self._clock.now(), stored))
        self._kept_bytes += stored.size_bytes
        for reader in tuple(self._next):
            self._push_to(reader)
        return True

    def attach(self, consumer: MemorySubscription) -> None:
        self._next[consumer] = 0
        self._push_to(consumer)

    def detach(self, consumer: MemorySubscription) -> None:
        self._next.pop(consumer, None)

    def close(self) -> None:
        for reader in tuple(self._next):
            reader.on_broken()
        self._next.clear()

    def _push_to(self, reader: MemorySubscription) -> None:
        """Push messages to a reader while it has free prefetch."""
        self._drop_old()
        first = self._kept[0][1].seq if self._kept else 0
        begin = max(0, self._next[reader] - first)
        for position in range(begin, len(self._kept)):
            if not reader.has_credit:
                return
            stored = self._kept[position][1]
            self._next[reader] = stored.seq + 1
            reader.push(self._delivery(stored, reader))

    def _drop_old(self) -> None:
        most_bytes, max_age_s = self.spec.max_length_bytes, self.spec.max_age_s
        now = self._clock.now()
        while self._kept and (
            (most_bytes is not None and self._kept_bytes > most_bytes)
            or (max_age_s is not None and self._kept[0][0] + max_age_s <= now)
        ):
            _, stored = self._kept.popleft()
            self._kept_bytes -= stored.size_bytes

    def _delivery(self, stored: StoredMessage, reader: MemorySubscription) -> Delivery:
        session = reader.session
        return stored.delivery(
            self.spec.name,
            settler=partial(self._settle_read, reader, session),
            has_returned=lambda: not session.open,
        )

    async def _settle_read(
        self, reader: MemorySubscription, session: MemorySession, _how: Settlement
    ) -> bool:
        if not session.open:
            return False
        reader.unsettled -= 1
        if reader in self._next:
            self._push_to(reader)
        return True
