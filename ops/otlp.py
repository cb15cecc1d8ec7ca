"""A receiver of traces by OTLP over HTTP, for tests and benches; it keeps what it gets."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)

from shared.contracts.base import UnixTime


@dataclass(frozen=True, slots=True, kw_only=True)
class ReceivedSpan:
    """One span, as it was exported."""

    service: str
    name: str
    trace_id: str
    span_id: str
    parent_id: str
    """Empty for a span that begins its trace."""
    began_at: UnixTime
    ended_at: UnixTime
    attributes: Mapping[str, Any]
    events: tuple[str, ...]
    """Names of its events, in order."""


@dataclass(slots=True, kw_only=True)
class OtlpReceiver:
    """What a receiver has got."""

    port: int
    spans: list[ReceivedSpan] = field(default_factory=list)
    bodies: list[bytes] = field(default_factory=list)
    """Bodies of all exports."""

    @property
    def variables(self) -> dict[str, str]:
        """Environment variables that make a process export to this receiver, within 0.1 s."""
        return {
            "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{self.port}",
            "OTEL_BSP_SCHEDULE_DELAY": "100",
            "NO_PROXY": "127.0.0.1",
        }

    def receive(self, body: bytes) -> None:
        """Keep the spans of one export."""
        self.bodies.append(body)
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            service = _attributes(resource.resource.attributes).get("service.name", "")
            for scope in resource.scope_spans:
                self.spans += (_received(span, str(service)) for span in scope.spans)


@contextmanager
def otlp_receiver() -> Iterator[OtlpReceiver]:
    """A receiver on a free port of 127.0.0.1, in threads of this process."""
    received = OtlpReceiver(port=0)
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(_Handler, received))
    received.port = server.server_address[1]
    thread = Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield received
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    """One connection of an exporter."""

    protocol_version = "HTTP/1.1"

    def __init__(self, received: OtlpReceiver, *arguments: Any) -> None:
        self._received = received
        super().__init__(*arguments)

    def do_POST(self) -> None:
        self._received.receive(self.rfile.read(int(self.headers["content-length"])))
        answer = ExportTraceServiceResponse().SerializeToString()
        self.send_response(HTTPStatus.OK)
        self.send_header("content-type", "application/x-protobuf")
        self.send_header("content-length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *_arguments: Any) -> None:
        """Print nothing."""


def _received(span: Any, service: str) -> ReceivedSpan:
    return ReceivedSpan(
        service=service,
        name=span.name,
        trace_id=span.trace_id.hex(),
        span_id=span.span_id.hex(),
        parent_id=span.parent_span_id.hex(),
        began_at=span.start_time_unix_nano / 1e9,
        ended_at=span.end_time_unix_nano / 1e9,
        attributes=_attributes(span.attributes),
        events=tuple(event.name for event in span.events),
    )


def _attributes(pairs: Any) -> dict[str, Any]:
    return {pair.key: _value(pair.value) for pair in pairs}


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return tuple(_value(each) for each in value.array_value.values)
    return None if kind is None else getattr(value, kind)
