"""The deliveries that the agent has pulled and not settled."""

from itertools import count

import msgspec
import structlog

from services.agent.departures import Departures
from services.agent.telemetry.request_log import RequestLog
from shared.broker.protocol import Broker, Delivery, Settlement
from shared.contracts.base import Decoder
from shared.contracts.errors import ContractError, MeshError, QueueNotFoundError, TransientError
from shared.contracts.lanes import LaneKey
from shared.contracts.requests import QueuedRequest
from shared.runtime.clock import Clock
from solver.instance import events as ev

log = structlog.get_logger()
_decode: Decoder[QueuedRequest] = Decoder(QueuedRequest)


class Deliveries:
    """
    Pulls from work queues, and settles what was pulled over the present connection.

    The broker takes back all unsettled deliveries of a lost connection.

    Args:
        departures: Moves messages that are not requests to the dead letters.
        request_log: Reports the waits of pulled requests.
    """

    def __init__(
        self,
        *,
        broker: Broker,
        departures: Departures,
        request_log: RequestLog,
        clock: Clock,
    ) -> None:
        self._broker = broker
        self._departures = departures
        self._request_log = request_log
        self._clock = clock
        self._unsettled: dict[ev.Tag, Delivery] = {}
        self._connection = 0
        self._numbers = count()

    def lose(self) -> int:
        """Forget the deliveries of a lost connection; return its number."""
        self._connection += 1
        self._unsettled.clear()
        return self._connection - 1

    async def settle(self, tags: tuple[ev.Tag, ...], how: Settlement) -> None:
        """Settle deliveries; those of a lost connection are void."""
        for tag in tags:
            if (delivery := self._unsettled.pop(tag, None)) is not None:
                await delivery.settle(how)

    async def pull(self, queue: str) -> ev.Delivered | ev.PullEnded:
        """
        Take the first message of a queue; a message that is not a request goes to the dead letters.
        """
        asked_at = self._clock.now()
        try:
            delivery = await self._broker.get(queue)
            if delivery is None:
                outcome = ev.PullOutcome.EMPTY
            elif (request := await self._decoded(delivery)) is None:
                outcome = ev.PullOutcome.DEAD_LETTERED
            elif delivery.has_returned():  # its connection was lost before this was resumed
                outcome = ev.PullOutcome.UNREACHABLE
            else:
                return self._delivered(delivery, request)
        except QueueNotFoundError:
            outcome = ev.PullOutcome.ABSENT
        except TransientError as error:
            log.warning("pull.failed", queue=queue, error=str(error))
            outcome = ev.PullOutcome.UNREACHABLE
        except MeshError as error:  # it affects this queue only
            log.error("pull.failed", queue=queue, error=str(error))
            outcome = ev.PullOutcome.ABSENT
        return ev.PullEnded(queue=queue, outcome=outcome, asked_at=asked_at)

    def _delivered(self, delivery: Delivery, request: QueuedRequest) -> ev.Delivered:
        """Keep a delivery until it is settled."""
        renewal = self._departures.renewal_of(delivery)
        if renewal is None:
            self._request_log.waited(request, delivery, pulled_at=self._clock.now())
        tag = ev.Tag(queue=delivery.queue, connection=self._connection, number=next(self._numbers))
        self._unsettled[tag] = delivery
        return ev.Delivered(tag=tag, request=request, renewal=renewal)

    async def _decoded(self, delivery: Delivery) -> QueuedRequest | None:
        """The request of a delivery; None if it was no request and is among the dead letters."""
        try:
            request = _decode(delivery.body)
            LaneKey.parse(request.lane)  # the request may have to return to this lane
        except ContractError as error:
            try:
                await self._departures.bury(delivery, f"undecodable: {error}")
            except MeshError:
                await delivery.settle(Settlement.REQUEUE)
                raise
            return None
        if not delivery.redelivered:
            return request
        attempts = msgspec.structs.replace(request.attempts, repeated=True)
        return msgspec.structs.replace(request, attempts=attempts)
