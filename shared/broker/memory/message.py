"""Messages in the queues of the in-process broker."""

from dataclasses import dataclass, replace

from shared.broker.protocol import OutMessage


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
    return replace(stored.message, headers={**death, **stored.message.headers})
