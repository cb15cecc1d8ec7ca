"""Messages as the in-process broker keeps them."""

from dataclasses import dataclass, replace

from shared.broker.protocol import OutMessage


@dataclass(slots=True, kw_only=True, eq=False)
class StoredMessage:
    """One message on one queue."""

    seq: int
    """Position in the order of arrival on this queue, to which a requeued message returns."""
    exchange: str
    routing_key: str
    message: OutMessage
    delivery_count: int = 0
    redelivered: bool = False

    @property
    def size_bytes(self) -> int:
        return len(self.message.body)


def dead_letter(stored: StoredMessage, *, queue: str, reason: str) -> OutMessage:
    """Return the message as RabbitMQ dead-letters it; the first death is kept in its headers."""
    death = {
        "x-first-death-reason": reason,
        "x-first-death-queue": queue,
        "x-first-death-exchange": stored.exchange,
    }
    return replace(stored.message, headers={**death, **stored.message.headers})
