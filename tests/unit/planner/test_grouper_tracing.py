"""Spans of groupers, and the context that requests have in lanes."""

from collections.abc import Mapping

import pytest
from opentelemetry.trace import StatusCode

from shared.tracing.context import TraceContext, context_of
from shared.tracing.grouping import traced
from tests.tracing.spans import SPAN_ID, TRACE, TRACE_ID, UNSAMPLED, Traces, ids
from tests.unit.planner.rig import BODY, NO_HEADERS, GrouperRig


async def grouped(
    rig: GrouperRig, traces: Traces | None, headers: Mapping[str, str] = NO_HEADERS
) -> TraceContext | None:
    """Let the grouper handle a request with *headers*; return its context in its lane."""
    await rig.publish(BODY, message_id="m1", headers=headers)
    handler = traced(None if traces is None else traces.tracer, rig.grouper.on_request)
    await handler(await rig.pull())
    return context_of(await rig.queued())


async def test_context_of_a_producer_is_the_parent_and_reaches_the_lane(rig: GrouperRig):
    traces = Traces()
    context = await grouped(rig, traces, TRACE.headers)
    (span,) = traces.spans()

    assert ids(span) == (TRACE_ID, SPAN_ID)
    assert context == TraceContext(
        traceparent=f"00-{TRACE_ID}-{span.context.span_id:016x}-01", tracestate=TRACE.tracestate
    )
    assert span.attributes is not None
    assert span.attributes["gen_ai.request.model"] == BODY["model"]
    assert span.attributes["headway.request.id"] == "m1"


async def test_trace_of_a_producer_without_a_context_begins_at_the_grouper(rig: GrouperRig):
    traces = Traces()
    context = await grouped(rig, traces)
    (span,) = traces.spans()

    assert context is not None
    assert ids(span) == (context.trace_id, None)


async def test_decision_not_to_sample_is_made_once_and_travels(
    rig: GrouperRig, monkeypatch: pytest.MonkeyPatch
):
    sent = Traces()
    assert await grouped(rig, sent, UNSAMPLED.headers) == UNSAMPLED
    assert sent.spans() == []

    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "always_off")
    own = Traces()
    await rig.publish(BODY, message_id="m2")
    await traced(own.tracer, rig.grouper.on_request)(await rig.pull())
    context = context_of(await rig.queued())

    assert context is not None
    assert not context.is_sampled
    assert own.spans() == []


async def test_context_is_passed_on_without_tracing(rig: GrouperRig):
    assert await grouped(rig, None, TRACE.headers) == TRACE


async def test_request_of_a_mesh_without_tracing_has_no_context(rig: GrouperRig):
    assert await grouped(rig, None) is None


async def test_refused_request_has_a_failed_span_with_the_code(rig: GrouperRig):
    traces = Traces()
    await rig.publish(BODY | {"max_tokens": 0}, headers=TRACE.headers)
    await traced(traces.tracer, rig.grouper.on_request)(await rig.pull())
    (span,) = traces.spans()

    assert span.status.status_code is StatusCode.ERROR
    assert span.attributes is not None
    assert span.attributes["error.type"] == "invalid_request"
