"""Reasons of failed requests."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp
import pytest

from ops.ports import free_port
from shared.runtime.http.failures import failure_reason


@asynccontextmanager
async def answering(answer: bytes) -> AsyncIterator[str]:
    """Context with a server that sends *answer* and closes; its address."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answer)
        await writer.drain()
        writer.close()

    port = free_port()
    async with await asyncio.start_server(serve, "127.0.0.1", port):
        yield f"http://127.0.0.1:{port}/"


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (b"", "the server closed the connection before it answered"),
        (
            b"HTTP/1.1 200 OK\r\nContent-Ty",
            "the server closed the connection within the head of its answer",
        ),
        (
            b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n{",
            "the server closed the connection within its answer",
        ),
    ],
)
async def test_a_closed_connection_is_a_sentence(answer: bytes, reason: str) -> None:
    async with answering(answer) as url, aiohttp.ClientSession() as session:
        with pytest.raises(aiohttp.ClientError) as failed:
            await (await session.post(url, data=b"{}")).read()

    assert failure_reason(failed.value) == reason


async def test_an_answer_that_is_not_http_has_no_status() -> None:
    async with answering(b"hello\r\n\r\n") as url, aiohttp.ClientSession() as session:
        with pytest.raises(aiohttp.ClientError) as failed:
            await session.get(url)
    reason = failure_reason(failed.value)

    assert reason.startswith("the answer is not valid HTTP: ")
    assert "400" not in reason


def test_other_reasons_are_those_of_the_error() -> None:
    assert failure_reason(OSError("no route")) == "no route"
    assert failure_reason(TimeoutError()) == "no answer in time"
    assert failure_reason(EOFError()) == "EOFError"
