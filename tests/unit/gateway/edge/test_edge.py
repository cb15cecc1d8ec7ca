"""The outermost layer of a gateway: streams are kept alive, and answers end at a stop."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import msgspec
import pytest
from structlog.testing import capture_logs

from services.gateway.edge.announced import announce_stream
from services.gateway.edge.edge import Edge, with_cors
from tests.unit.gateway.rig import scope_of

pytestmark = pytest.mark.virtual_time

Body = Callable[[dict[str, Any], Any], Awaitable[None]]
EVENTS = [(b"content-type", b"text/event-stream; charset=utf-8")]
COMMENT, PING = b": keep-alive\n\n", b'event: ping\ndata: {"type": "ping"}\n\n'
CHAT, MESSAGES = "/v1/chat/completions", "/v1/messages"


class Client:
    """Records the events of an answer with their times."""

    def __init__(self) -> None:
        self.events: list[tuple[float, dict[str, Any]]] = []

    async def send(self, event: dict[str, Any]) -> None:
        self.events.append((round(asyncio.get_running_loop().time(), 3), event))

    @property
    def start(self) -> dict[str, Any]:
        return self.events[0][1]

    @property
    def headers(self) -> dict[bytes, bytes]:
        return dict(self.start["headers"])

    @property
    def parts(self) -> list[tuple[float, bytes]]:
        return [(at, event["body"]) for at, event in self.events if "body" in event]

    @property
    def is_complete(self) -> bool:
        return not self.events[-1][1].get("more_body", True)


async def no_body() -> dict[str, Any]:
    return {"type": "http.request", "body": b"", "more_body": False}


async def answered(
    application: Any, *, path: str = CHAT, keep_alive_s: float = 10.0, edge: Edge | None = None
) -> Client:
    client = Client()
    edge = edge or Edge(application, keep_alive_s=keep_alive_s)
    await edge(scope_of(path), no_body, client.send)
    return client


def body(data: bytes, *, more: bool = True) -> dict[str, Any]:
    return {"type": "http.response.body", "body": data, "more_body": more}


def streaming(*steps: tuple[float, bytes], announces: bool = True) -> Any:
    """An application that sends each part after a pause, and ends its stream."""

    async def application(scope: dict[str, Any], _receive: Any, send: Any) -> None:
        if announces:
            announce_stream(scope, {"x-headway-request-id": "req-7"})
        for number, (pause_s, part) in enumerate(steps):
            await asyncio.sleep(pause_s)
            if not number:
                await send({"type": "http.response.start", "status": 200, "headers": EVENTS})
            await send(body(part))
        await send(body(b"", more=False))

    return application


def failing(status: int, pause_s: float, content: bytes, *, announces: bool = True) -> Any:
    """An application that answers with an error after a pause."""

    async def application(scope: dict[str, Any], _receive: Any, send: Any) -> None:
        if announces:
            announce_stream(scope, {"x-headway-request-id": "req-7"})
        await asyncio.sleep(pause_s)
        headers = [(b"content-type", b"application/json")]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send(body(content, more=False))

    return application


async def test_a_stream_that_begins_in_time_is_passed_as_it_is():
    client = await answered(streaming((9.0, b"data: a\n\n"), (9.0, b"data: b\n\n")))
    assert client.parts == [(9.0, b"data: a\n\n"), (18.0, b"data: b\n\n"), (18.0, b"")]
    assert client.start["headers"] == EVENTS


async def test_comments_come_before_between_and_after_tokens():
    steps = (25.0, b"data: a\n\n"), (15.0, b"data: b\n\n"), (12.0, b"data: [DONE]\n\n")
    client = await answered(streaming(*steps))
    assert client.parts == [
        (10.0, COMMENT),
        (20.0, COMMENT),
        (25.0, b"data: a\n\n"),
        (35.0, COMMENT),
        (40.0, b"data: b\n\n"),
        (50.0, COMMENT),
        (52.0, b"data: [DONE]\n\n"),
        (52.0, b""),
    ]
    assert client.start["status"] == 200
    assert client.headers[b"content-type"].startswith(b"text/event-stream")
    assert client.headers[b"x-headway-request-id"] == b"req-7"
    assert client.headers[b"x-accel-buffering"] == b"no"
    assert sum(event["type"] == "http.response.start" for _, event in client.events) == 1


async def test_anthropic_clients_get_pings():
    client = await answered(streaming((11.0, b"event: a\ndata: {}\n\n")), path=MESSAGES)
    assert client.parts[0] == (10.0, PING)


async def test_no_comment_breaks_an_event_that_is_sent_in_parts():
    steps = (1.0, b"data: {"), (30.0, b'"a": 1}\n\n'), (11.0, b"data: [DONE]\n\n")
    client = await answered(streaming(*steps))
    assert client.parts == [
        (1.0, b"data: {"),
        (31.0, b'"a": 1}\n\n'),
        (41.0, COMMENT),
        (42.0, b"data: [DONE]\n\n"),
        (42.0, b""),
    ]


async def test_an_interval_of_0_sends_no_comments():
    client = await answered(streaming((300.0, b"data: a\n\n")), keep_alive_s=0.0)
    assert client.parts == [(300.0, b"data: a\n\n"), (300.0, b"")]


async def test_a_stream_that_was_not_announced_begins_with_its_first_byte():
    client = await answered(streaming((25.0, b"data: a\n\n"), announces=False))
    assert client.parts == [(25.0, b"data: a\n\n"), (25.0, b"")]


async def test_a_whole_answer_gets_no_comments():
    client = await answered(failing(200, 50.0, b'{"a": 1}', announces=False))
    assert client.parts == [(50.0, b'{"a": 1}')]


async def test_an_early_refusal_keeps_its_status():
    client = await answered(failing(429, 9.0, b'{"error": {"code": "over_capacity"}}'))
    assert client.start["status"] == 429
    assert client.parts == [(9.0, b'{"error": {"code": "over_capacity"}}')]


@pytest.mark.parametrize(("path", "prefix"), [(CHAT, b""), (MESSAGES, b"event: error\n")])
async def test_a_late_refusal_is_the_last_event_with_the_id(path: str, prefix: bytes):
    client = await answered(
        failing(504, 12.0, b'{"error": {"code": "deadline_expired"}}'), path=path
    )
    assert client.start["status"] == 200
    _, last = client.parts[-1]
    assert last.startswith(prefix + b"data: ")
    assert last.endswith(b"\n\n")
    assert client.is_complete
    fields = msgspec.json.decode(last.removeprefix(prefix + b"data: "))
    assert fields == {"error": {"code": "deadline_expired"}, "request_id": "req-7"}


async def test_an_error_without_json_still_ends_the_stream():
    client = await answered(failing(502, 12.0, b"<html>"))
    _, last = client.parts[-1]
    assert msgspec.json.decode(last.removeprefix(b"data: ")) == {"error": "<html>"}
    assert client.is_complete


async def test_comments_do_not_pile_up_for_a_client_that_reads_nothing():
    sent: list[bytes] = []

    async def send(event: dict[str, Any]) -> None:
        sent.append(event.get("body", b""))
        await asyncio.sleep(95.0)

    edge = Edge(streaming((300.0, b"data: a\n\n")), keep_alive_s=10.0)
    await edge(scope_of(CHAT), no_body, send)
    assert sent.count(COMMENT) <= 3


async def test_an_exception_is_a_json_answer_and_is_logged():
    async def application(_scope: Any, _receive: Any, _send: Any) -> None:
        raise RuntimeError("bug")

    with capture_logs() as logs:
        client = await answered(application)
    assert client.start["status"] == 500
    assert b"internal_error" in client.parts[-1][1]
    assert client.is_complete
    assert [each["event"] for each in logs] == ["request.broken"]


async def stopped_at(application: Any, at_s: float, *, path: str = CHAT) -> Client:
    edge, client = Edge(application, keep_alive_s=10.0), Client()
    running = asyncio.create_task(edge(scope_of(path), no_body, client.send))
    await asyncio.sleep(at_s)
    await edge.stop()
    await running
    return client


async def test_a_stop_answers_waiting_requests_with_503_and_retry_after():
    client = await stopped_at(failing(200, 99.0, b"{}", announces=False), 3.0)
    assert client.start["status"] == 503
    assert client.headers[b"retry-after"] == b"5"
    assert msgspec.json.decode(client.parts[-1][1])["error"]["code"] == "mesh_unavailable"
    assert client.is_complete


@pytest.mark.parametrize("path", [CHAT, MESSAGES, "/v1/responses"])
@pytest.mark.parametrize("at_s", [3.0, 12.0], ids=["after a token", "before a token"])
async def test_a_stop_ends_streams_with_an_error_event(path: str, at_s: float):
    first_s = 2.0 if at_s == 3.0 else 50.0
    client = await stopped_at(streaming((first_s, b"data: a\n\n"), (99.0, b"")), at_s, path=path)
    assert client.start["status"] == 200
    assert client.is_complete
    last = client.parts[-1][1]
    assert b"the gateway stops" in last
    assert b"req-7" in last
    assert (b"event: error" in last) is (path == MESSAGES)


async def test_a_stop_in_the_middle_of_an_event_ends_the_event_first():
    client = await stopped_at(streaming((1.0, b"data: {"), (99.0, b"}")), 3.0)
    assert client.parts[-1][1].startswith(b"\n\ndata: ")


async def test_a_client_that_leaves_is_not_answered():
    edge, client = Edge(streaming((99.0, b"")), keep_alive_s=10.0), Client()
    running = asyncio.create_task(edge(scope_of(CHAT), no_body, client.send))
    await asyncio.sleep(1.0)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert not client.events


def of_origin(application: Any, *origins: str) -> httpx.AsyncClient:
    edge = with_cors(Edge(application, keep_alive_s=10.0), origins)
    return httpx.AsyncClient(transport=httpx.ASGITransport(app=edge), base_url="http://mesh")


ASKED = {
    "origin": "https://chat.example.com",
    "access-control-request-method": "POST",
    "access-control-request-headers": "authorization, content-type, x-stainless-os",
}


async def test_a_preflight_of_an_allowed_origin_needs_no_key():
    async with of_origin(failing(401, 0.0, b"{}"), "https://chat.example.com") as client:
        found = await client.options(CHAT, headers=ASKED)
    assert found.status_code == 200
    assert found.headers["access-control-allow-origin"] == "https://chat.example.com"
    assert "POST" in found.headers["access-control-allow-methods"]
    assert "x-stainless-os" in found.headers["access-control-allow-headers"]


@pytest.mark.parametrize("status", [200, 400, 401, 503])
async def test_answers_and_errors_name_the_origin(status: int):
    async with of_origin(failing(status, 0.0, b"{}"), "*") as client:
        found = await client.post(CHAT, headers={"origin": "https://a.example"})
    assert found.status_code == status
    assert found.headers["access-control-allow-origin"] == "*"
    assert "x-headway-request-id" in found.headers["access-control-expose-headers"]


async def test_early_streams_name_the_origin():
    async with of_origin(streaming((11.0, b"data: a\n\n")), "*") as client:
        found = await client.post(CHAT, headers={"origin": "https://a.example"})
    assert found.headers["access-control-allow-origin"] == "*"
    assert found.content == COMMENT + b"data: a\n\n"


@pytest.mark.parametrize("origins", [(), ("https://chat.example.com",)])
async def test_other_origins_are_not_named(origins: tuple[str, ...]):
    async with of_origin(failing(200, 0.0, b"{}"), *origins) as client:
        found = await client.post(CHAT, headers={"origin": "https://other.example"})
        preflight = await client.options(CHAT, headers=ASKED | {"origin": "https://o.example"})
    assert "access-control-allow-origin" not in found.headers
    assert "access-control-allow-origin" not in preflight.headers
