"""Looking into the dead letters, giving them another chance, dropping them."""

from collections.abc import AsyncIterator, Awaitable, Callable

import msgspec

from shared.broker import topology
from shared.broker.protocol import Broker, Delivery, OutMessage, PublishOutcome, Settlement
from shared.broker.retry import publish_until_confirmed
from shared.contracts.base import Decoder, encode
from shared.contracts.errors import ContractError, TransientError
from shared.contracts.lanes import LaneKey
from shared.contracts.requests import Attempts, QueuedRequest

_decode_queued: Decoder[QueuedRequest] = Decoder(QueuedRequest)


class DeadLetter(msgspec.Struct, frozen=True, kw_only=True):
    """One dead letter, for people. No prompt."""

    id: str | None
    reason: str
    queue: str
    kind: str
    reply_to: str | None
    num_bytes: int


def describe(delivery: Delivery) -> DeadLetter:
    """What a delivery of the dead-letter queue is."""
    headers = delivery.headers
    reason = headers.get(topology.REASON_HEADER) or headers.get("x-first-death-reason")
    queue = headers.get("headway-queue") or headers.get("x-first-death-queue")
    return DeadLetter(
        id=delivery.message_id or delivery.correlation_id,
        reason=str(reason or "unknown"),
        queue=str(queue or delivery.routing_key),
        kind=delivery.kind,
        reply_to=delivery.reply_to,
        num_bytes=len(delivery.body),
    )


Wanted = Callable[[DeadLetter], bool]


async def peek(broker: Broker, *, limit: int, wanted: Wanted) -> list[DeadLetter]:
    """Those *wanted* of the first *limit* dead letters; all stay where they are."""
    letters = []
    held = [delivery async for delivery in _take(broker, limit)]
    for delivery in held:  # queues give back in the order of return
        letters.append(describe(delivery))
        await delivery.settle(Settlement.REQUEUE)
    return [letter for letter in letters if wanted(letter)]


async def requeue(broker: Broker, *, limit: int, wanted: Wanted) -> list[DeadLetter]:
    """
    Publish those *wanted* of the first *limit* dead letters again, with a clean record.

    A request that had been admitted goes to its lane, anything else to the global queue.
    """

    async def again(delivery: Delivery) -> None:
        await _publish_again(broker, delivery)

    return await _remove(broker, limit=limit, wanted=wanted, before=again)


async def drop(broker: Broker, *, limit: int, wanted: Wanted) -> list[DeadLetter]:
    """Delete those *wanted* of the first *limit* dead letters for good."""

    async def nothing(delivery: Delivery) -> None:
        pass

    return await _remove(broker, limit=limit, wanted=wanted, before=nothing)


async def _remove(
    broker: Broker,
    *,
    limit: int,
    wanted: Wanted,
    before: Callable[[Delivery], Awaitable[None]],
) -> list[DeadLetter]:
    """Take those *wanted* off the queue, each once *before* is done with it; the others stay."""
    removed: list[DeadLetter] = []
    kept: list[Delivery] = []
    # All are taken before the first is published again: it may be back among them at once.
    held = [delivery async for delivery in _take(broker, limit)]
    for delivery in held:
        letter = describe(delivery)
        if not wanted(letter):
            kept.append(delivery)
            continue
        await before(delivery)
        await delivery.settle(Settlement.ACK)
        removed.append(letter)
    for delivery in kept:
        await delivery.settle(Settlement.REQUEUE)
    return removed


async def _take(broker: Broker, limit: int) -> AsyncIterator[Delivery]:
    for _ in range(limit):
        delivery = await broker.get(topology.DEAD_LETTERS)
        if delivery is None:
            return
        yield delivery


async def _publish_again(broker: Broker, delivery: Delivery) -> None:
    exchange, key, body = topology.REQUESTS, topology.REST_KEY, delivery.body
    try:
        request = _decode_queued(delivery.body)
        # Its own lane may be of edges that have been replaced.
        lane = LaneKey.parse(request.lane).lasting.queue_name
    except ContractError:
        pass  # never admitted: it goes through the front door again
    else:
        exchange, key = topology.LANES, lane
        body = encode(msgspec.structs.replace(request, lane=lane, attempts=Attempts()))
        await topology.declare_work_queue(broker, lane)
    outcome = await publish_until_confirmed(
        broker,
        exchange,
        key,
        OutMessage(
            body=body,
            kind=delivery.kind,
            message_id=delivery.message_id,
            correlation_id=delivery.correlation_id,
            reply_to=delivery.reply_to,
        ),
    )
    if outcome is not PublishOutcome.CONFIRMED:
        raise TransientError(f"{exchange} took nothing: {outcome.value}; the dead letter stays")
