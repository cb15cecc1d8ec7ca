"""Delivery of final replies: to the producer's reply queue, and to the store if it keeps them."""

from typing import Protocol

import structlog

from shared.broker import topology
from shared.broker.protocol import Broker, HeaderValue, OutMessage, PublishOutcome
from shared.broker.retry import publish_until_confirmed, publish_until_routed
from shared.contracts.base import TenantId, encode, tag_of
from shared.contracts.requests import Final, StoredWork

log = structlog.get_logger()


async def publish_final(
    broker: Broker,
    final: Final,
    *,
    reply_to: str | None,
    stored_for: TenantId | None = None,
    headers: dict[str, HeaderValue] | None = None,
) -> None:
    """
    Publish a final reply until the broker confirms it.

    A final reply for which no reply queue is bound goes to `headway.unclaimed`.

    Args:
        broker: The broker.
        final: The final reply.
        reply_to: Reply queue of the producer; None if it has none.
        stored_for: Tenant of the request, if the store keeps the final.
        headers: Headers of the copy for the store.

    Raises:
        BrokerUnavailableError: The broker remained unavailable during all retries.
        MessageTooLargeError: The broker refuses the size of the reply.
    """
    if reply_to is not None:
        await _publish(broker, reply_to, _message_of(final, {}))
    if stored_for is not None:
        own: dict[str, HeaderValue] = {topology.TENANT_HEADER: stored_for}
        await _publish(broker, topology.STORED, _message_of(final, own | (headers or {})))


class Storable(Protocol):
    """A request, as far as it determines whether the store keeps its final."""

    @property
    def tenant(self) -> TenantId: ...

    @property
    def stored(self) -> StoredWork | None: ...


def stored_for(request: Storable) -> TenantId | None:
    """Tenant of *request*, if the store keeps its final."""
    return None if request.stored is None else request.tenant


async def _publish(broker: Broker, queue: str, message: OutMessage) -> None:
    outcome = await publish_until_confirmed(broker, topology.REPLIES, queue, message)
    if outcome is not PublishOutcome.CONFIRMED:
        log.info("final.unclaimed", request_id=message.correlation_id, outcome=outcome.value)
        await publish_until_routed(broker, topology.UNCLAIMED, queue, message)


def _message_of(final: Final, headers: dict[str, HeaderValue]) -> OutMessage:
    return OutMessage(
        body=encode(final),
        kind=tag_of(type(final)),
        message_id=f"{final.request_id}/{final.run_id or 'failed'}",
        correlation_id=final.request_id,
        headers=headers,
    )
