"""A trace context, and a tracer whose spans a test reads."""

from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from shared.tracing.context import TraceContext
from shared.tracing.otel import OtelTracer

TRACE_ID = "0af7651916cd43dd8448eb211c80319c"
SPAN_ID = "b7ad6b7169203331"
TRACE = TraceContext(traceparent=f"00-{TRACE_ID}-{SPAN_ID}-01", tracestate="vendor=1")
UNSAMPLED = TraceContext(traceparent=f"00-{TRACE_ID}-{SPAN_ID}-00")


class Traces:
    """A tracer with its exported spans."""

    def __init__(self, service: str = "test") -> None:
        self._exporter = InMemorySpanExporter()
        self.tracer = OtelTracer(service, self._exporter)

    def spans(self) -> list[ReadableSpan]:
        """Close the tracer; return its spans in the order of their ends."""
        self.tracer.close()
        return list(self._exporter.get_finished_spans())

    def by_name(self) -> dict[str, ReadableSpan]:
        """Close the tracer; return the last span of each name."""
        return {span.name: span for span in self.spans()}


def ids(span: ReadableSpan) -> tuple[str, str | None]:
    """Ids of a span's trace and parent."""
    parent = None if span.parent is None else f"{span.parent.span_id:016x}"
    return f"{span.context.trace_id:032x}", parent
