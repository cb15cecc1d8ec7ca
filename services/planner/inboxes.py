"""Inboxes of instances that have gone: their requests go back to lanes, then they go, too."""

from contextlib import suppress
from dataclasses import dataclass, field

import msgspec
import structlog

from services.planner.queued import queued_message
from shared.broker import topology
from shared.broker.notices import tell_nonempty
from shared.broker.protocol import Broker, Delivery, PublishOutcome, Settlement
from shared.broker.retry import publish_until_confirmed
from shared.contracts.base import Decoder, UnixTime
from shared.contracts.errors import ContractError, QueueNotFoundError, TransientError
from shared.contracts.lanes import LaneKey, inbox_name
from shared.contracts.requests import QueuedRequest

log = structlog.get_logger()
GRACE_S = 120.0
"""Heartbeats of 10 s close a silent connection after about 30 s."""
_decode: Decoder[QueuedRequest] = Decoder(QueuedRequest)


@dataclass(slots=True)
class InboxClaims:
    """
    Empties and deletes the inboxes of lost instances.

    Deleting a queue drops what is in it, delivered or not. So an inbox is unbound first, which
    makes routed publishes unroutable; then drained; and deleted only after a time in which the
    broker has surely closed a frozen owner's connection and taken back what that held.
    """

    broker: Broker
    _lost: dict[str, UnixTime] = field(default_factory=dict)
    """Instance -> since when it is given up."""

    def add(self, instance_id: str, now: UnixTime) -> None:
        """*instance_id* has been silent for too long."""
        self._lost.setdefault(instance_id, now)

    def returned(self, instance_id: str) -> None:
        """*instance_id* speaks again; it declares its inbox itself."""
        self._lost.pop(instance_id, None)

    def begin_anew(self, now: UnixTime) -> None:
        """They may have come back, and gone again, while another led: their grace starts over."""
        self._lost = dict.fromkeys(self._lost, now)

    @property
    def lost(self) -> tuple[str, ...]:
        """Instances whose inboxes may still be there."""
        return tuple(self._lost)

    async def work(self, now: UnixTime) -> None:
        """One pass over the inboxes that are left."""
        for instance_id, lost_at in tuple(self._lost.items()):
            queue = inbox_name(instance_id)
            if await self.broker.depth(queue) is None:
                self.returned(instance_id)
                continue
            await topology.close_work_queue(self.broker, queue)
            await self._drain(queue)
            if now - lost_at >= GRACE_S:
                await self.broker.delete_queue(queue)
                self.returned(instance_id)
                log.info("inbox.deleted", instance_id=instance_id)

    async def _drain(self, queue: str) -> None:
        with suppress(QueueNotFoundError):  # another leader has deleted it
            while (delivery := await self.broker.get(queue)) is not None:
                await self._return(delivery)

    async def _return(self, delivery: Delivery) -> None:
        """Put one request ahead of its lane."""
        try:
            request = _decode(delivery.body)
            resume = LaneKey.parse(request.lane).resume_name
        except ContractError:
            await delivery.settle(Settlement.REJECT)
            return
        attempts = msgspec.structs.replace(request.attempts, hop=request.attempts.hop + 1)
        await topology.declare_work_queue(self.broker, resume)
        message = queued_message(msgspec.structs.replace(request, attempts=attempts))
        outcome = await publish_until_confirmed(self.broker, topology.LANES, resume, message)
        if outcome is not PublishOutcome.CONFIRMED:
            await delivery.settle(Settlement.REQUEUE)
            raise TransientError(f"{resume} took nothing: {outcome.value}")
        await delivery.settle(Settlement.ACK)
        await tell_nonempty(self.broker, resume)
