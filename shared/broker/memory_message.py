"""Messages as the in-process broker keeps them."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from shared.broker.protocol import HeaderValue, OutMessage


@dataclass(slots=True, kw_only=True)
class StoredMessage:
    """One message on one queue."""

    seq: int
    """Arrival on this queue; the order that requeued messages go back to."""
    exchange: str
    routing_key: str
    message: OutMessage
    headers: Mapping[str, HeaderValue] = field(default_factory=dict)
    delivery_count: int = 0
    redelivered: bool = False

    @property
    def size_bytes(self) -> int:
        return len(self.message.body)


def dead_letter(stored: StoredMessage, *, queue: str, reason: str) -> OutMessage:
    """The message as RabbitMQ dead-letters it; the first death stays on record."""
    death: dict[str, HeaderValue] = {
        "x-first-death-reason": reason,
        "x-first-death-queue": queue,
        "x-first-death-exchange": stored.exchange,
    }
    return replace(stored.message, headers={**death, **stored.headers})
