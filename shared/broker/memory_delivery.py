"""Deliveries, sessions and consumers of the in-process broker."""

from collections.abc import Callable, Mapping

import structlog

from shared.broker.memory_message import StoredMessage
from shared.broker.memory_queue import MemoryQueue
from shared.broker.protocol import DeliveryHandler, Settlement
from shared.broker.tasks import OwnedTasks

log = structlog.get_logger()


class MemorySession:
    """One incarnation of a client's connection, and what is unsettled on it."""

    def __init__(self) -> None:
        self.open = True
        self._unsettled: dict[MemoryDelivery, None] = {}

    def add(self, delivery: "MemoryDelivery") -> None:
        self._unsettled[delivery] = None

    def discard(self, delivery: "MemoryDelivery") -> None:
        self._unsettled.pop(delivery, None)

    def end(self) -> None:
        """The connection has gone: everything unsettled goes back, in its original order."""
        self.open = False
        by_queue: dict[MemoryQueue, list[StoredMessage]] = {}
        for delivery in self._unsettled:
            by_queue.setdefault(delivery.source, []).append(delivery.stored)
            delivery.source.released(self)
        self._unsettled.clear()
        for queue, messages in by_queue.items():
            queue.give_back(sorted(messages, key=lambda stored: stored.seq))


class MemoryDelivery:
    """`Delivery` in the same process."""

    __slots__ = ("_on_settled", "_outcome", "_session", "_settled", "source", "stored", "view")

    def __init__(
        self,
        source: MemoryQueue,
        stored: StoredMessage,
        session: MemorySession,
        *,
        on_settled: Callable[[], None] | None = None,
    ) -> None:
        self.source = source
        self.stored = stored
        # As delivered: the stored message goes on to change when it is requeued.
        self.view = (stored.redelivered, stored.delivery_count)
        self._session = session
        self._on_settled = on_settled
        self._settled = False
        self._outcome = True
        session.add(self)
        if on_settled is None:
            source.held(session)

    @property
    def body(self) -> bytes:
        return self.stored.message.body

    @property
    def kind(self) -> str:
        return self.stored.message.kind

    @property
    def queue(self) -> str:
        return self.source.spec.name

    @property
    def routing_key(self) -> str:
        return self.stored.routing_key

    @property
    def message_id(self) -> str | None:
        return self.stored.message.message_id

    @property
    def correlation_id(self) -> str | None:
        return self.stored.message.correlation_id

    @property
    def reply_to(self) -> str | None:
        return self.stored.message.reply_to

    @property
    def user_id(self) -> str | None:
        return self.stored.message.user_id

    @property
    def headers(self) -> Mapping[str, object]:
        return self.stored.headers

    @property
    def redelivered(self) -> bool:
        return self.view[0]

    @property
    def delivery_count(self) -> int:
        return self.view[1]

    async def settle(self, how: Settlement) -> bool:
        if self._settled:
            return self._outcome
        self._settled = True
        if not self._session.open:
            self._outcome = False
            return False
        self._session.discard(self)
        self.source.released(self._session)
        if how is Settlement.REQUEUE:
            self.source.give_back([self.stored])
        elif how is Settlement.REJECT:
            self.source.kill(self.stored)
        if self._on_settled is not None:
            self._on_settled()
        return True


class MemorySubscription:
    """
    `Subscription` in the same process.

    Args:
        queue: Name of the queue.
        handler: See `Broker.consume`.
        prefetch: Most unsettled deliveries.
        on_cancelled: Nobody wants it any more.
    """

    def __init__(
        self,
        queue: str,
        handler: DeliveryHandler,
        *,
        prefetch: int,
        on_cancelled: Callable[["MemorySubscription"], None],
    ) -> None:
        if prefetch < 1:
            raise ValueError("prefetch must be at least 1")
        self.queue = queue
        self._handler = handler
        self._prefetch = prefetch
        self._on_cancelled = on_cancelled
        self._source: MemoryQueue | None = None
        self._session = MemorySession()
        self._unsettled = 0
        self._tasks = OwnedTasks()

    @property
    def has_credit(self) -> bool:
        return self._session.open and self._unsettled < self._prefetch

    def push(self, stored: StoredMessage) -> None:
        if self._source is None:
            return
        self._unsettled += 1
        source, session = self._source, self._session

        def settled() -> None:
            if session is self._session:
                self._unsettled -= 1
                source.run()

        delivery = MemoryDelivery(source, stored, session, on_settled=settled)
        self._tasks.spawn(self._handle(delivery), name=f"handle {self.queue}")

    def attach(self, source: MemoryQueue, session: MemorySession) -> None:
        """Begin to consume, or begin again on a new session."""
        self._source, self._session, self._unsettled = source, session, 0
        source.attach(self)

    def detach(self) -> None:
        """Stop deliveries; those made stay unsettled."""
        source, self._source = self._source, None
        if source is not None:
            source.detach(self)

    async def cancel(self) -> None:
        self._on_cancelled(self)
        self.detach()
        await self._tasks.wait()

    async def close(self) -> None:
        """End handlers."""
        self.detach()
        await self._tasks.cancel()

    async def _handle(self, delivery: MemoryDelivery) -> None:
        try:
            await self._handler(delivery)
        except Exception:  # a handler that breaks its promise must not stop the others
            log.exception("handler.raised", queue=self.queue, kind=delivery.kind)
