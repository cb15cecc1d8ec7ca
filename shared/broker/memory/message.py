"""Messages in the queues of the in-process broker."""

import math
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace

from shared.broker.protocol import Delivery, OutMessage, Settlement
from shared.contracts.base import UnixTime


@dataclass(slots=True, kw_only=True, eq=False)
class StoredMessage:
    """One message in one queue of the in-process broker."""

    seq: int
    """Arrival number of the message in its queue; a requeued message returns to this position."""
    exchange: str
    routing_key: str
    message: OutMessage
    delivery_count: int = 0
    redelivered: bool = False
    dies_at: UnixTime = math.inf
    """Time at which the queue dead-letters the message, if no consumer has it then."""

    @property
    def size_bytes(self) -> int:
        return len(self.message.body)

    def delivery(
        self,
        queue: str,
        *,
        settler: Callable[[Settlement], Awaitable[bool]],
        has_returned: Callable[[], bool],
    ) -> Delivery:
        """The message as a consumer of *queue* gets it."""
        message = self.message
        return Delivery(
            body=message.body,
            kind=message.kind,
            queue=queue,
            routing_key=self.routing_key,
            message_id=message.message_id,
            correlation_id=message.correlation_id,
            reply_to=message.reply_to,
            user_id=message.user_id,
            headers=message.headers,
            expiration_s=message.expiration_s,
            redelivered=self.redelivered,
            delivery_count=self.delivery_count,
            settler=settler,
            has_returned=has_returned,
        )


def dead_letter(stored: StoredMessage, *, queue: str, reason: str) -> OutMessage:
    """Message as RabbitMQ dead-letters it: the headers describe the first and the last death."""
    death = {"reason": reason, "queue": queue, "exchange": stored.exchange}
    first = {f"x-first-death-{name}": value for name, value in death.items()}
    last = {f"x-last-death-{name}": value for name, value in death.items()}
    # RabbitMQ removes the lifetime, so that the message stays in its last queue.
    headers = {**first, **stored.message.headers, **last}
    return replace(stored.message, headers=headers, expiration_s=None)
