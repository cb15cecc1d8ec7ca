"""Spans of a request on an instance."""

from typing import Any

from opentelemetry.sdk.trace import ReadableSpan

from shared.contracts.base import InstanceId
from shared.contracts.requests import HistoryEntry, Progress, QueuedRequest
from shared.tracing.stays import Stay, record_stay, record_wait
from tests.clocks import NOW
from tests.deliveries import LooseDelivery
from tests.queued import a_request
from tests.tracing.spans import SPAN_ID, TRACE, TRACE_ID, UNSAMPLED, Traces, ids

HERE, THERE = InstanceId("here"), InstanceId("there")


def traced(**fields: Any) -> QueuedRequest:
    return a_request("r", traceparent=TRACE.traceparent, **fields)


def entry(what: str, at: float, instance_id: InstanceId = HERE, why: str = "") -> HistoryEntry:
    return HistoryEntry(at=at, instance_id=instance_id, what=what, why=why)


def waited(request: QueuedRequest, pulled_at: float, **delivery: Any) -> ReadableSpan:
    traces = Traces()
    sent = LooseDelivery(body=b"", **delivery)
    record_wait(traces.tracer, request, sent, instance_id=HERE, pulled_at=pulled_at)
    (span,) = traces.spans()
    return span


def stayed(request: QueuedRequest, **fields: Any) -> ReadableSpan:
    traces = Traces()
    values: dict[str, Any] = {
        "pulled_at": NOW + 1.0,
        "submitted_at": NOW + 2.0,
        "first_token_at": NOW + 3.0,
        "ended_at": NOW + 4.0,
        "outcome": "completed",
        "num_tokens": 7,
        "observed": None,
        "error": None,
    }
    stay = Stay(request=request, **(values | fields))
    record_stay(traces.tracer, TRACE, stay, instance_id=HERE)
    (span,) = traces.spans()
    return span


def times(span: ReadableSpan) -> tuple[float, float]:
    assert span.start_time is not None
    assert span.end_time is not None
    return round(span.start_time / 1e9 - NOW, 3), round(span.end_time / 1e9 - NOW, 3)


def events(span: ReadableSpan) -> list[tuple[str, float]]:
    return [(event.name, round(event.timestamp / 1e9 - NOW, 3)) for event in span.events]


def test_wait_lasts_from_grouping_to_the_pull():
    span = waited(traced(hop=0), NOW + 2.0, queue="lane.x")

    assert (span.name, ids(span), times(span)) == ("wait", (TRACE_ID, SPAN_ID), (0.0, 2.0))
    assert span.attributes is not None
    assert span.attributes["messaging.destination.name"] == "lane.x"
    assert span.attributes["headway.instance"] == "here"


def test_wait_of_a_requeued_request_begins_at_its_requeueing():
    request = traced(hop=1, history=(entry("evicted", NOW + 5.0, THERE),))

    assert times(waited(request, NOW + 7.0)) == (5.0, 7.0)


def test_wait_after_a_lost_run_contains_it_and_counts_the_deliveries():
    span = waited(traced(), NOW + 9.0, delivery_count=1)

    assert times(span) == (0.0, 9.0)
    assert span.attributes is not None
    assert span.attributes["headway.deliveries"] == 1


def test_wait_does_not_end_before_it_begins_if_clocks_differ():
    assert times(waited(traced(grouped_at=NOW + 3.0), NOW + 2.0)) == (2.0, 2.0)


def test_wait_of_a_request_that_is_not_sampled_is_not_recorded():
    traces = Traces()
    for request in (a_request(), a_request(traceparent=UNSAMPLED.traceparent)):
        delivery = LooseDelivery(body=b"")
        record_wait(traces.tracer, request, delivery, instance_id=HERE, pulled_at=NOW)

    assert traces.spans() == []


def test_stay_has_the_name_of_what_was_asked_and_its_events_in_order():
    history = (
        entry("evicted", NOW + 0.5, THERE),
        entry("swapped out", NOW + 3.2, why="for q"),
        entry("resumed", NOW + 3.6),
    )
    span = stayed(traced(history=history))

    assert (span.name, times(span)) == ("text_completion tiny-llama", (1.0, 4.0))
    assert events(span) == [
        ("submitted", 2.0),
        ("first_token", 3.0),
        ("swapped_out", 3.2),
        ("resumed", 3.6),
    ]
    assert dict(span.events[2].attributes or {}) == {"headway.reason": "for q"}


def test_stay_that_continues_an_answer_begins_with_its_resumption():
    request = traced(hop=1, progress=Progress(token_ids=(1, 2), first_token_at=NOW))
    span = stayed(request, first_token_at=NOW)

    assert events(span) == [("resumed", 2.0)]
    assert span.attributes is not None
    assert (span.attributes["headway.hop"], span.attributes["headway.earlier_tokens"]) == (1, 2)


def test_stay_without_a_run_has_only_the_reason_for_its_end():
    request = traced(history=(entry("relegated", NOW + 1.5, why="it cannot meet its deadline"),))
    span = stayed(request, submitted_at=0.0, first_token_at=None, outcome="relegated")

    assert events(span) == [("relegated", 1.5)]
