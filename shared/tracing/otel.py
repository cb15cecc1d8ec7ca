"""Spans by OpenTelemetry's SDK. Only processes that export spans import this module."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from threading import Thread

import structlog
from opentelemetry import trace as api
from opentelemetry.context import Context
from opentelemetry.sdk.resources import SERVICE_NAME, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter

from shared.contracts.base import Seconds, UnixTime
from shared.tracing.attributes import Attribute, Attributes, exported
from shared.tracing.context import TraceContext, trace_of
from shared.tracing.spans import EndedSpan, Kind, current

CLOSE_S: Seconds = 3.0
"""Time within which the last spans are exported when a process ends."""
_UNKNOWN = "unknown_service"
_KINDS = {
    Kind.SERVER: api.SpanKind.SERVER,
    Kind.CONSUMER: api.SpanKind.CONSUMER,
    Kind.INTERNAL: api.SpanKind.INTERNAL,
}


class OtelSpan:
    """A span in progress."""

    def __init__(self, span: api.Span) -> None:
        self._span = span

    @property
    def is_exported(self) -> bool:
        return bool(self._span.is_recording())

    @property
    def context(self) -> TraceContext:
        own = self._span.get_span_context()
        ids = f"{own.trace_id:032x}-{own.span_id:016x}"
        return TraceContext(
            traceparent=f"00-{ids}-{own.trace_flags:02x}",
            tracestate=own.trace_state.to_header() or None,
        )

    def add(self, attributes: Attributes) -> None:
        if self.is_exported:
            self._span.set_attributes(exported(attributes))

    def fail(self, code: str) -> None:
        self._span.set_attributes(exported({Attribute.ERROR: code}))
        self._span.set_status(api.StatusCode.ERROR)


class OtelTracer:
    """
    Makes spans with a provider of its own, beside the global one of other libraries.

    Sampler, batches and limits are those of OpenTelemetry's environment variables.

    Args:
        service: Name of the service in its spans, unless the variables name it.
        exporter: Sends ended spans.
    """

    def __init__(self, service: str, exporter: SpanExporter) -> None:
        resource = Resource.create()
        if str(resource.attributes[SERVICE_NAME]).startswith(_UNKNOWN):
            resource = resource.merge(Resource({SERVICE_NAME: service}))
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("headway")

    @contextmanager
    def span(self, name: str, headers: Mapping[str, object], kind: Kind) -> Iterator[OtelSpan]:
        """As `Tracer.span`; an exception marks the span as failed with the exception's type."""
        begun = self._tracer.start_span(name, _context(trace_of(headers)), _KINDS[kind])
        span = OtelSpan(begun)
        if not span.is_exported:
            yield span
            return
        token = current.set(span)
        trace_id = api.format_trace_id(begun.get_span_context().trace_id)
        try:
            with structlog.contextvars.bound_contextvars(trace_id=trace_id):
                yield span
        except BaseException as error:
            span.fail(type(error).__name__)
            raise
        finally:
            current.reset(token)
            begun.end()

    def record(self, span: EndedSpan, parent: TraceContext) -> None:
        """As `Tracer.record`."""
        begun = self._tracer.start_span(
            span.name,
            _context(parent),
            _KINDS[span.kind],
            attributes=exported(span.attributes),
            start_time=_nanoseconds(span.began_at),
        )
        for event in span.events:
            begun.add_event(event.name, exported(event.attributes), _nanoseconds(event.at))
        if span.error is not None:
            OtelSpan(begun).fail(span.error)
        begun.end(_nanoseconds(span.ended_at))

    def close(self) -> None:
        """Export the spans that have ended, for at most `CLOSE_S`; the rest are lost."""
        closing = Thread(target=self._provider.shutdown, daemon=True)
        closing.start()
        closing.join(CLOSE_S)


def _context(parent: TraceContext | None) -> Context:
    """
    Context of the SDK with *parent*, which is valid.

    The SDK's propagator gives the same, and takes longer, since it parses the header again.
    """
    if parent is None:
        return Context()
    state = None if parent.tracestate is None else api.TraceState.from_header([parent.tracestate])
    sent = api.SpanContext(
        trace_id=int(parent.trace_id, 16),
        span_id=int(parent.span_id, 16),
        is_remote=True,
        trace_flags=api.TraceFlags(parent.flags),
        trace_state=state,
    )
    return api.set_span_in_context(api.NonRecordingSpan(sent), Context())


def _nanoseconds(at: UnixTime) -> int:
    return int(at * 1e9)
