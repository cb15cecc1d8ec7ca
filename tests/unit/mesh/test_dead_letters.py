"""Looking into the dead letters, and giving them another chance."""

from collections.abc import AsyncIterator

import pytest

from services.mesh.dead_letters import DeadLetter, drop, peek, requeue
from services.planner.refusals import bury
from shared.broker import topology
from shared.broker.memory_hub import MemoryHub
from shared.broker.protocol import OutMessage
from shared.contracts.base import Decoder, encode
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
    """A message that a grouper has buried."""
    delivery = LooseDelivery(
        body=b'{"model": "m"}', message_id=name, queue=topology.GLOBAL_REST, reply_to="r"
    )
    await bury(broker, delivery, reason=f"bad: {name}")


async def poisoned(broker: UnreliableBroker, request: QueuedRequest) -> None:
    """A request that an agent has buried."""
    await broker.publish(
        topology.DEAD,
        request.lane,
        OutMessage(
            body=encode(request),
            kind="request.queued.v1",
            message_id=request.request_id,
            reply_to=request.reply_to,
            headers={topology.REASON_HEADER: "poison_request: x", "headway-queue": request.lane},
        ),
    )


def everything(_letter: DeadLetter) -> bool:
    return True


async def ids(broker: UnreliableBroker, limit: int = 100) -> list[str | None]:
    return [letter.id for letter in await peek(broker, limit=limit, wanted=everything)]


async def test_looking_says_what_where_and_why(broker: UnreliableBroker):
    await refused(broker, "a")
    (letter,) = await peek(broker, limit=10, wanted=everything)
    assert letter == DeadLetter(
        id="a",
        reason="bad: a",
        queue=topology.GLOBAL_REST,
        kind="",
        reply_to="r",
        num_bytes=14,
    )


async def test_looking_changes_neither_order_nor_number(broker: UnreliableBroker):
    for name in "abcde":
        await refused(broker, name)
    for limit in (1, 3, 5, 50):
        assert await ids(broker, limit) == list("abcde")[:limit]
        assert await broker.ready(topology.DEAD_LETTERS) == 5


async def test_looking_hundreds_of_times_loses_nothing(broker: UnreliableBroker):
    await refused(broker, "a")
    for _ in range(topology.DELIVERY_LIMIT * 3):
        await peek(broker, limit=1, wanted=everything)
    assert await ids(broker) == ["a"]


async def test_nothing_there_is_no_trouble(broker: UnreliableBroker):
    assert await peek(broker, limit=5, wanted=everything) == []
    assert await requeue(broker, limit=5, wanted=everything) == []


async def test_a_refused_message_goes_through_the_front_door_again(broker: UnreliableBroker):
    await refused(broker, "a")
    (moved,) = await requeue(broker, limit=10, wanted=everything)
    assert moved.id == "a"
    again = await broker.take(topology.GLOBAL_REST)
    assert (again.body, again.message_id, again.reply_to) == (b'{"model": "m"}', "a", "r")
    assert topology.REASON_HEADER not in again.headers
    assert await broker.ready(topology.DEAD_LETTERS) == 0


async def test_an_admitted_request_goes_to_its_lane_with_a_clean_record(broker: UnreliableBroker):
    progress = Progress(token_ids=(20, 21))
    request = a_request("r", crashes=3, hop=7, progress=progress, reply_to="x")
    await poisoned(broker, request)
    await requeue(broker, limit=10, wanted=everything)
    again = decode((await broker.take(request.lane)).body)
    assert (again.attempts, again.progress, again.reply_to) == (Attempts(), progress, "x")


async def test_only_what_is_wanted_moves_and_the_rest_stays_in_order(broker: UnreliableBroker):
    for name in "abcde":
        await refused(broker, name)
    moved = await requeue(broker, limit=100, wanted=lambda letter: letter.id in ("b", "d"))
    assert [letter.id for letter in moved] == ["b", "d"]
    assert await ids(broker) == ["a", "c", "e"]
    assert await broker.ready(topology.GLOBAL_REST) == 2


async def test_only_what_is_wanted_is_seen_or_dropped(broker: UnreliableBroker):
    for name in "abcde":
        await refused(broker, name)
    seen = await peek(broker, limit=100, wanted=lambda letter: letter.id == "c")
    dropped = await drop(broker, limit=100, wanted=lambda letter: letter.id == "b")
    await drop(broker, limit=2, wanted=everything)

    assert ([letter.id for letter in seen], [letter.id for letter in dropped]) == (["c"], ["b"])
    assert await ids(broker) == ["d", "e"]
    assert await broker.ready(topology.GLOBAL_REST) == 0


async def test_no_more_than_the_limit_is_looked_at(broker: UnreliableBroker):
    for name in "abc":
        await refused(broker, name)
    await requeue(broker, limit=2, wanted=everything)
    assert await ids(broker) == ["c"]


async def test_what_cannot_be_published_stays_dead(broker: UnreliableBroker):
    await refused(broker, "a")
    await broker.delete_queue(topology.GLOBAL_REST)
    with pytest.raises(MeshError, match="stays"):
        await requeue(broker, limit=10, wanted=everything)
    broker.drop_connection()
    assert await ids(broker) == ["a"]


async def test_a_request_of_a_learnt_lane_goes_to_the_lasting_one(broker: UnreliableBroker):
    """Its own lane may have been deleted since."""
    await poisoned(broker, a_request("p", lane="lane.1.tiny-llama.high.4.long-3"))
    await requeue(broker, limit=10, wanted=everything)

    again = decode((await broker.take("lane.1.tiny-llama.high.4.long")).body)
    assert again.lane == "lane.1.tiny-llama.high.4.long"
    assert await broker.depth("lane.1.tiny-llama.high.4.long-3") is None
