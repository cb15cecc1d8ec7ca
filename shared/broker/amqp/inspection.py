"""What only AMQP itself shows of a broker: its product and limits, and objects as they exist."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from shared.broker.amqp.connection import AmqpConnection
from shared.broker.protocol import ExchangeSpec, QueueSpec
from shared.contracts.base import Seconds
from shared.contracts.errors import QueueNotFoundError

HEARTBEAT_S = 10
"""As in `AmqpBroker`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """A broker, by its own words."""

    product: str
    version: str
    channel_max: int
    """Most channels of one connection; 0: no limit."""

    @property
    def release(self) -> tuple[int, int]:
        """Major and minor version; (0, 0) if the version is none of RabbitMQ's."""
        parts = self.version.split(".")[:2]
        if len(parts) < 2 or not all(part.isdecimal() for part in parts):  # noqa: PLR2004
            return 0, 0
        return int(parts[0]), int(parts[1])


class Inspection:
    """Looks at a broker over a connection of its own; declares only what exists already."""

    def __init__(self, connection: AmqpConnection) -> None:
        self._connection = connection

    @property
    def server(self) -> Server:
        """The broker of the connection."""
        live = self._connection._live()  # noqa: SLF001 - same package
        properties = {} if live is None else dict(live.server_properties)
        return Server(
            product=_text(properties.get("product")),
            version=_text(properties.get("version")),
            channel_max=0 if live is None else live.connection_tune.channel_max or 0,
        )

    async def has_exchange(self, name: str) -> bool:
        """Return whether the exchange exists."""
        return await self._connection.has_exchange(name)

    async def has_queue(self, name: str) -> bool:
        """
        Return whether the queue exists.

        Raises:
            BrokerConflictError: It belongs to another connection.
        """
        try:
            async with self._connection.calling(f"queue {name}") as channel:
                await channel.queue_declare(name, passive=True)
        except QueueNotFoundError:
            return False
        return True

    async def compare_exchange(self, spec: ExchangeSpec) -> None:
        """
        Compare an existing exchange with its spec.

        Raises:
            BrokerConflictError: They differ; the message names the argument.
            BrokerAccessError: The user may not declare the exchange.
        """
        await self._connection.declare_exchange(spec)

    async def compare_queue(self, spec: QueueSpec) -> None:
        """
        Compare an existing queue with its spec.

        Raises:
            BrokerConflictError: They differ; the message names the argument.
            BrokerAccessError: The user may not declare the queue.
        """
        await self._connection.declare_queue(spec)

    async def delete_exchange(self, name: str) -> None:
        """Delete an exchange."""
        async with self._connection.calling(f"delete exchange {name}") as channel:
            await channel.exchange_delete(name)


@asynccontextmanager
async def inspecting(url: str, *, name: str, timeout_s: Seconds) -> AsyncIterator[Inspection]:
    """
    Context with a connection for inspections.

    Raises:
        BrokerUnavailableError: The broker does not answer within *timeout_s*.
        SettingsError: The broker refuses the login or the virtual host.
    """
    connection = AmqpConnection(
        url, name=name, heartbeat_s=HEARTBEAT_S, timeout_s=timeout_s, reconnect_s=60.0
    )
    await connection.connect(on_lost=lambda: None, on_restored=lambda: None)
    try:
        yield Inspection(connection)
    finally:
        await connection.close()


def _text(value: object) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value or "unknown")
