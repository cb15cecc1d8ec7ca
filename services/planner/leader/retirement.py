"""Retirement of work queues that have been empty and unused for a while."""

from dataclasses import dataclass, field

import structlog

from shared.broker import topology
from shared.broker.protocol import Broker, OutMessage
from shared.broker.queue_list import rewriting
from shared.broker.retry import send_best_effort
from shared.broker.work_queues import WorkQueues
from shared.contracts.base import Seconds, UnixTime
from shared.contracts.control import QueuesRetired, QueuesRetiring
from solver.planning.problem.queue_counts import QueueCounts

log = structlog.get_logger()
QUEUES_AT_ONCE = 32
SETTLE_S: Seconds = 2.0
"""
Time after the retirement notice before any queue is deleted; a process that has just started
reports during this time.
"""
PATIENCE_S: Seconds = 10.0
"""
Time after the retirement notice at which the leader keeps the queues that a process has not
released.
"""


@dataclass(frozen=True, slots=True)
class _Publisher:
    at: UnixTime
    released: frozenset[str]


@dataclass(slots=True)
class Retirement:
    """
    Deletes idle work queues in rounds, each of which takes a few seconds.

    A round begins with a notice that names the queues to delete. A queue is deleted only under four
    conditions. Its totals have not changed for `idle_s`. All processes that publish to queues have
    released it since the notice. The broker counts neither ready messages nor consumers in it; a
    client that holds unsettled messages counts as a consumer. This process has held the lock of the
    queue since the notice (`WorkQueues`).

    A process that has been silent for `idle_s` counts as gone.
    """

    broker: Broker
    queues: WorkQueues
    idle_s: Seconds
    _publishers: dict[str, _Publisher] = field(default_factory=dict)
    _retiring: set[str] = field(default_factory=set)
    """Queues whose retirement lock this process holds."""
    _began_at: UnixTime = 0.0

    def reported(self, source: str, released: tuple[str, ...], now: UnixTime) -> None:
        """Process a report of a process that publishes to queues."""
        self._publishers[source] = _Publisher(now, frozenset(released))

    async def work(self, counts: QueueCounts, now: UnixTime) -> None:
        """Begin a retirement round, or continue the current round."""
        self._publishers = {
            source: publisher
            for source, publisher in self._publishers.items()
            if now - publisher.at <= self.idle_s
        }
        if not self._retiring:
            await self._begin(counts, now)
            return
        used = {queue for queue in self._retiring if not self._is_idle(queue, counts)}
        await self._keep(used, counts, now)
        if now - self._began_at >= SETTLE_S:
            await self._delete(counts, now)
        if now - self._began_at >= PATIENCE_S:
            await self._keep(set(self._retiring), counts, now)

    async def keep(self, queue: str, counts: QueueCounts, now: UnixTime) -> None:
        """End the retirement of *queue*, if it has begun: this process has a request for it."""
        if queue in self._retiring:
            await self._keep({queue}, counts, now)

    async def abandon(self) -> None:
        """
        Release the locks of the current retirement round; another leader may repeat the round.
        """
        for queue in tuple(self._retiring):
            self._retiring.discard(queue)
            await self.queues.unlock(queue)

    async def _begin(self, counts: QueueCounts, now: UnixTime) -> None:
        idle = sorted(
            queue
            for queue in counts.queues
            if (since := counts.idle_since(queue)) is not None and now - since >= self.idle_s
        )
        self._began_at = now
        for queue in idle[:QUEUES_AT_ONCE]:
            if await self.queues.lock(queue):
                self._retiring.add(queue)
        if self._retiring:
            await self._send(QueuesRetiring(queues=tuple(sorted(self._retiring))))

    def _is_idle(self, queue: str, counts: QueueCounts) -> bool:
        since = counts.idle_since(queue)
        return since is not None and since < self._began_at

    async def _delete(self, counts: QueueCounts, now: UnixTime) -> None:
        """Delete the queues that all processes have released, and remove them from the list."""
        released = [queue for queue in sorted(self._retiring) if self._is_released(queue)]
        if not released:
            return
        deleted, used = set[str](), set[str]()
        async with rewriting(self.broker) as listed:
            for queue in released:
                depth = await self.broker.depth(queue)
                # Do not delete: unsettled messages would be lost with the queue if their consumer
                # died.
                if depth is not None and (depth.ready or depth.consumers):
                    used.add(queue)
                elif self._is_idle(queue, counts):
                    await self.broker.delete_queue(queue)
                    deleted.add(queue)
            listed.queues -= deleted
        await self._keep(used, counts, now)
        for queue in sorted(deleted):
            counts.removed(queue)
            self._retiring.discard(queue)
            await self.queues.unlock(queue)
        if deleted:
            await self._send(QueuesRetired(deleted=tuple(sorted(deleted))))
            log.info("queues.retired", queues=sorted(deleted))

    def _is_released(self, queue: str) -> bool:
        """Return whether each process has released *queue* since the retirement notice."""
        return queue in self.queues.released and all(
            publisher.at > self._began_at and queue in publisher.released
            for publisher in self._publishers.values()
        )

    async def _keep(self, queues: set[str], counts: QueueCounts, now: UnixTime) -> None:
        """
        End the retirement of *queues* without deleting them; they retire again after `idle_s`
        without use.
        """
        for queue in sorted(queues):
            counts.noticed(queue, now)
            self._retiring.discard(queue)
            await self.queues.unlock(queue)
        if queues:
            await self._send(QueuesRetired(kept=tuple(sorted(queues))))

    async def _send(self, message: QueuesRetiring | QueuesRetired) -> None:
        out = OutMessage.transient(message)
        await send_best_effort(self.broker, topology.CONTROL, topology.CONTROL_RETIREMENT, out)
