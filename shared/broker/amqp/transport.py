"""Connection to the broker whose writes of one turn of the event loop are one packet."""

import asyncio
from collections.abc import Callable
from typing import Any

from aiormq.connection import URL, TransportFactory  # type: ignore[attr-defined]
from aiormq.exceptions import AMQPConnectionError

from shared.broker.amqp.nodes import Node
from shared.contracts.base import Seconds


class GatheringTransport(TransportFactory):
    """
    Opens connections, over TLS for `amqps://`, with a `GatheringWriter`.

    Args:
        next_node: Returns the node to which the next connection goes.
    """

    def __init__(self, next_node: Callable[[], Node]) -> None:
        self._next_node = next_node
        self.node: Node | None = None
        """The node of the last attempt."""
        self._writer: GatheringWriter | None = None

    async def drain(self, timeout_s: Seconds) -> None:
        """
        Wait while more bytes than a buffer may have wait for the socket.

        Raises:
            OSError: The connection is lost, or the socket accepts nothing for *timeout_s*.
        """
        if self._writer is not None and self._writer.is_congested:
            async with asyncio.timeout(timeout_s):
                await self._writer.drain()

    async def create(
        self, url: URL, **kwargs: Any
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """
        Open a connection to the next node, with the options of *url*.

        Raises:
            AMQPConnectionError: The node does not answer.
        """
        provider = kwargs.pop("ssl_context_provider")
        context = await provider.get_context() if url.scheme == "amqps" else None
        loop = asyncio.get_running_loop()
        reader = asyncio.StreamReader()
        self.node = node = self._next_node()
        protocol = asyncio.StreamReaderProtocol(reader)
        try:
            transport, _ = await loop.create_connection(
                lambda: protocol, node.host, node.port, ssl=context, **kwargs
            )
        except OSError as error:
            raise AMQPConnectionError(*error.args) from error
        self._writer = GatheringWriter(transport, protocol, reader, loop)
        return reader, self._writer


class GatheringWriter(asyncio.StreamWriter):
    """
    Writer that sends all that is written in one turn of the event loop at once, since each packet
    costs the two ends and the kernel more than its bytes.
    """

    def __init__(
        self,
        transport: asyncio.WriteTransport,
        protocol: asyncio.StreamReaderProtocol,
        reader: asyncio.StreamReader,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        super().__init__(transport, protocol, reader, loop)
        self._loop = loop
        self._gathered: list[bytes] = []

    @property
    def is_congested(self) -> bool:
        """True while more bytes wait for the socket than the transport takes before it pauses."""
        return self.transport.get_write_buffer_size() > self.transport.get_write_buffer_limits()[1]

    def write(self, data: bytes) -> None:  # type: ignore[override]  # aiormq writes bytes only
        if not self._gathered:
            self._loop.call_soon(self._flush)
        self._gathered.append(data)

    def write_eof(self) -> None:
        self._flush()
        super().write_eof()

    def close(self) -> None:
        self._flush()
        super().close()

    async def drain(self) -> None:
        self._flush()
        await super().drain()

    def _flush(self) -> None:
        if self._gathered:
            gathered, self._gathered = self._gathered, []
            if not self.is_closing():  # uvloop's transport raises then, in a callback of the loop
                super().write(b"".join(gathered))
