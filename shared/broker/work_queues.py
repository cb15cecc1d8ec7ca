"""
Publishing to work queues, which are created when they are needed and retired when they are idle.

The leader deletes a queue only while it holds the queue's lock and every process that publishes to
work queues has released the queue: it has no publish to the queue in progress, and must take the
lock before its next one. So no message can be on its way to a queue that is being deleted.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

import structlog

from shared.broker import topology
from shared.broker.lane_notify import notify_nonempty
from shared.broker.protocol import Broker, OutMessage, PublishOutcome
from shared.broker.queue_list import list_queue
from shared.broker.retry import publish_until_confirmed, until_available
from shared.contracts.base import Seconds
from shared.contracts.errors import BrokerAccessError, BrokerConflictError, MeshError

log = structlog.get_logger()
LOCK_RETRY_S: Seconds = 0.05


class WorkQueues:
    """
    The work queues to which one process publishes.

    Args:
        broker: Broker with the queues.
        source: Unique name of the process in notices and reports.
    """

    def __init__(self, broker: Broker, source: str) -> None:
        self.source = source
        self.put: Counter[str] = Counter()
        """
        Queue -> number of requests that this process has published to the queue; the number only
        rises.
        """
        self._broker = broker
        self._declared: set[str] = set()
        self._entering: Counter[str] = Counter()
        """Queue -> number of publishes to the queue in progress."""
        self._creating: dict[str, asyncio.Lock] = {}
        self._released: set[str] = set()

    async def publish(self, queue: str, message: OutMessage) -> PublishOutcome:
        """
        Publish until the broker answers; create *queue* if it does not exist.

        Returns:
            The broker's answer; `UNROUTABLE` only if the queue is deleted again and again.

        Raises:
            BrokerConflictError: The queue exists with other properties, or the user may not
                create it.
        """
        with self._entry(queue):
            outcome = PublishOutcome.UNROUTABLE
            if queue in self._declared:
                outcome = await publish_until_confirmed(
                    self._broker, topology.LANES, queue, message
                )
            if outcome is PublishOutcome.UNROUTABLE:
                self._declared.discard(queue)
                async with self._lock(queue):
                    await until_available(lambda: topology.declare_work_queue(self._broker, queue))
                    await list_queue(self._broker, queue)
                    outcome = await publish_until_confirmed(
                        self._broker, topology.LANES, queue, message
                    )
            if outcome is PublishOutcome.CONFIRMED:
                self._declared.add(queue)
                self.put[queue] += 1
            return outcome

    async def notify(self, queue: str) -> None:
        """Notify agents and the leader that *queue* got requests."""
        await notify_nonempty(self._broker, queue, source=self.source, put=self.put[queue])

    async def lock(self, queue: str) -> bool:
        """
        Take the lock of *queue* for its retirement, unless *queue* is in use; return whether the
        lock is held.
        """
        lock = self._creating.setdefault(queue, asyncio.Lock())
        if lock.locked() or self._entering[queue]:
            return False
        await lock.acquire()
        taken = False
        try:
            taken = await lock_work_queue(self._broker, queue)
        finally:
            if not taken:
                lock.release()
        self.release((queue,))
        return taken

    async def unlock(self, queue: str) -> None:
        """Release the lock of *queue* after its retirement."""
        self.forget((queue,))
        await unlock_work_queue(self._broker, queue)
        self._creating[queue].release()

    def release(self, queues: tuple[str, ...]) -> None:
        """Release those of *queues* to which no publish is in progress."""
        for queue in queues:
            if not self._entering[queue]:
                self._declared.discard(queue)
                self._released.add(queue)

    def forget(self, queues: tuple[str, ...]) -> None:
        """End the retirement of *queues*: the queues were deleted or are kept."""
        self._released.difference_update(queues)

    @property
    def released(self) -> tuple[str, ...]:
        """Queues that the leader may delete as far as this process is concerned."""
        return tuple(sorted(self._released))

    @contextmanager
    def _entry(self, queue: str) -> Iterator[None]:
        self._entering[queue] += 1
        self._released.discard(queue)
        try:
            yield
        finally:
            self._entering[queue] -= 1
            if not self._entering[queue]:
                del self._entering[queue]

    @asynccontextmanager
    async def _lock(self, queue: str) -> AsyncIterator[None]:
        """Take the lock of *queue*; a retirement of the queue that is in progress ends."""
        lock = self._creating.setdefault(queue, asyncio.Lock())
        if lock.locked():
            # If this process retires the queue, its leader keeps the queue at this notice.
            await notify_nonempty(self._broker, queue)
        async with lock:
            await until_available(lambda: self._acquire(queue))
            try:
                yield
            finally:
                await unlock_work_queue(self._broker, queue)

    async def _acquire(self, queue: str) -> None:
        while not await lock_work_queue(self._broker, queue):
            # The leader that retires the queue keeps the queue when it gets the notice.
            await notify_nonempty(self._broker, queue)
            await asyncio.sleep(LOCK_RETRY_S)


async def lock_work_queue(broker: Broker, queue: str) -> bool:
    """
    Take the lock of *queue*, which ends with the connection; return False if another process has
    the lock.

    Raises:
        BrokerUnavailableError: The broker is unavailable.
        BrokerAccessError: The user may not lock queues; import `ops/rabbitmq/definitions.json`.
    """
    try:
        await broker.declare_queue(topology.lock_of(queue))
    except BrokerAccessError:
        raise
    except BrokerConflictError:
        return False
    return True


async def unlock_work_queue(broker: Broker, queue: str) -> None:
    """Release the lock of *queue*."""
    try:
        await broker.delete_queue(topology.lock_of(queue).name)
    except MeshError as error:  # the lock ends with the connection
        log.warning("queue.unlock_failed", queue=queue, error=str(error))
