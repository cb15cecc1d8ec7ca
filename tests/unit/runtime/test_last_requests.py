"""A server that stops answers the requests that clients have sent."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from ops.ports import free_port
from shared.runtime.health import QuietServer

Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]
FIRST = b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"
LAST = b"GET / HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"


async def answered(_request: Request) -> Response:
    return PlainTextResponse("served")


@asynccontextmanager
async def served(port: int) -> AsyncIterator[Connection]:
    """
    A server that runs, and an open connection on which it has answered once.

    The event loop does not turn between the end of the context and the begin of the shutdown.
    """
    app = Starlette(routes=[Route("/", answered)])
    listener = socket.create_server(("127.0.0.1", port))
    server = QuietServer(uvicorn.Config(app, log_level="error", lifespan="off", loop="none"))
    running = asyncio.create_task(server.serve(sockets=[listener]))
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(FIRST)
    await reader.readuntil(b"served")
    yield reader, writer
    await server.shutdown([listener])
    server.stop()
    await running


async def rest_of(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
    """All bytes of a connection to its end."""
    content = await reader.read()
    writer.close()
    await writer.wait_closed()
    return content


async def test_request_of_a_connection_that_is_not_accepted_yet_is_answered() -> None:
    port = free_port()
    async with served(port) as first:
        connection = socket.create_connection(("127.0.0.1", port))
        connection.sendall(LAST)
    connection.setblocking(False)
    last = await asyncio.open_connection(sock=connection)
    assert (await rest_of(*last)).endswith(b"served")
    assert await rest_of(*first) == b""


async def test_request_on_an_open_connection_is_answered() -> None:
    async with served(free_port()) as connection:
        connection[1].write(LAST)
    assert (await rest_of(*connection)).endswith(b"served")


async def test_port_is_closed_afterwards() -> None:
    port = free_port()
    async with served(port) as connection:
        pass
    await rest_of(*connection)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port))
