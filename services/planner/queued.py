"""Requests in the form in which lanes, companions, inboxes and delay queues store them."""

from dataclasses import replace

from shared.broker import topology
from shared.broker.protocol import Broker, OutMessage, PublishOutcome
from shared.broker.retry import publish_until_confirmed
from shared.contracts.base import Seconds, UnixTime, encode
from shared.contracts.ends import expiration_s
from shared.contracts.errors import TransientError
from shared.contracts.requests import QueuedRequest


def queued_message(request: QueuedRequest, now: UnixTime) -> OutMessage:
    """Create the message that puts *request* into a work queue now, where it lasts to its end."""
    return OutMessage(
        body=encode(request),
        kind="request.queued.v1",
        message_id=request.request_id,
        correlation_id=request.request_id,
        reply_to=request.reply_to,
        expiration_s=expiration_s(request, now),
    )


def held_for_s(request: QueuedRequest, now: UnixTime) -> Seconds:
    """
    Time until *request* may begin; 0 if it may begin now.

    A request with `not_before` has this time as its arrival, since its targets count from it.
    """
    return max(0.0, request.arrived_at - now)


async def hold(broker: Broker, request: QueuedRequest, now: UnixTime, left_s: Seconds) -> None:
    """
    Put *request* into the delay queue with the longest delay that is not above *left_s*; the
    shortest one makes it at most a quarter of a second late.

    Raises:
        TransientError: The broker did not accept the request.
    """
    queue = topology.delay_queue(left_s)
    # The message needs no lifetime of its own: the request ends later than it may begin.
    message = replace(queued_message(request, now), expiration_s=None)
    outcome = await publish_until_confirmed(broker, topology.LANES, queue.name, message)
    if outcome is PublishOutcome.UNROUTABLE:
        await topology.declare_delay_queue(broker, queue)
        outcome = await publish_until_confirmed(broker, topology.LANES, queue.name, message)
    if outcome is not PublishOutcome.CONFIRMED:
        raise TransientError(f"{queue.name} did not accept the request: {outcome.value}")
