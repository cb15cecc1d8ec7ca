"""Makes, lists, requeues and deletes dead letters."""

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from shared.broker import topology
from shared.broker.protocol import Broker, Delivery, OutMessage, PublishOutcome, Settlement
from shared.broker.retry import publish_until_confirmed, publish_until_routed
from shared.broker.work_queues import WorkQueues
from shared.contracts.base import Decoder, encode
from shared.contracts.errors import ContractError, TransientError
from shared.contracts.lanes import LaneKey
from shared.contracts.requests import Attempts, QueuedRequest

_decode_queued: Decoder[QueuedRequest] = Decoder(QueuedRequest)
MAX_REASON_CHARS = 500


class DeadLetter(msgspec.Struct, frozen=True, kw_only=True):
    """Summary of one dead letter, without the prompt of its request."""

    id: str | None
    reason: str
    queue: str
    kind: str
    reply_to: str | None
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Death:
    """How the broker made a message a dead letter."""

    reason: str
    queue: str


def last_death(headers: Mapping[str, Any]) -> Death:
    """
    The last death of a message; the first may be that in a delay queue in which it has waited.

    RabbitMQ before 3.13 names the last one only in the first element of `x-death`.
    """
    if "x-last-death-reason" in headers:
        found: tuple[Any, Any] = headers["x-last-death-reason"], headers.get("x-last-death-queue")
    elif isinstance(deaths := headers.get("x-death"), list) and deaths:
        found = deaths[0].get("reason"), deaths[0].get("queue")
    else:
        found = headers.get("x-first-death-reason"), headers.get("x-first-death-queue")
    reason, queue = (str(each or "unknown") for each in found)
    return Death(reason, queue)


def describe(delivery: Delivery) -> DeadLetter:
    """Summary of a delivery of the dead-letter queue."""
    headers = delivery.headers
    death = last_death(headers)
    reason = headers.get(topology.REASON_HEADER) or death.reason
    queue = headers.get(topology.QUEUE_HEADER)
    if not queue and death.queue != "unknown":
        queue = death.queue
    return DeadLetter(
        id=delivery.message_id or delivery.correlation_id,
        reason=str(reason or "unknown"),
        queue=str(queue or delivery.routing_key),
        kind=delivery.kind,
        reply_to=delivery.reply_to,
        num_bytes=len(delivery.body),
    )


async def dead_letter(broker: Broker, message: OutMessage, *, queue: str, reason: str) -> None:
    """
    Publish a message to the dead letters.

    Args:
        message: The message, without headers about its failure.
        queue: Queue in which it was.
        reason: Why it cannot be served; a long one is cut.

    Raises:
        BrokerUnavailableError: The broker remained unavailable during all retries.
        MessageTooLargeError: The message is too large for the broker.
    """
    headers = {topology.REASON_HEADER: reason[:MAX_REASON_CHARS], topology.QUEUE_HEADER: queue}
    labelled = replace(message, headers={**message.headers, **headers})
    await publish_until_routed(broker, topology.DEAD, queue, labelled)


def copy_of(delivery: Delivery) -> OutMessage:
    """The message of a delivery, without its headers."""
    return OutMessage(
        body=delivery.body,
        kind=delivery.kind,
        message_id=delivery.message_id,
        correlation_id=delivery.correlation_id,
        reply_to=delivery.reply_to,
    )


Wanted = Callable[[DeadLetter], bool]
Action = Callable[[Broker, Delivery], Awaitable[Settlement]]
"""Handles a dead letter before the delivery is settled; returns the settlement of the delivery."""


async def keep(_broker: Broker, _delivery: Delivery) -> Settlement:
    """Keep the dead letter in the dead-letter queue."""
    return Settlement.REQUEUE


async def drop(_broker: Broker, _delivery: Delivery) -> Settlement:
    """Delete the dead letter permanently."""
    return Settlement.ACK


async def requeue(broker: Broker, delivery: Delivery) -> Settlement:
    """
    Publish the request of a dead letter again, with its attempts reset.

    An admitted request is published to its lane, any other request to the global queue.
    """
    try:
        request = _decode_queued(delivery.body)
        lane = LaneKey.parse(request.lane).queue_name
    except ContractError:  # no lane: the request was never admitted
        outcome = await publish_until_confirmed(
            broker, topology.REQUESTS, topology.REST_KEY, copy_of(delivery)
        )
    else:
        again = msgspec.structs.replace(request, lane=lane, attempts=Attempts())
        queues = WorkQueues(broker, "headway dead-letter requeue")
        outcome = await queues.publish(lane, replace(copy_of(delivery), body=encode(again)))
        await queues.close()
    if outcome is not PublishOutcome.CONFIRMED:
        raise TransientError(
            f"the broker did not accept the message: {outcome.value}; the dead letter stays"
        )
    return Settlement.ACK


async def process(
    broker: Broker, *, limit: int, wanted: Wanted, action: Action
) -> list[DeadLetter]:
    """
    Apply *action* to each of the first *limit* dead letters for which *wanted* is true.

    Other dead letters remain in the queue.

    Returns:
        Summaries of the selected dead letters.
    """
    letters: list[DeadLetter] = []
    # Get all dead letters before the first is published again, since it may return to this queue
    # immediately. Queues order returned messages by time of return.
    held = [delivery async for delivery in _take(broker, limit)]
    for delivery in held:
        letter = describe(delivery)
        how = Settlement.REQUEUE
        if wanted(letter):
            letters.append(letter)
            how = await action(broker, delivery)
        await delivery.settle(how)
    return letters


async def _take(broker: Broker, limit: int) -> AsyncIterator[Delivery]:
    for _ in range(limit):
        delivery = await broker.get(topology.DEAD_LETTERS)
        if delivery is None:
            return
        yield delivery
