"""AMQP connection that reconnects after a loss."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any, cast
from urllib.parse import unquote, urlsplit

from aio_pika.connection import make_url
from aio_pika.robust_connection import RobustConnection
from aiormq.abc import AbstractConnection
from aiormq.channel import Channel
from aiormq.exceptions import (
    ConnectionNotAllowed,
    InvalidFrameError,
    ProbableAuthenticationError,
)

from shared.broker.amqp.errors import amqp_errors
from shared.broker.amqp.nodes import Node, Nodes, parts_of
from shared.broker.amqp.transport import GatheringTransport
from shared.broker.arguments import exchange_arguments, queue_arguments
from shared.broker.protocol import ExchangeSpec, QueueSpec
from shared.contracts.errors import (
    BrokerUnavailableError,
    MeshError,
    QueueNotFoundError,
    SettingsError,
)
from shared.runtime.events import EventLogger

log = EventLogger(__name__)

CLOSE_TIMEOUT_S = 5.0
MAX_CHANNEL_NUMBER = 65535


class AmqpConnection:
    """
    AMQP connection that reconnects after a loss and opens raw channels, which are not restored.

    aio-pika's robust channels are not used: a single deleted queue prevents every reconnect of
    their connection, and after a channel error they reopen while work on them is running.

    Args:
        url: `amqp://` or `amqps://`; for several nodes of a broker, a list separated by commas.
            Each attempt to connect tries the next node.
        name: Name of the connection in RabbitMQ's management view.
        heartbeat_s: Heartbeat interval; a peer without traffic for about three intervals counts as
            dead.
        timeout_s: Time limit for each round trip.
        reconnect_s: Pause between reconnection attempts.
    """

    def __init__(
        self, url: str, *, name: str, heartbeat_s: int, timeout_s: float, reconnect_s: float
    ) -> None:
        self._name = name
        self._heartbeat_s = heartbeat_s
        self.timeout_s = timeout_s
        self._reconnect_s = reconnect_s
        self._robust: RobustConnection | None = None
        self._nodes = Nodes(url)
        self._transport = GatheringTransport(self._nodes.next)
        self._idle: list[Channel] = []
        self._connected = False
        self._closing = False
        self._last_number = 0

    @property
    def up(self) -> bool:
        return self._live() is not None

    def _live(self) -> AbstractConnection | None:
        robust = self._robust
        if robust is None or robust.transport is None or not robust.connected.is_set():
            return None
        connection = robust.transport.connection
        return None if connection.is_closed else connection

    async def connect(
        self, *, on_lost: Callable[[], None], on_restored: Callable[[], None]
    ) -> None:
        """
        Connect to the first node that answers; the connection is restored in the background after
        later losses.

        Raises:
            BrokerUnavailableError: No node of the broker answers.
            SettingsError: The URL cannot be read, or the broker rejects the user, the password or
                the virtual host.
        """
        failures: list[MeshError] = []
        for node in self._nodes.all:
            try:
                robust = await self._connected_to(node, self._nodes.login)
                break
            except (BrokerUnavailableError, SettingsError) as error:
                failures.append(error)
        else:
            raise _failed(failures)
        self._robust = robust

        def lost(*_: Any) -> None:
            # aio-pika calls this also for every failed attempt to reconnect.
            if self._connected and not self._closing:
                self._connected = False
                self._idle.clear()
                log.warning("broker.lost", connection=self._name)
                on_lost()

        def restored(*_: Any) -> None:
            self._connected = True
            log.info("broker.connected", connection=self._name, node=str(self._transport.node))
            on_restored()

        self._connected = True
        robust.close_callbacks.add(lost)
        robust.reconnect_callbacks.add(restored)
        log.info("broker.connected", connection=self._name, node=str(self._transport.node))

    async def _connected_to(self, node: Node, login: str) -> RobustConnection:
        """
        Connect to *node*, whose turn it is.

        Raises:
            BrokerUnavailableError: The node does not answer.
            SettingsError: It rejects the user, the password or the virtual host.
        """
        url = make_url(login, name=self._name, heartbeat=self._heartbeat_s)
        robust = RobustConnection(url, reconnect_interval=self._reconnect_s)
        robust.kwargs["transport_factory"] = self._transport  # passed to each aiormq connection
        try:
            with amqp_errors(f"connect {self._name} to {node}"):
                async with asyncio.timeout(self.timeout_s):
                    await robust.connect(timeout=self.timeout_s)
        except BrokerUnavailableError as error:
            await robust.close()
            if isinstance(error.__cause__, ProbableAuthenticationError | ConnectionNotAllowed):
                raise SettingsError(f"the broker refuses the login: {error.__cause__}") from error
            if _is_refused_vhost(error.__cause__):
                raise SettingsError(
                    f"the broker refuses the vhost {self._vhost!r}: it does not exist, or the user "
                    "has no rights on it"
                ) from error
            raise
        except BaseException:  # cancelled or failed: undo what was begun and raise again
            await robust.close()
            raise
        return robust

    @property
    def has_several_nodes(self) -> bool:
        """True if the URL names several nodes of the broker."""
        return len(self._nodes.all) > 1

    @property
    def _vhost(self) -> str:
        return unquote(urlsplit(self._nodes.login).path.removeprefix("/")) or "/"

    async def open_channel(self, *, confirms: bool = False) -> Channel:
        """Open a new channel; an error on this channel affects no other channel."""
        with amqp_errors("open channel"):
            connection = self._live()
            if connection is None:
                raise BrokerUnavailableError(f"{self._name} is not connected")
            number = self._next_number(connection)
            # Opening a channel on a connection that the broker has blocked never returns.
            async with asyncio.timeout(self.timeout_s):
                channel = await connection.channel(
                    channel_number=number,
                    publisher_confirms=confirms,
                    on_return_raises=confirms,
                    timeout=self.timeout_s,
                )
            # The declared type lacks `timeouts` and `wait`, which its only implementation has.
            return cast("Channel", channel)

    def _next_number(self, connection: AbstractConnection) -> int:
        """
        Return the next channel number, in a cycle through the numbers that the broker allows.

        aiormq uses the highest open number plus one, which may be a number that the broker has just
        closed. If the confirmation of that close is still in transit, opening the channel hangs.
        """
        highest = connection.connection_tune.channel_max or MAX_CHANNEL_NUMBER
        for _ in range(highest):
            self._last_number = self._last_number % highest + 1
            if self._last_number not in connection.channels:
                return self._last_number
        raise BrokerUnavailableError(f"{self._name} has {highest} channels open")

    async def drain(self) -> None:
        """
        Wait until the socket accepts bytes, for at most `timeout_s`.

        Raises:
            OSError: The connection is lost, or takes too long.
        """
        await self._transport.drain(self.timeout_s)

    @asynccontextmanager
    async def calling(self, what: str) -> AsyncIterator[Channel]:
        """
        Context with a channel for calls that may fail; raises the errors of `amqp_errors`.

        The channel is reused only after success, since the broker closes a channel with each error.
        """
        with amqp_errors(what):
            channel = self._idle.pop() if self._idle else None
            if channel is None or channel.is_closed:
                channel = await self.open_channel()
            try:
                async with asyncio.timeout(self.timeout_s):
                    yield channel
            except BaseException:  # cancelled or failed: undo what was begun and raise again
                with suppress(TimeoutError):
                    await channel.close(timeout=CLOSE_TIMEOUT_S)
                raise
            if not self._closing:
                self._idle.append(channel)

    async def declare_exchange(self, spec: ExchangeSpec) -> None:
        """Create an exchange, or compare an existing one; raises the errors of `amqp_errors`."""
        async with self.calling(f"declare exchange {spec.name}") as channel:
            await channel.exchange_declare(
                spec.name,
                exchange_type=spec.type.value,
                durable=True,
                arguments=dict(exchange_arguments(spec)),
            )

    async def has_exchange(self, name: str) -> bool:
        """Return whether the exchange exists, by a passive declare."""
        try:
            async with self.calling(f"look for exchange {name}") as channel:
                await channel.exchange_declare(name, passive=True)
        except QueueNotFoundError:  # AMQP has one code for all missing objects
            return False
        return True

    async def declare_queue(self, spec: QueueSpec) -> None:
        """Create a queue, or compare an existing one; raises the errors of `amqp_errors`."""
        async with self.calling(f"declare queue {spec.name}") as channel:
            await channel.queue_declare(
                spec.name,
                durable=spec.durable,
                exclusive=spec.exclusive,
                arguments=dict(queue_arguments(spec)),
            )

    async def close(self) -> None:
        """Close the connection; idempotent. Unacknowledged messages return to their queues."""
        self._closing = True
        self._idle.clear()
        robust, self._robust = self._robust, None
        if robust is None:
            return
        with suppress(BrokerUnavailableError), amqp_errors("close"):
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                await robust.close()


def broker_user(url: str) -> str:
    """
    User name in *url*; RabbitMQ rejects messages with another user id.

    Raises:
        SettingsError: The URL is empty or cannot be read.
    """
    return unquote(parts_of(url).username or "guest")


def _failed(failures: list[MeshError]) -> MeshError:
    """The error for a broker of which no node can be used; a refused login is the operator's."""
    refused = [error for error in failures if isinstance(error, SettingsError)]
    if refused or len(failures) == 1:
        return (refused or failures)[0]
    each = "; ".join(str(error) for error in failures)
    return BrokerUnavailableError(f"none of the broker's {len(failures)} nodes answers: {each}")


def _is_refused_vhost(error: BaseException | None) -> bool:
    """
    Return whether the broker has closed a connection instead of opening its virtual host.

    The library's error has only the names of the frames.
    """
    return isinstance(error, InvalidFrameError) and "Connection.OpenOk" in str(error)
