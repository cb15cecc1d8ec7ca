"""
Publishing to work queues, which are created when they are needed and retired when they are idle.

The leader deletes a queue only while it holds the queue's lock and every process that publishes to
work queues has released the queue. A process that has released a queue has no publish to it in
progress, and takes the lock before its next publish to it. So no message can be on its way to a
queue that is being deleted.
"""

import asyncio
import math
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import replace

import structlog

from shared.broker import topology
from shared.broker.protocol import LARGE_BYTES, Broker, OutMessage, PublishOutcome
from shared.broker.queue_list import list_queue
from shared.broker.retry import publish_until_confirmed, until_available
from shared.broker.tasks import OwnedTasks
from shared.contracts.base import Seconds, UnixTime, encode, tag_of
from shared.contracts.control import LaneNonempty
from shared.contracts.ends import expiration_s
from shared.contracts.errors import (
    BrokerAccessError,
    BrokerConflictError,
    BrokerUnavailableError,
    MeshError,
)
from shared.contracts.requests import QueuedRequest

log = structlog.get_logger()
LOCK_RETRY_S: Seconds = 0.05
_SLOW_CONFIRM_S: Seconds = 0.04
"""Time to a confirm from which a request may have reached its queue after its notice."""
NOTICE_SPACING_S: Seconds = 0.01
"""
Least time between two notices about one queue. A pull takes a few milliseconds, and an instance
that finds a request asks the queue again anyway.
"""


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
        Queue -> number of requests that this process has published to the queue, or publishes now.
        The number falls only by requests that the broker did not take.
        """
        self._broker = broker
        self._declared: set[str] = set()
        self._entering: Counter[str] = Counter()
        """Queue -> number of publishes to the queue in progress."""
        self._creating: dict[str, asyncio.Lock] = {}
        self._released: set[str] = set()
        self._noticed_at: dict[str, Seconds] = {}
        """Queue -> time of its last notice, on the clock of the event loop."""
        self._owed: set[str] = set()
        """Queues with a notice that waits for its time."""
        self._tasks = OwnedTasks()

    async def publish(self, queue: str, message: OutMessage) -> PublishOutcome:
        """
        Publish until the broker answers, and notify agents and the leader; create *queue* if it
        does not exist.

        Returns:
            The broker's answer; `UNROUTABLE` only if the queue was deleted again during the call.

        Raises:
            BrokerConflictError: The queue exists with other properties, or the user may not create
                it.
        """
        with self._entry(queue):
            outcome = PublishOutcome.UNROUTABLE
            if queue in self._declared:
                outcome = await self._publish_noticed(queue, message)
            if outcome is PublishOutcome.UNROUTABLE:
                self._declared.discard(queue)
                async with self._lock(queue):
                    await until_available(lambda: topology.declare_work_queue(self._broker, queue))
                    await list_queue(self._broker, queue)
                    outcome = await self._publish(queue, message)
                await self.notify(queue)
            if outcome is PublishOutcome.CONFIRMED:
                self._declared.add(queue)
            return outcome

    async def notify(self, queue: str) -> None:
        """
        Notify agents and the leader that *queue* got requests, at most once per
        `NOTICE_SPACING_S`; a notice that comes too soon is sent later.
        """
        now = asyncio.get_running_loop().time()
        if now - self._noticed_at.get(queue, -math.inf) >= NOTICE_SPACING_S:
            await self._notify(queue)
        elif queue not in self._owed:
            self._owed.add(queue)
            self._tasks.spawn(self._notify_later(queue), name=f"notice {queue}")

    async def close(self) -> None:
        """Send the notices that wait for their time."""
        await self._tasks.wait()

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
        """Queues that this process has released, so that the leader may delete them."""
        return tuple(sorted(self._released))

    async def _publish_noticed(self, queue: str, message: OutMessage) -> PublishOutcome:
        """
        Publish to a queue that exists, and notify agents meanwhile.

        The broker routes the messages of a channel in order, and a queue executes a pull after the
        publishes before it: agents that have the notice find the request, and need not wait until
        the broker has stored it. Where that is not certain, a notice follows the confirm: a large
        message has a channel of its own, and a confirm that took long may be of another attempt.
        """
        if len(message.body) >= LARGE_BYTES:
            outcome = await self._publish(queue, message)
            await self.notify(queue)
            return outcome
        loop = asyncio.get_running_loop()
        begun_at = loop.time()
        outcome, _ = await asyncio.gather(self._publish(queue, message), self.notify(queue))
        if loop.time() - begun_at > _SLOW_CONFIRM_S:
            await self.notify(queue)
        return outcome

    async def _publish(self, queue: str, message: OutMessage) -> PublishOutcome:
        """Publish until the broker answers, and count the request from the begin."""
        self.put[queue] += 1
        outcome = None
        try:
            outcome = await publish_until_confirmed(self._broker, topology.LANES, queue, message)
        finally:
            if outcome is not PublishOutcome.CONFIRMED:
                self.put[queue] -= 1
        return outcome

    async def _notify_later(self, queue: str) -> None:
        await asyncio.sleep(NOTICE_SPACING_S)
        self._owed.discard(queue)
        await self._notify(queue)

    async def _notify(self, queue: str) -> None:
        now = asyncio.get_running_loop().time()
        # Those that delay no notice any more are forgotten.
        recent = self._noticed_at.items()
        self._noticed_at = {each: at for each, at in recent if now - at < NOTICE_SPACING_S}
        self._noticed_at[queue] = now
        await _notify_nonempty(self._broker, queue, source=self.source, put=self.put[queue])

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
        """
        Context with the lock of *queue*; if the queue is being retired, the retirement ends first.
        """
        lock = self._creating.setdefault(queue, asyncio.Lock())
        if lock.locked():
            # The leader in this process may hold the lock to retire the queue; the notice makes it
            # keep the queue.
            await _notify_nonempty(self._broker, queue)
        async with lock:
            await until_available(lambda: self._acquire(queue))
            try:
                yield
            finally:
                await unlock_work_queue(self._broker, queue)

    async def _acquire(self, queue: str) -> None:
        while not await lock_work_queue(self._broker, queue):
            # Another process's leader may be retiring the queue; the notice makes it keep the
            # queue.
            await _notify_nonempty(self._broker, queue)
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


async def _notify_nonempty(broker: Broker, queue: str, *, source: str = "", put: int = 0) -> None:
    """
    Notify agents and the leader that *queue* is not empty. If the notice is lost, the polls of
    agents and the audits of the leader detect the messages later.

    Args:
        broker: Broker that carries the notice.
        queue: Queue that got requests.
        source: Publisher of the requests, as in its reports; empty before they are published.
        put: Number of requests that *source* has published to *queue* since its start.
    """
    notice = OutMessage.transient(LaneNonempty(queue=queue, source=source, put=put))
    # On the channel of the requests, so that the notice follows its request.
    with suppress(BrokerUnavailableError):
        await broker.publish(topology.CONTROL, topology.CONTROL_LANE, notice)


def queued_message(request: QueuedRequest, now: UnixTime) -> OutMessage:
    """The message that puts *request* into a work queue at *now*, where it lasts to its end."""
    return replace(stored_message(request), expiration_s=expiration_s(request, now))


def stored_message(request: QueuedRequest) -> OutMessage:
    """The message with *request*, without an end: for delay queues and dead letters."""
    return OutMessage(
        body=encode(request),
        kind=tag_of(QueuedRequest),
        message_id=request.request_id,
        correlation_id=request.request_id,
        reply_to=request.reply_to,
    )
