"""Dead-letter replies: error finals for messages that the broker itself has dead-lettered."""

import structlog

from services.planner.grouper.intake import request_id_of
from services.planner.grouper.refusals import send_failure
from shared.broker import topology
from shared.broker.protocol import Broker, Delivery, Settlement
from shared.contracts.base import Decoder, RequestId
from shared.contracts.errors import ContractError, TransientError
from shared.contracts.requests import ErrorInfo, QueuedRequest
from shared.runtime.clock import Clock

log = structlog.get_logger()
_decode_queued: Decoder[QueuedRequest] = Decoder(QueuedRequest)
_CAUSES = {
    "delivery_limit": f"it was delivered more than {topology.DELIVERY_LIMIT} times without an "
    "outcome, because the processes that held it ended",
    "expired": "a policy of the broker limits the age of messages",
    "maxlen": "a policy of the broker limits the length of the queue",
    "rejected": "a service could not process it; the service's log has the error",
}
"""The broker's reason for a dead letter -> what it means here."""


class DeadLetterReplies:
    """
    Sends error finals for messages that the broker dead-letters from global queues and lanes.

    A service that dead-letters a message sends the error final itself. Several groupers can consume
    concurrently.
    """

    def __init__(self, *, broker: Broker, clock: Clock) -> None:
        self._broker = broker
        self._clock = clock

    async def on_dead_letter(self, delivery: Delivery) -> None:
        """
        Send an error final if the broker dead-lettered the message and the message has a reply
        queue.
        """
        try:
            if topology.REASON_HEADER not in delivery.headers and delivery.reply_to:
                await self._reply(delivery, delivery.reply_to)
        except TransientError:
            await delivery.settle(Settlement.REQUEUE)
        except Exception:  # a bug affects only this reply: the dead letter remains for operators
            log.exception("dead_letter.unreadable")
            await delivery.settle(Settlement.REJECT)
        else:
            await delivery.settle(Settlement.ACK)

    async def _reply(self, delivery: Delivery, reply_to: str) -> None:
        reason = str(delivery.headers.get("x-first-death-reason", "unknown"))
        cause = f": {_CAUSES[reason]}" if reason in _CAUSES else ""
        await send_failure(
            self._broker,
            reply_to=reply_to,
            request_id=_request_id_of(delivery),
            error=ErrorInfo(
                message=f"the broker dead-lettered the request: {reason}{cause}",
                type="server_error",
                code="dead_lettered",
                status=500,
            ),
            now=self._clock.now(),
        )


def _request_id_of(delivery: Delivery) -> RequestId:
    try:
        return _decode_queued(delivery.body).request_id
    except ContractError:
        return request_id_of(delivery)
