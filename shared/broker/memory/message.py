"""Messages in the queues of the in-process broker."""

import math
from dataclasses import dataclass, replace

from shared.broker.protocol import OutMessage
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


def dead_letter(stored: StoredMessage, *, queue: str, reason: str) -> OutMessage:
    """Message as RabbitMQ dead-letters it: the headers contain the reason of the first death."""
    death = {
        "x-first-death-reason": reason,
        "x-first-death-queue": queue,
        "x-first-death-exchange": stored.exchange,
    }
    # RabbitMQ removes the lifetime, so that the message stays in its last queue.
    return replace(stored.message, headers={**death, **stored.message.headers}, expiration_s=None)
