"""Spans by OpenTelemetry's SDK."""

import pytest
import structlog
from opentelemetry.trace import SpanKind, StatusCode

from shared.tracing.attributes import Attribute
from shared.tracing.context import trace_of
from shared.tracing.spans import EndedSpan, Event, Kind, current_span
from tests.tracing.spans import SPAN_ID, TRACE, TRACE_ID, UNSAMPLED, Traces, ids


def bound() -> dict[str, object]:
    return structlog.contextvars.get_contextvars()


def test_span_without_a_parent_begins_a_trace():
    traces = Traces()
    with traces.tracer.span("group", {}, Kind.CONSUMER) as span:
        context = span.context
        span.add({Attribute.TENANT: "acme"})
    (ended,) = traces.spans()

    assert ids(ended) == (context.trace_id, None)
    assert (ended.name, ended.kind) == ("group", SpanKind.CONSUMER)
    assert ended.attributes == {"headway.tenant": "acme"}
    assert trace_of(context.headers) == context


def test_span_continues_the_trace_of_its_parent_with_its_state():
    traces = Traces()
    with traces.tracer.span("group", TRACE.headers, Kind.CONSUMER) as span:
        context = span.context
    (ended,) = traces.spans()

    assert ids(ended) == (TRACE_ID, SPAN_ID)
    assert (context.trace_id, context.tracestate) == (TRACE_ID, "vendor=1")
    assert context.traceparent != TRACE.traceparent


def test_span_of_a_trace_that_is_not_sampled_is_neither_exported_nor_current():
    traces = Traces()
    with traces.tracer.span("group", UNSAMPLED.headers, Kind.CONSUMER) as span:
        context, present, logged = span.context, current_span(), bound()

    assert traces.spans() == []
    assert (context.trace_id, context.is_sampled) == (TRACE_ID, False)
    assert (present, "trace_id" in logged) == (None, False)


def test_sampler_decides_where_a_trace_begins(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "parentbased_traceidratio")
    monkeypatch.setenv("OTEL_TRACES_SAMPLER_ARG", "0")
    traces = Traces()
    with traces.tracer.span("begun", {}, Kind.SERVER) as span:
        is_sampled = span.context.is_sampled
    with traces.tracer.span("continued", TRACE.headers, Kind.SERVER):
        pass

    assert not is_sampled
    assert [each.name for each in traces.spans()] == ["continued"]


def test_logs_have_the_trace_id_during_an_exported_span():
    traces = Traces()
    with traces.tracer.span("group", TRACE.headers, Kind.CONSUMER) as span:
        during, present = bound(), current_span()

    assert (during["trace_id"], present) == (TRACE_ID, span)
    assert ("trace_id" in bound(), current_span()) == (False, None)


def test_exception_marks_the_span_without_its_text():
    traces = Traces()
    with (
        pytest.raises(ValueError, match="secret"),
        traces.tracer.span("group", TRACE.headers, Kind.CONSUMER),
    ):
        raise ValueError("a secret of the prompt")
    (ended,) = traces.spans()

    assert (ended.status.status_code, ended.status.description) == (StatusCode.ERROR, None)
    assert ended.attributes == {"error.type": "ValueError"}
    assert list(ended.events) == []


def test_recorded_span_has_the_given_times_events_and_error():
    traces = Traces()
    span = EndedSpan(
        name="wait",
        kind=Kind.INTERNAL,
        began_at=1.5,
        ended_at=3.0,
        attributes={Attribute.HOP: 2},
        events=[Event("evicted", 2.5, {Attribute.REASON: "room"})],
        error="cancelled",
    )
    traces.tracer.record(span, TRACE)
    (ended,) = traces.spans()

    assert ids(ended) == (TRACE_ID, SPAN_ID)
    assert (ended.start_time, ended.end_time) == (1_500_000_000, 3_000_000_000)
    assert ended.attributes == {"headway.hop": 2, "error.type": "cancelled"}
    (event,) = ended.events
    assert (event.name, event.timestamp) == ("evicted", 2_500_000_000)
    assert event.attributes == {"headway.reason": "room"}
    assert ended.status.status_code is StatusCode.ERROR


def test_service_has_its_name_unless_the_variables_name_it(monkeypatch: pytest.MonkeyPatch):
    span = EndedSpan(name="x", kind=Kind.INTERNAL, began_at=1.0, ended_at=1.0, attributes={})

    def named() -> object:
        traces = Traces("headway-agent")
        traces.tracer.record(span, TRACE)
        return traces.spans()[0].resource.attributes["service.name"]

    own = named()
    monkeypatch.setenv("OTEL_SERVICE_NAME", "mesh")

    assert (own, named()) == ("headway-agent", "mesh")
