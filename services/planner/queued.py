"""Requests in the form in which lanes, companions and inboxes store them."""

from shared.broker.protocol import OutMessage
from shared.contracts.base import encode
from shared.contracts.requests import QueuedRequest


def queued_message(request: QueuedRequest) -> OutMessage:
    """Create the message that puts *request* into a work queue."""
    return OutMessage(
        body=encode(request),
        kind="request.queued.v1",
        message_id=request.request_id,
        correlation_id=request.request_id,
        reply_to=request.reply_to,
    )
