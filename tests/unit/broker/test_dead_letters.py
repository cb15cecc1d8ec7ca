"""Listing and requeueing dead letters."""

from collections.abc import AsyncIterator

import pytest

from shared.broker import topology
from shared.broker.dead_letters import (
    DeadLetter,
    copy_of,
    dead_letter,
    drop,
    keep,
    process,
    requeue,
)
from shared.broker.memory.hub import MemoryHub
from shared.broker.work_queues import stored_message
from shared.contracts.base import Decoder
from shared.contracts.errors import MeshError
from shared.contracts.requests import Attempts, Progress, QueuedRequest
from tests.deliveries import LooseDelivery, UnreliableBroker
from tests.queued import a_request

decode: Decoder[QueuedRequest] = Decoder(QueuedRequest)


@pytest.fixture
async def broker() -> AsyncIterator[UnreliableBroker]:
    async with UnreliableBroker(MemoryHub()) as opened:
        await topology.declare(opened)
        yield opened


async def refused(broker: UnreliableBroker, name: str) -> None:
    """Publish a dead letter as a grouper does for a request that it refuses."""
    delivery = LooseDelivery(
        body=b'{"model": "m"}', message_id=name, queue=topology.GLOBAL_REST, reply_to="r"
    )
    letter = copy_of(delivery)
    await dead_letter(broker, letter, queue=delivery.queue, reason=f"bad: {name}")


async def poisoned(broker: UnreliableBroker, request: QueuedRequest) -> None:
    """Publish a dead letter as an agent does for a poison request."""
    letter = stored_message(request)
    await dead_letter(broker, letter, queue=request.lane, reason="poison_request: x")


def everything(_letter: DeadLetter) -> bool:
    return True


async def ids(broker: UnreliableBroker, limit: int = 100) -> list[str | None]:
    return [
        letter.id for letter in await process(broker, limit=limit, action=keep, wanted=everything)
    ]


async def test_peek_shows_content_queue_and_reason(broker: UnreliableBroker):
    await refused(broker, "a")
    (letter,) = await process(broker, limit=10, action=keep, wanted=everything)
    assert letter == DeadLetter(
        id="a",
        reason="bad: a",
        queue=topology.GLOBAL_REST,
        kind="",
        reply_to="r",
        num_bytes=14,
    )


async def test_peek_changes_neither_order_nor_number(broker: UnreliableBroker):
    for name in "abcde":
        await refused(broker, name)
    for limit in (1, 3, 5, 50):
        assert await ids(broker, limit) == list("abcde")[:limit]
        assert await broker.ready(topology.DEAD_LETTERS) == 5


async def test_hundreds_of_listings_lose_no_dead_letter(broker: UnreliableBroker):
    await refused(broker, "a")
    for _ in range(topology.DELIVERY_LIMIT * 3):
        await process(broker, limit=1, action=keep, wanted=everything)
    assert await ids(broker) == ["a"]


async def test_empty_queue_is_handled(broker: UnreliableBroker):
    assert await process(broker, limit=5, action=keep, wanted=everything) == []
    assert await process(broker, limit=5, action=requeue, wanted=everything) == []


async def test_refused_message_goes_to_the_global_queue_again(broker: UnreliableBroker):
    await refused(broker, "a")
    (moved,) = await process(broker, limit=10, action=requeue, wanted=everything)
    assert moved.id == "a"
    again = await broker.take(topology.GLOBAL_REST)
    assert (again.body, again.message_id, again.reply_to) == (b'{"model": "m"}', "a", "r")
    assert topology.REASON_HEADER not in again.headers
    assert await broker.ready(topology.DEAD_LETTERS) == 0


async def test_admitted_request_goes_to_its_lane_with_reset_attempts(broker: UnreliableBroker):
    progress = Progress(token_ids=(20, 21))
    request = a_request("r", crashes=3, hop=7, progress=progress, reply_to="x")
    await poisoned(broker, request)
    await process(broker, limit=10, action=requeue, wanted=everything)
    again = decode((await broker.take(request.lane)).body)
    assert (again.attempts, again.progress, again.reply_to) == (Attempts(), progress, "x")


async def test_only_selected_dead_letters_move_and_others_keep_their_order(
    broker: UnreliableBroker,
):
    for name in "abcde":
        await refused(broker, name)
    moved = await process(
        broker, limit=100, action=requeue, wanted=lambda letter: letter.id in ("b", "d")
    )
    assert [letter.id for letter in moved] == ["b", "d"]
    assert await ids(broker) == ["a", "c", "e"]
    assert await broker.ready(topology.GLOBAL_REST) == 2


async def test_only_wanted_letters_are_shown_or_deleted(broker: UnreliableBroker):
    for name in "abcde":
        await refused(broker, name)
    seen = await process(broker, limit=100, action=keep, wanted=lambda letter: letter.id == "c")
    dropped = await process(broker, limit=100, action=drop, wanted=lambda letter: letter.id == "b")
    await process(broker, limit=2, action=drop, wanted=everything)

    assert ([letter.id for letter in seen], [letter.id for letter in dropped]) == (["c"], ["b"])
    assert await ids(broker) == ["d", "e"]
    assert await broker.ready(topology.GLOBAL_REST) == 0


async def test_no_more_letters_than_the_limit_are_read(broker: UnreliableBroker):
    for name in "abc":
        await refused(broker, name)
    await process(broker, limit=2, action=requeue, wanted=everything)
    assert await ids(broker) == ["c"]


async def test_unpublishable_letter_stays(broker: UnreliableBroker):
    await refused(broker, "a")
    await broker.delete_queue(topology.GLOBAL_REST)
    with pytest.raises(MeshError, match="stays"):
        await process(broker, limit=10, action=requeue, wanted=everything)
    broker.drop_connection()
    assert await ids(broker) == ["a"]
