"""Spans of HTTP requests, and the context that the gateway passes on."""

from collections.abc import Mapping
from typing import Any

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.trace import SpanKind, StatusCode

from services.gateway.tracing import Traced
from shared.tracing.context import TraceContext, trace_of
from tests.tracing.spans import SPAN_ID, TRACE, TRACE_ID, UNSAMPLED, Traces, ids
from tests.unit.gateway.rig import scope_of

CHAT = "/v1/chat/completions"
NO_HEADERS: Mapping[str, str] = {}


class Answering:
    """An application that answers with one status, and keeps the headers that it got."""

    def __init__(self, status: int = 200) -> None:
        self.status = status
        self.headers: list[tuple[bytes, bytes]] = []

    @property
    def context(self) -> TraceContext | None:
        return trace_of({name.decode(): value.decode() for name, value in self.headers})

    async def __call__(self, scope: Any, _receive: Any, send: Any) -> None:
        self.headers = scope["headers"]
        own = [(b"x-headway-request-id", b"req-1")]
        await send({"type": "http.response.start", "status": self.status, "headers": own})
        await send({"type": "http.response.body", "body": b"secret answer"})


async def answered(
    application: Any,
    traces: Traces,
    path: str = CHAT,
    headers: Mapping[str, str] = NO_HEADERS,
    method: str = "POST",
) -> list[ReadableSpan]:
    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b"secret prompt"}

    async def send(_event: Any) -> None:
        pass

    raw = [(name.encode(), value.encode()) for name, value in headers.items()]
    scope = scope_of(path, *raw, method=method)
    await Traced(application, traces.tracer)(scope, receive, send)
    return traces.spans()


async def test_span_of_a_request_is_the_parent_of_what_follows():
    application = Answering()
    (span,) = await answered(application, Traces())

    assert (span.name, span.kind) == (f"POST {CHAT}", SpanKind.SERVER)
    assert application.context is not None
    assert ids(span) == (application.context.trace_id, None)
    assert application.context.traceparent[36:52] == f"{span.context.span_id:016x}"
    assert dict(span.attributes or {}) == {
        "http.request.method": "POST",
        "http.route": CHAT,
        "http.response.status_code": 200,
        "headway.request.id": "req-1",
    }


async def test_context_of_a_client_is_honoured_and_replaced_once():
    application = Answering()
    sent = {"authorization": "Bearer secret", **TRACE.headers}
    (span,) = await answered(application, Traces(), headers=sent)

    assert ids(span) == (TRACE_ID, SPAN_ID)
    names = [name for name, _ in application.headers]
    assert sorted(names) == [b"authorization", b"traceparent", b"tracestate"]
    assert application.context is not None
    assert application.context.tracestate == TRACE.tracestate
    assert "secret" not in str(span.to_json())


async def test_decision_of_a_client_not_to_sample_is_passed_on():
    application = Answering()

    assert await answered(application, Traces(), headers=UNSAMPLED.headers) == []
    assert application.context is not None
    assert (application.context.trace_id, application.context.is_sampled) == (TRACE_ID, False)


@pytest.mark.parametrize(
    ("status", "is_error"), [(200, False), (404, False), (429, False), (500, True), (503, True)]
)
async def test_errors_of_the_server_fail_the_span(status: int, is_error: bool):  # noqa: FBT001
    (span,) = await answered(Answering(status), Traces())

    assert (span.status.status_code is StatusCode.ERROR) == is_error


@pytest.mark.parametrize(
    ("method", "path"), [("GET", "/metrics"), ("GET", CHAT), ("POST", "/v1/files")]
)
async def test_other_requests_have_no_span_and_keep_their_headers(method: str, path: str):
    application = Answering()

    assert await answered(application, Traces(), path, TRACE.headers, method) == []
    assert application.context == TRACE
