"""Requests in the form in which lanes, companions and inboxes store them."""

from shared.broker.protocol import OutMessage
from shared.contracts.base import UnixTime, encode
from shared.contracts.ends import expiration_s
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
