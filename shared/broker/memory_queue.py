"""One queue of the in-process broker."""

from bisect import insort
from collections import Counter, deque
from collections.abc import Callable, Iterable
from typing import Protocol

from shared.broker.memory_message import StoredMessage
from shared.broker.protocol import QueueSpec, QueueType


class QueueConsumer(Protocol):
    """Where a queue pushes messages to."""

    @property
    def has_credit(self) -> bool:
        """Whether it takes one more unsettled delivery."""
        ...

    def push(self, stored: StoredMessage) -> None: ...


class MemoryQueue:
    """
    Order, bounds, delivery counts and consumers of one queue.

    Args:
        spec: What it is.
        owner: The client that an exclusive queue belongs to, else None.
        on_dead: Takes messages that die here, with RabbitMQ's word for why.
    """

    def __init__(
        self,
        spec: QueueSpec,
        *,
        owner: object | None,
        on_dead: Callable[["MemoryQueue", StoredMessage, str], None],
    ) -> None:
        self.spec = spec
        self.owner = owner
        self._on_dead = on_dead
        self._seq = 0
        self._returned: deque[StoredMessage] = deque()
        self._ready: deque[StoredMessage] = deque()
        self._ready_bytes = 0
        self._consumers: deque[QueueConsumer] = deque()
        self._holders: Counter[object] = Counter()

    @property
    def num_ready(self) -> int:
        return len(self._returned) + len(self._ready)

    @property
    def num_consumers(self) -> int:
        """As RabbitMQ counts: who got messages of a quorum queue and holds them is one, too."""
        holders = len(self._holders) if self.spec.type is QueueType.QUORUM else 0
        return len(self._consumers) + holders

    def held(self, holder: object) -> None:
        """*holder* has one more message that it got."""
        self._holders[holder] += 1

    def released(self, holder: object) -> None:
        """*holder* has settled, or lost, one of them."""
        self._holders -= Counter({holder: 1})

    def next_seq(self) -> int:
        self._seq += 1
        return self._seq

    def offer(self, stored: StoredMessage) -> bool:
        """Append; False when the queue is full and refuses. Only ready messages count."""
        if not self.spec.drop_head and self._over(1, stored.size_bytes):
            return False
        self._ready.append(stored)
        self._ready_bytes += stored.size_bytes
        self.run()
        return True

    def take(self) -> StoredMessage | None:
        """The first ready message."""
        source = self._returned or self._ready
        if not source:
            return None
        stored = source.popleft()
        self._ready_bytes -= stored.size_bytes
        return stored

    def give_back(self, messages: Iterable[StoredMessage]) -> None:
        """Requeue after a delivery that did not end well, in the order given."""
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
                # Before everything fresh, in the order of return.
                self._returned.append(stored)
            else:
                # Where it was.
                insort(self._ready, stored, key=lambda other: other.seq)
        self.run()

    def kill(self, stored: StoredMessage) -> None:
        """Rejected: dead-letter it."""
        self._on_dead(self, stored, "rejected")

    def purge(self) -> int:
        num_ready = self.num_ready
        self._returned.clear()
        self._ready.clear()
        self._ready_bytes = 0
        return num_ready

    def forget_transient(self) -> None:
        """What a restart of the broker does to messages that are not persistent."""
        if self.spec.type is QueueType.CLASSIC:
            self._ready = deque(stored for stored in self._ready if stored.message.persistent)
            self._ready_bytes = sum(stored.size_bytes for stored in self._ready)

    def attach(self, consumer: QueueConsumer) -> None:
        self._consumers.append(consumer)
        self.run()

    def detach(self, consumer: QueueConsumer) -> None:
        if consumer in self._consumers:
            self._consumers.remove(consumer)
            self.run()

    def run(self) -> None:
        """Push what consumers have credit for, in turn, then drop what is over the bound."""
        while self.num_ready and (consumer := self._next_consumer()) is not None:
            stored = self.take()
            if stored is not None:
                consumer.push(stored)
        while self.spec.drop_head and self._over(0, 0):
            stored = self.take()
            if stored is not None:
                self._on_dead(self, stored, "maxlen")

    def _next_consumer(self) -> QueueConsumer | None:
        if self.spec.single_active_consumer:
            active = self._consumers[0] if self._consumers else None
            return active if active is not None and active.has_credit else None
        for _ in range(len(self._consumers)):
            consumer = self._consumers[0]
            self._consumers.rotate(-1)
            if consumer.has_credit:
                return consumer
        return None

    def _over(self, more_messages: int, more_bytes: int) -> bool:
        spec = self.spec
        return (
            spec.max_length is not None and self.num_ready + more_messages > spec.max_length
        ) or (
            spec.max_length_bytes is not None
            and self._ready_bytes + more_bytes > spec.max_length_bytes
        )
