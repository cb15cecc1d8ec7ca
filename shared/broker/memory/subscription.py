"""Sessions and consumers of the in-process broker."""

from collections.abc import Callable
from dataclasses import dataclass

from shared.broker.protocol import Delivery, DeliveryHandler
from shared.broker.tasks import OwnedTasks


@dataclass(slots=True, eq=False)
class MemorySession:
    """One session of a client: the time from a connect to a disconnect."""

    open: bool


class MemorySubscription:
    """
    `Subscription` of the in-process broker.

    Args:
        queue: Name of the queue.
        handler: See `Broker.consume`.
        prefetch: Maximum number of unsettled deliveries.
        on_broken: See `Broker.consume`.
        on_cancelled: Called when the owner has cancelled the subscription; stops deliveries.
    """

    def __init__(
        self,
        queue: str,
        handler: DeliveryHandler,
        *,
        prefetch: int,
        on_broken: Callable[[], None],
        on_cancelled: Callable[["MemorySubscription"], None],
    ) -> None:
        if prefetch < 1:
            raise ValueError("prefetch must be at least 1")
        self.queue = queue
        self.on_broken = on_broken
        self.session = MemorySession(open=False)
        self.unsettled = 0
        self._handler = handler
        self._prefetch = prefetch
        self._on_cancelled = on_cancelled
        self._tasks = OwnedTasks()

    @property
    def has_credit(self) -> bool:
        """True if the prefetch allows one more unsettled delivery to this consumer."""
        return self.unsettled < self._prefetch

    def push(self, delivery: Delivery) -> None:
        self.unsettled += 1
        self._tasks.handle(delivery, self._handler)

    async def cancel(self) -> None:
        self._on_cancelled(self)
        await self._tasks.wait()

    async def close(self) -> None:
        """Cancel running handlers of the subscription."""
        await self._tasks.cancel()
