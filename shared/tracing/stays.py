"""The spans of a request on an instance: its wait in a queue before, and its stay."""

from collections.abc import Iterator
from dataclasses import dataclass

from shared.broker.protocol import Delivery
from shared.contracts.base import InstanceId, UnixTime
from shared.contracts.requests import QueuedRequest
from shared.contracts.telemetry import RequestObserved
from shared.tracing.attributes import Attribute, AttributeValue, answered, asked, operation_of
from shared.tracing.context import TraceContext
from shared.tracing.spans import EndedSpan, Event, Kind, Tracer, sampled_trace

WAIT = "wait"
SUBMITTED, RESUMED, FIRST_TOKEN = "submitted", "resumed", "first_token"


def record_wait(
    tracer: Tracer,
    request: QueuedRequest,
    delivery: Delivery,
    *,
    instance_id: InstanceId,
    pulled_at: UnixTime,
) -> None:
    """
    Export the wait of a request that an instance has pulled, if its trace is exported.

    The wait begins when the request is known to have entered a queue: at its grouping, or at the
    last entry of its history. The run of an instance that was killed has neither an end nor an
    entry, so that the wait contains it.
    """
    trace = sampled_trace(request)
    if trace is None:
        return
    last_at = request.history[-1].at if request.history else request.grouped_at
    span = EndedSpan(
        name=WAIT,
        kind=Kind.CONSUMER,
        began_at=min(pulled_at, max(request.grouped_at, last_at)),
        ended_at=pulled_at,
        attributes=_hop(request, instance_id)
        | {
            Attribute.REQUEST_ID: request.request_id,
            Attribute.MESSAGING: "rabbitmq",
            Attribute.QUEUE: delivery.queue,
            Attribute.DELIVERIES: delivery.delivery_count,
        },
    )
    tracer.record(span, trace)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stay:
    """The time of a request on one instance, which has ended."""

    request: QueuedRequest
    """The request as it was pulled, with the history of its stay."""
    pulled_at: UnixTime
    submitted_at: UnixTime
    """Begin of the last run; 0 if the request did not run."""
    first_token_at: UnixTime | None
    """First token of the answer, of any run."""
    ended_at: UnixTime
    outcome: str
    """How it left the instance."""
    num_tokens: int
    """Number of tokens that all runs have generated."""
    observed: RequestObserved | None
    """The end of the request; None if it runs again."""
    error: str | None
    """Code of the error if the request failed."""


def record_stay(
    tracer: Tracer, trace: TraceContext, stay: Stay, *, instance_id: InstanceId
) -> None:
    """Export the stay of a request with a sampled context on an instance."""
    request, observed = stay.request, stay.observed
    ended = {} if observed is None else answered(observed, stay.num_tokens)
    span = EndedSpan(
        name=f"{operation_of(request)} {request.model.name}",
        kind=Kind.INTERNAL,
        began_at=stay.pulled_at,
        ended_at=max(stay.pulled_at, stay.ended_at),
        attributes=asked(request)
        | _hop(request, instance_id)
        | {Attribute.OUTCOME: stay.outcome}
        | ended,
        events=sorted(_events(stay, instance_id), key=lambda event: event.at),
        error=stay.error,
    )
    tracer.record(span, trace)


def _hop(request: QueuedRequest, instance_id: InstanceId) -> dict[Attribute, AttributeValue]:
    return {
        Attribute.INSTANCE: instance_id,
        Attribute.HOP: request.attempts.hop,
        Attribute.EARLIER_TOKENS: request.progress.num_tokens,
    }


def _events(stay: Stay, instance_id: InstanceId) -> Iterator[Event]:
    """What happened during a stay; interruptions are those of the request's history."""
    request = stay.request
    if stay.submitted_at:
        yield Event(RESUMED if request.progress.num_tokens else SUBMITTED, stay.submitted_at)
    if stay.first_token_at is not None and stay.first_token_at >= stay.pulled_at:
        yield Event(FIRST_TOKEN, stay.first_token_at)
    for entry in request.history:
        if entry.instance_id == instance_id and entry.at >= stay.pulled_at:
            reason = {Attribute.REASON: entry.why} if entry.why else {}
            yield Event(entry.what.replace(" ", "_"), entry.at, reason)
