"""A server that stops answers the requests that clients have sent."""

import asyncio
import socket

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from shared.runtime.health import serve_http

REQUEST = b"GET / HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"


async def answered(_request: Request) -> Response:
    return PlainTextResponse("served")


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


def received(connection: socket.socket) -> bytes:
    """All bytes of *connection* to its end."""
    content = b""
    while chunk := connection.recv(4096):
        content += chunk
    return content


async def test_request_of_a_connection_that_is_not_accepted_yet_is_answered() -> None:
    port = free_port()
    async with serve_http(Starlette(routes=[Route("/", answered)]), host="127.0.0.1", port=port):
        await asyncio.sleep(0.2)  # the server runs
        # No turn of the event loop lies between the connection and the end of the server.
        connection = socket.create_connection(("127.0.0.1", port))
        connection.sendall(REQUEST)
    with connection:
        assert (await asyncio.to_thread(received, connection)).endswith(b"served")


async def test_request_on_an_open_connection_is_answered() -> None:
    port = free_port()
    async with serve_http(Starlette(routes=[Route("/", answered)]), host="127.0.0.1", port=port):
        await asyncio.sleep(0.2)  # the server runs
        connection = socket.create_connection(("127.0.0.1", port))
        await asyncio.sleep(0.2)  # the server accepts the connection
        connection.sendall(REQUEST)
    with connection:
        assert (await asyncio.to_thread(received, connection)).endswith(b"served")


async def test_port_is_closed_afterwards() -> None:
    port = free_port()
    async with serve_http(Starlette(routes=[Route("/", answered)]), host="127.0.0.1", port=port):
        await asyncio.sleep(0.2)  # the server runs
    try:
        socket.create_connection(("127.0.0.1", port)).close()
    except ConnectionRefusedError:
        return
    raise AssertionError("the port still accepts connections")
