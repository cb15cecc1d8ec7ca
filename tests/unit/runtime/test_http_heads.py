"""Limits on the heads of HTTP requests, on a real port."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from ops.ports import free_port
from shared.runtime.health import serve_http
from shared.runtime.http.heads import HEAD_S, MOST_HEAD_BYTES, MOST_HEADERS

pytestmark = pytest.mark.virtual_time

GET = b"GET / HTTP/1.1\r\nhost: a\r\n"
CHUNK = 16 * 1024


class Application:
    """Answers each request with the size of its body."""

    def __init__(self) -> None:
        self.num_requests = 0

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        self.num_requests += 1
        size, more = 0, True
        while more:
            event = await receive()
            size += len(event.get("body", b""))
            more = event.get("more_body", False)
        body = str(size).encode()
        headers = [(b"content-length", str(len(body)).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})


@asynccontextmanager
async def served(*origins: str) -> AsyncIterator[tuple[Application, int]]:
    application, port = Application(), free_port()
    async with serve_http(application, host="127.0.0.1", port=port, origins=origins):
        yield application, port


async def exchanged(port: int, *parts: bytes) -> bytes:
    """What the server sends for *parts* until it closes the connection or has answered."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    answer = b""
    try:
        for part in parts:
            for begin in range(0, len(part), CHUNK):
                writer.write(part[begin : begin + CHUNK])
                await writer.drain()
        answer = await reader.read(65536)
    except ConnectionError:
        answer += await reader.read(65536)
    finally:
        writer.close()
    return answer


@pytest.mark.parametrize(
    "head",
    [
        GET + b"x-a: " + b"a" * (MOST_HEAD_BYTES + 1) + b"\r\n\r\n",
        GET + b"x-a: " + b"a" * (10 * MOST_HEAD_BYTES),
        GET + b"".join(b"x-%d: %s\r\n" % (n, b"a" * 700) for n in range(100)) + b"\r\n",
        b"GET /" + b"a" * (2 * MOST_HEAD_BYTES) + b" HTTP/1.1\r\n\r\n",
        GET + b"".join(b"x-%d: a\r\n" % n for n in range(MOST_HEADERS)) + b"\r\n",
    ],
    ids=["one header", "no end", "all headers", "address", "number"],
)
async def test_a_large_head_is_refused(head: bytes):
    async with served() as (application, port):
        answer = await exchanged(port, head)
    assert answer.startswith(b"HTTP/1.1 431 ")
    assert b'"code":"' in answer
    assert b"the limit is" in answer
    assert not application.num_requests


async def test_heads_within_the_limits_are_served():
    headers = b"".join(b"x-%d: %s\r\n" % (n, b"a" * 300) for n in range(MOST_HEADERS - 1))
    async with served() as (_, port):
        assert (await exchanged(port, GET + headers + b"\r\n")).endswith(b"0")


@pytest.mark.parametrize("size", [100, MOST_HEAD_BYTES, 5 * MOST_HEAD_BYTES + 3])
async def test_bodies_do_not_count(size: int):
    head = b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: %d\r\n\r\n" % size
    async with served() as (_, port):
        whole = head + b"b" * size
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for _ in range(3):  # requests of one connection
            writer.write(whole)
            answer = await reader.readuntil(b"\r\n\r\n")
            assert answer.startswith(b"HTTP/1.1 200 ")
            assert await reader.readexactly(len(str(size))) == str(size).encode()
        writer.close()


@pytest.mark.parametrize("sent", [b"", b"GET / HT", GET, GET + b"x-a: b"])
async def test_a_slow_head_ends_the_connection(sent: bytes):
    async with served() as (application, port):
        answer = await exchanged(port, sent)
    assert answer.startswith(b"HTTP/1.1 408 ") if sent else answer == b""
    assert not application.num_requests


async def test_a_slow_second_head_ends_the_connection():
    async with served() as (application, port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(GET + b"\r\n")
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200 ")
        await reader.readexactly(1)
        writer.write(GET)
        assert (await reader.read()).startswith(b"HTTP/1.1 408 ")
        writer.close()
    assert application.num_requests == 1


async def test_a_slow_body_is_the_application_s_matter():
    async with served() as (_, port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 2\r\n\r\na")
        await asyncio.sleep(HEAD_S + 1.0)
        writer.write(b"b")
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200 ")
        writer.close()


PAGE = b"https://a.example"
FROM_PAGE = GET + b"Origin: " + PAGE + b"\r\n"
LARGE = b"x-a: " + b"a" * (MOST_HEAD_BYTES + 1) + b"\r\n\r\n"


@pytest.mark.parametrize(
    ("origins", "parts", "named"),
    [
        (["*"], [GET + LARGE], b"*"),
        (["*"], [b"G"], b"*"),
        (["*"], [b"\r\n" * MOST_HEAD_BYTES], b"*"),
        ([PAGE.decode()], [FROM_PAGE + LARGE], PAGE),
        ([PAGE.decode()], [FROM_PAGE + b"accept"], PAGE),
        ([PAGE.decode()], [b"\r\n" * MOST_HEAD_BYTES], None),
        ([PAGE.decode()], [GET + LARGE], None),
        (["https://b.example"], [FROM_PAGE + LARGE], None),
        ([], [FROM_PAGE + LARGE], None),
    ],
)
async def test_refusals_name_an_allowed_origin(
    origins: list[str], parts: list[bytes], named: bytes | None
):
    async with served(*origins) as (_, port):
        answer = await exchanged(port, *parts)
    assert answer.startswith((b"HTTP/1.1 431 ", b"HTTP/1.1 408 "))
    head = answer.partition(b"\r\n\r\n")[0]
    found = [line for line in head.split(b"\r\n") if line.startswith(b"access-control")]
    assert found == ([] if named is None else [b"access-control-allow-origin: " + named])
    assert (b"vary: Origin" in head) == (named == PAGE)
