"""Spans of groupers: from the delivery of a request to its lane, or its refusal."""

from functools import partial

from shared.broker.protocol import Delivery, DeliveryHandler
from shared.contracts.requests import QueuedRequest
from shared.tracing.attributes import Attribute, admitted
from shared.tracing.context import trace_of
from shared.tracing.spans import Kind, Tracer, current_span

GROUP = "group"


def traced(tracer: Tracer | None, handler: DeliveryHandler) -> DeliveryHandler:
    """Handler that makes a span of each delivery that *handler* handles."""
    return handler if tracer is None else partial(_handle, tracer, handler)


async def _handle(tracer: Tracer, handler: DeliveryHandler, delivery: Delivery) -> None:
    """Handle *delivery*, whose headers then have the context of the span."""
    sent = trace_of(delivery.headers)
    if sent is not None and not sent.is_sampled:
        await handler(delivery)
        return
    # A request without a context came from a producer that does not trace: its trace begins here.
    with tracer.span(GROUP, delivery.headers, Kind.CONSUMER) as span:
        span.add({Attribute.MESSAGING: "rabbitmq", Attribute.QUEUE: delivery.queue})
        delivery.headers = {**delivery.headers, **span.context.headers}
        await handler(delivery)


def note_placed(request: QueuedRequest) -> None:
    """Add the attributes of a request that was put into a queue to the present span."""
    if (span := current_span()) is not None:
        span.add(admitted(request))


def note_refused(code: str) -> None:
    """Mark the present span as failed."""
    if (span := current_span()) is not None:
        span.fail(code)
