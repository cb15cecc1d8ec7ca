"""Dead-letter replies: error finals for messages that the broker itself has dead-lettered."""

from collections.abc import Callable

import structlog

from services.planner.grouper.expiry import Expiry, never_grouped_error, place_of
from services.planner.grouper.identities import request_id_of
from services.planner.state import GrouperState
from shared.broker import topology
from shared.broker.dead_letters import last_death
from shared.broker.finals import publish_final, stored_for
from shared.broker.protocol import Broker, Delivery, Settlement
from shared.contracts.base import Decoder, TenantId
from shared.contracts.errors import ContractError, TransientError
from shared.contracts.lanes import is_inbox
from shared.contracts.requests import ErrorInfo, QueuedRequest, RequestFailed
from shared.contracts.stories.story import ended, story_of
from shared.runtime.clock import Clock
from shared.runtime.metrics import OTHER

log = structlog.get_logger()
_decode_queued: Decoder[QueuedRequest] = Decoder(QueuedRequest)
_EXPIRED = "expired"
_CAUSES = {
    "delivery_limit": f"it was delivered more than {topology.DELIVERY_LIMIT} times without an "
    "outcome, because the processes that held it ended",
    "maxlen": "a policy of the broker limits the length of the queue",
    "rejected": "a service could not process it; the service's log has the error",
}
"""The broker's reason for a dead letter -> what it means here."""
MESH_REASONS = (
    *("poison_request", "internal_error", "internal", "undecodable", "server_error"),
    *("delivery_limit", "maxlen", "rejected"),
)
"""Reasons of dead letters whose cause is in the mesh, its engines or its broker."""
PRODUCER_REASONS = (
    *("invalid_request", "unsupported_parameter", "slo_impossible", "context_length_exceeded"),
    *("model_not_found", "model_not_ready", "body_too_large", "message_too_large"),
    *("over_capacity", "rate_limit_exceeded", "insufficient_quota", "target_not_allowed"),
    *("id_conflict", "store_not_configured", "unsupported_task", "too_many_inputs"),
    *("engine_refused", "deadline_expired", _EXPIRED),
)
"""Reasons of dead letters whose cause is in the requests, or in limits that refuse them."""
DEAD_LETTER_REASONS = (*MESH_REASONS, *PRODUCER_REASONS, OTHER)
"""
All reasons in metrics. The counts of all of them are exported from the start: Prometheus does not
see the first event of a series that begins with it.
"""


def reason_of(delivery: Delivery) -> str:
    """The reason of a dead letter in metrics: the code before the text, or the broker's reason."""
    text = delivery.headers.get(topology.REASON_HEADER) or last_death(delivery.headers).reason
    code = str(text).partition(":")[0]
    return code if code in DEAD_LETTER_REASONS else OTHER


class DeadLetterReplies:
    """
    Sends error finals for messages that the broker dead-letters from global queues and lanes, and
    counts all dead letters by reason.

    A service that dead-letters a message sends the error final itself. Several groupers can consume
    concurrently. A message that has reached its end ends as all requests do.

    Args:
        broker: The broker.
        clock: Wall time.
        state: State of the grouper.
        expiry: Ends requests at their ends.
        stored_tenant: Tenant of a message that was never grouped, if the store keeps its final.
    """

    def __init__(
        self,
        *,
        broker: Broker,
        clock: Clock,
        state: GrouperState,
        expiry: Expiry,
        stored_tenant: Callable[[Delivery], TenantId | None] = lambda _delivery: None,
    ) -> None:
        self._broker = broker
        self._clock = clock
        self._state = state
        self._expiry = expiry
        self._stored_tenant = stored_tenant

    async def on_dead_letter(self, delivery: Delivery) -> None:
        """
        Count the dead letter, and send an error final if the broker dead-lettered the message and
        the message has a reply queue.
        """
        try:
            if topology.REASON_HEADER not in delivery.headers:
                await self._reply(delivery)
        except TransientError:
            await delivery.settle(Settlement.REQUEUE)
            return
        except Exception:  # a bug affects only this reply: the dead letter remains for operators
            log.exception("dead_letter.unreadable")
            await delivery.settle(Settlement.REJECT)
        else:
            await delivery.settle(Settlement.ACK)
        self._state.dead_letters[reason_of(delivery)] += 1

    async def _reply(self, delivery: Delivery) -> None:
        reason = last_death(delivery.headers).reason
        if reason == _EXPIRED:
            await self._expired(delivery)
        else:
            cause = f": {_CAUSES[reason]}" if reason in _CAUSES else ""
            error = ErrorInfo(
                message=f"the broker dead-lettered the request: {reason}{cause}",
                type="server_error",
                code="dead_lettered",
                status=500,
            )
            await self._send(delivery, error)

    async def _expired(self, delivery: Delivery) -> None:
        """Count and end a request that the broker has dropped at its end."""
        queue = last_death(delivery.headers).queue
        try:
            request = _decode_queued(delivery.body)
        except ContractError:
            self._state.expired[place_of(queue)] += 1
            error = never_grouped_error(queue)
            await self._send(delivery, error)
            return
        if not is_inbox(queue):  # the leader does not count requests in inboxes
            self._state.dropped[queue] += 1
        await self._expiry.end_dead_letter(request, queue)

    async def _send(self, delivery: Delivery, error: ErrorInfo) -> None:
        request = None
        try:
            request = _decode_queued(delivery.body)
        except ContractError:
            request_id, tenant = request_id_of(delivery), self._stored_tenant(delivery)
        else:
            request_id, tenant = request.request_id, stored_for(request)
        failed = RequestFailed(request_id=request_id, error=error, at=self._clock.now())
        await publish_final(self._broker, failed, reply_to=delivery.reply_to, stored_for=tenant)
        if request is not None:
            self._state.missed(request.slo.qos_class, request.tenant)
            if (stories := self._expiry.stories) is not None:
                stories.ended(ended(story_of(request), outcome=error.code, at=failed.at))
