"""
Handling of lost instances' inboxes: their requests return to lanes, then the inboxes are deleted.
"""

import math
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field

import msgspec
import structlog
from cachetools import FIFOCache

from shared.broker import topology
from shared.broker.protocol import Broker, Delivery, PublishOutcome, Settlement
from shared.broker.work_queues import WorkQueues, queued_message
from shared.contracts.base import Decoder, UnixTime
from shared.contracts.errors import ContractError, QueueNotFoundError, TransientError
from shared.contracts.lanes import LaneKey, inbox_name
from shared.contracts.requests import QueuedRequest

log = structlog.get_logger()
GRACE_S = 120.0
"""
Time for which an inbox is kept after the loss of its instance.

With heartbeats of 10 s the broker closes a dead connection after about 30 s.
"""
_decode: Decoder[QueuedRequest] = Decoder(QueuedRequest)


@dataclass(slots=True)
class InboxClaims:
    """
    Empties and deletes the inboxes of lost instances.

    Deleting a queue drops all its messages, including unacknowledged ones. The inbox is therefore
    unbound first, so that no more requests can be routed to it, and then drained. It is deleted
    after `GRACE_S`: by then the broker has closed the connection of a stalled owner and requeued
    its deliveries. An owner that is alive and holds requests keeps the inbox.

    Args:
        keep: Ends the retirement of a queue that gets a request: the leader of this process may
            hold its lock, and would wait for itself.
    """

    broker: Broker
    queues: WorkQueues
    keep: Callable[[str], Awaitable[None]]
    _lost: dict[str, UnixTime] = field(default_factory=dict)
    """Lost instance -> time at which the instance was lost."""
    _deleted: FIFOCache[str, UnixTime] = field(default_factory=lambda: FIFOCache(1024))
    """Lost instance -> time at which its inbox was found to be absent."""

    def used(self, instance_id: str, at: UnixTime, now: UnixTime) -> None:
        """Record that a request was published to the inbox of an absent instance."""
        if at > self._deleted.get(instance_id, -math.inf):
            self.add(instance_id, now)

    def add(self, instance_id: str, now: UnixTime) -> None:
        """Record that *instance_id* was lost."""
        self._lost.setdefault(instance_id, now)

    def listed(self, instance_id: str, now: UnixTime) -> None:
        """Record that the list of work queues has the inbox of an absent instance."""
        if instance_id not in self._deleted:
            self.add(instance_id, now)

    def returned(self, instance_id: str) -> None:
        """Record that *instance_id* has returned; the instance declares its inbox itself."""
        self._lost.pop(instance_id, None)
        self._deleted.pop(instance_id, None)

    def restart_grace(self, now: UnixTime) -> None:
        """
        Restart all grace periods, and forget which inboxes were deleted.

        Instances may have returned and left while another process was the leader.
        """
        self._lost = dict.fromkeys(self._lost, now)
        self._deleted.clear()

    @property
    def lost(self) -> tuple[str, ...]:
        """Lost instances whose inboxes may still exist."""
        return tuple(self._lost)

    async def work(self, now: UnixTime) -> None:
        """Process the existing inboxes of lost instances once."""
        for instance_id, lost_at in tuple(self._lost.items()):
            queue = inbox_name(instance_id)
            if await self.broker.depth(queue) is None:
                self._end(instance_id, now)
                continue
            await topology.close_work_queue(self.broker, queue)
            await self._drain(queue, now)
            if now - lost_at >= GRACE_S and not await self._is_held(queue):
                await self.broker.delete_queue(queue)
                self._end(instance_id, now)
                log.info("inbox.deleted", instance_id=instance_id)

    def _end(self, instance_id: str, now: UnixTime) -> None:
        del self._lost[instance_id]
        self._deleted[instance_id] = now

    async def _is_held(self, queue: str) -> bool:
        """Return whether the queue has messages, or a client holds unsettled ones."""
        depth = await self.broker.depth(queue)
        return depth is not None and bool(depth.ready or depth.consumers)

    async def _drain(self, queue: str, now: UnixTime) -> None:
        with suppress(QueueNotFoundError):  # another leader has deleted the inbox
            while (delivery := await self.broker.get(queue)) is not None:
                await self._return(delivery, now)

    async def _return(self, delivery: Delivery, now: UnixTime) -> None:
        """Return one request to its lane's resume queue, which agents serve before the lane."""
        try:
            request = _decode(delivery.body)
            resume = LaneKey.parse(request.lane).resume_name
        except ContractError:
            await delivery.settle(Settlement.REJECT)
            return
        attempts = msgspec.structs.replace(request.attempts, hop=request.attempts.hop + 1)
        message = queued_message(msgspec.structs.replace(request, attempts=attempts), now)
        await self.keep(resume)
        outcome = await self.queues.publish(resume, message)
        if outcome is not PublishOutcome.CONFIRMED:
            await delivery.settle(Settlement.REQUEUE)
            raise TransientError(f"{resume} did not accept the request: {outcome.value}")
        await delivery.settle(Settlement.ACK)
