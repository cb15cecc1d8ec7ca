"""Handlers of a busy queue leave room for those of other queues."""

import asyncio
from collections.abc import Sequence

from shared.broker.protocol import Delivery, Settlement
from shared.broker.tasks import InTurn, OwnedTasks

URGENT = b"urgent"


async def _never_settled(_how: Settlement) -> bool:
    raise AssertionError


def delivery(body: bytes) -> Delivery:
    return Delivery(body=body, queue="q", routing_key="q", settler=_never_settled)


class Begun:
    """Notes deliveries as they begin; each takes a while."""

    def __init__(self) -> None:
        self.order: list[bytes] = []
        self.under_way = 0
        self.may_end = asyncio.Event()

    async def __call__(self, found: Delivery) -> None:
        self.order.append(found.body)
        self.under_way += 1
        await self.may_end.wait()


def numbered(number: int) -> Sequence[bytes]:
    return [str(each).encode() for each in range(number)]


async def settle(turns: int) -> None:
    for _ in range(turns):
        await asyncio.sleep(0)


async def test_delivery_of_another_queue_begins_before_those_that_came_first():
    begun, tasks = Begun(), OwnedTasks()
    rest = InTurn(begun)
    for body in numbered(50):
        tasks.handle(delivery(body), rest)
    tasks.handle(delivery(URGENT), begun)
    await settle(200)
    begun.may_end.set()
    await tasks.wait()

    assert begun.order.index(URGENT) <= 1
    assert [body for body in begun.order if body != URGENT] == numbered(50)


async def test_deliveries_do_not_wait_for_the_ends_of_others():
    begun, tasks = Begun(), OwnedTasks()
    rest = InTurn(begun)
    for body in numbered(50):
        tasks.handle(delivery(body), rest)
    await settle(200)
    under_way = begun.under_way
    begun.may_end.set()
    await tasks.wait()

    assert under_way == 50


async def test_a_handler_that_fails_does_not_stop_the_others():
    tasks, found = OwnedTasks(), []

    async def handler(each: Delivery) -> None:
        if each.body == b"0":
            raise ValueError
        found.append(each.body)

    rest = InTurn(handler)
    for body in numbered(3):
        tasks.handle(delivery(body), rest)
    await tasks.wait()

    assert found == [b"1", b"2"]


async def test_a_delivery_that_the_broker_has_again_is_not_handled():
    begun, tasks = Begun(), OwnedTasks()
    begun.may_end.set()
    rest, returned = InTurn(begun), False
    first, second = delivery(b"0"), delivery(b"1")
    second.has_returned = lambda: returned
    for each in (first, second):
        tasks.handle(each, rest)
    returned = True
    await tasks.wait()

    assert begun.order == [b"0"]
