"""Requests of the gateway to its own front."""

import asyncio
from typing import Any

import pytest

from services.gateway.admission import INTERNAL, Internal
from services.gateway.responses.inner_call import InnerAnswer, inner_call
from shared.contracts.base import TenantId

ACME = TenantId("acme")


class Front:
    """An application that sends the given parts."""

    def __init__(self, *parts: bytes, status: int = 200, kind: str = "text/event-stream") -> None:
        self.parts = parts
        self.status = status
        self.kind = kind
        self.scope: dict[str, Any] = {}
        self.body = b""
        self.left = asyncio.Event()

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        self.scope = scope
        self.body = (await receive())["body"]
        headers = [(b"Content-Type", self.kind.encode())]
        await send({"type": "http.response.start", "status": self.status, "headers": headers})
        for part in self.parts:
            await send({"type": "http.response.body", "body": part, "more_body": True})


def called(front: Any) -> Any:
    return inner_call(front, path="/v1/responses", body=b"{}", headers={"a": "b"}, tenant=ACME)


async def events_of(*parts: bytes) -> list[dict[str, Any]]:
    async with called(Front(*parts)) as answer:
        await answer.begin()
        return [event async for event in answer.events()]


async def test_the_front_gets_the_body_the_headers_and_the_tenant():
    front = Front()
    async with called(front) as answer:
        await answer.begin()
        await answer.whole()

    assert front.body == b"{}"
    assert front.scope[INTERNAL] == Internal(ACME)
    assert dict(front.scope["headers"]) == {
        b"content-type": b"application/json",
        b"content-length": b"2",
        b"a": b"b",
    }


@pytest.mark.parametrize("size", [1, 2, 3, 7, 100])
async def test_events_are_read_however_they_are_cut(size: int):
    stream = b'event: a\r\ndata: {"x":1}\r\n\r\n: note\n\ndata: {"x":\ndata: 2}\n\ndata: [DONE]\n\n'
    parts = [stream[at : at + size] for at in range(0, len(stream), size)]

    assert await events_of(*parts) == [{"x": 1}, {"x": 2}]


async def test_an_answer_without_a_stream_is_read_as_a_whole():
    async with called(Front(b"{", b"}", status=400, kind="application/json")) as answer:
        await answer.begin()
        body = await answer.whole()

    assert (answer.status, answer.is_stream, body) == (400, False, b"{}")


async def test_a_front_that_breaks_ends_the_answer():
    async def broken(_scope: Any, _receive: Any, _send: Any) -> None:
        raise RuntimeError("a bug")

    async with called(broken) as answer:
        await answer.begin()
        body = await answer.whole()

    assert (answer.status, body) == (0, b"")


async def test_leaving_ends_the_request():
    left = asyncio.Event()

    async def endless(_scope: Any, receive: Any, _send: Any) -> None:
        await receive()
        try:
            await receive()
        finally:
            left.set()

    async with called(endless) as answer:
        assert isinstance(answer, InnerAnswer)
        await asyncio.sleep(0)

    assert left.is_set()
