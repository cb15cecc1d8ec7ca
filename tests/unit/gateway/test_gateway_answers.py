"""Answers of engines with the mesh's headers, results and errors."""

from typing import Any

import msgspec
import pytest

from ops.generate.replies import completed
from services.gateway.call import Call
from services.gateway.edge.forms import OPENAI
from services.gateway.outcomes import Outcome
from services.gateway.response import Response
from shared.contracts.base import TenantId
from shared.contracts.qos import Importance, Slo
from shared.contracts.requests import ErrorInfo

REFUSED = ErrorInfo(message="no room", code="over_capacity", status=429, retry_after_s=2.0)
SSE = b"text/event-stream; charset=utf-8"


class Client:
    """Receives the ASGI events of a response."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []

    async def send(self, event: dict[str, Any]) -> None:
        self.events.append(event)

    @property
    def status(self) -> int:
        return int(self.events[0]["status"])

    @property
    def headers(self) -> dict[bytes, bytes]:
        return dict(self.events[0]["headers"])

    @property
    def body(self) -> bytes:
        return b"".join(event.get("body", b"") for event in self.events)


@pytest.fixture
def client() -> Client:
    return Client()


@pytest.fixture
def call() -> Call:
    return Call(
        call_id="req-1",
        model="m",
        tenant=TenantId("t"),
        arrived_at=0.0,
        slo=Slo(),
        importance=Importance.HIGH,
        stream=False,
    )


@pytest.fixture
def response(client: Client, call: Call) -> Response:
    response = Response(client.send, "req-1", "mine", OPENAI)
    response.call = call
    return response


async def started(response: Response, kind: bytes = b"application/json") -> None:
    headers = [(b"content-type", kind), (b"content-length", b"9")]
    await response.send({"type": "http.response.start", "status": 200, "headers": headers})


async def part(response: Response, body: bytes, *, more: bool = True) -> None:
    await response.send({"type": "http.response.body", "body": body, "more_body": more})


async def test_whole_answer_gets_ids_and_results(response: Response, client: Client, call: Call):
    call.final = completed("run", request="req-1")
    await started(response)
    await part(response, b'{"choices":')
    await part(response, b"[]}", more=False)

    answer = msgspec.json.decode(client.body)
    assert (answer["choices"], answer["headway"]["request_id"]) == ([], "req-1")
    assert client.headers[b"content-length"] == str(len(client.body)).encode()
    assert client.headers[b"x-headway-request-id"] == b"req-1"
    assert client.headers[b"x-request-id"] == b"mine"
    assert response.outcome() is Outcome.COMPLETED


async def test_answers_that_are_no_json_objects_are_unchanged(
    response: Response, client: Client, call: Call
):
    call.final = completed("run", request="req-1")
    await started(response, b"application/octet-stream")
    await part(response, b"\x00\x01}", more=False)

    assert client.body == b"\x00\x01}"


async def test_failed_request_replaces_the_answer_of_the_application(
    response: Response, client: Client, call: Call
):
    call.failure = REFUSED
    await started(response)
    await part(response, b'{"error": "of the application"}', more=False)

    assert (client.status, client.headers[b"retry-after"]) == (429, b"2")
    assert msgspec.json.decode(client.body)["error"]["code"] == "over_capacity"
    assert response.outcome() is Outcome.REFUSED


async def test_status_line_of_a_stream_waits_for_its_first_part(
    response: Response, client: Client, call: Call
):
    await started(response, SSE)
    assert client.events == []
    call.failure = REFUSED
    await part(response, b'data: {"error": "of the application"}\n\n')
    await part(response, b"data: [DONE]\n\n", more=False)

    assert client.status == 429
    assert msgspec.json.decode(client.body)["error"]["code"] == "over_capacity"


async def test_last_chunk_of_a_stream_has_the_results(
    response: Response, client: Client, call: Call
):
    await started(response, SSE)
    await part(response, b'data: {"choices":[{"text":"a","finish_reason":null}]}\n\n')
    call.final = completed("run", request="req-1")
    await part(response, b'data: {"choices":[{"text":"b"}]}\n\n')
    await part(response, b'data: {"choices":[{"text":"","finish_reason":"stop"}]}\n\n')
    await part(response, b"data: [DONE]\n\n", more=False)

    *chunks, done, _ = client.body.split(b"\n\n")
    decoded = [msgspec.json.decode(each.removeprefix(b"data: ")) for each in chunks]
    assert done == b"data: [DONE]"
    assert ["headway" in each for each in decoded] == [False, False, True]


async def test_error_after_the_first_part_ends_the_stream(response: Response, client: Client):
    await started(response, SSE)
    await part(response, b"data: {}\n\n")
    assert await response.fail(ErrorInfo(message="late", code="timeout", status=504)) is (
        Outcome.TIMEOUT
    )
    await part(response, b"data: {}\n\n")

    assert client.status == 200
    assert client.body.count(b"data: ") == 2
    assert b'"code":"timeout"' in client.body


async def test_response_that_never_starts_counts_as_cancelled(response: Response):
    assert response.outcome() is Outcome.CANCELLED


async def test_stream_that_does_not_end_counts_as_cancelled(response: Response):
    await started(response, SSE)
    await part(response, b"data: {}\n\n")

    assert response.outcome() is Outcome.CANCELLED
