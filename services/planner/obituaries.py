"""What the broker itself has buried: its producers are told."""

import structlog

from services.planner.intake import request_id_of
from services.planner.refusals import send_failure
from shared.broker import topology
from shared.broker.protocol import Broker, Delivery, Settlement
from shared.contracts.base import Decoder, RequestId
from shared.contracts.errors import ContractError, TransientError
from shared.contracts.requests import ErrorInfo, QueuedRequest
from shared.runtime.clock import Clock

log = structlog.get_logger()
_decode_queued: Decoder[QueuedRequest] = Decoder(QueuedRequest)


class Obituaries:
    """
    Answers for dead letters of global queues and lanes; services answer for what they bury.

    Any number compete.

    Args:
        broker: Its connection.
        clock: Wall time.
    """

    def __init__(self, *, broker: Broker, clock: Clock) -> None:
        self._broker = broker
        self._clock = clock

    async def on_obituary(self, delivery: Delivery) -> None:
        """Tell the producer, if the broker has buried it and the producer listens."""
        try:
            if topology.REASON_HEADER not in delivery.headers and delivery.reply_to:
                await self._tell(delivery, delivery.reply_to)
        except TransientError:
            await delivery.settle(Settlement.REQUEUE)
        except Exception:  # any bug loses one obituary only: people still have the dead letter
            log.exception("obituary.broken")
            await delivery.settle(Settlement.REJECT)
        else:
            await delivery.settle(Settlement.ACK)

    async def _tell(self, delivery: Delivery, reply_to: str) -> None:
        reason = delivery.headers.get("x-first-death-reason", "unknown")
        await send_failure(
            self._broker,
            reply_to=reply_to,
            request_id=_buried_id(delivery),
            error=ErrorInfo(
                message=f"the broker gave the request up: {reason}",
                type="server_error",
                code="dead_lettered",
                status=500,
            ),
            now=self._clock.now(),
        )


def _buried_id(delivery: Delivery) -> RequestId:
    try:
        return _decode_queued(delivery.body).request_id
    except ContractError:
        return request_id_of(delivery)
