"""Gets from a broker that does not answer for a while."""

import asyncio
from typing import Any

import pytest
from aiormq import spec
from aiormq.abc import DeliveredMessage
from pamqp.header import ContentHeader

from shared.broker.amqp.getter import MAX_GETS_PER_QUEUE, AmqpGetter
from shared.contracts.errors import BrokerUnavailableError

pytestmark = pytest.mark.virtual_time


class SlowQueue:
    """A connection to one queue, which has one message and answers after the event *may*."""

    timeout_s = 1.0
    is_closed = False

    def __init__(self) -> None:
        self.may = asyncio.Event()
        self.num_asked = 0
        self._is_ready = True

    async def open_channel(self) -> Any:
        return self

    async def basic_get(self, _queue: str) -> DeliveredMessage:
        self.num_asked += 1
        await self.may.wait()
        was_ready, self._is_ready = self._is_ready, False
        found = spec.Basic.GetOk(delivery_tag=1) if was_ready else spec.Basic.GetEmpty()
        return DeliveredMessage(
            delivery=found,
            header=ContentHeader(properties=spec.Basic.Properties()),
            body=b"message",
            channel=None,  # type: ignore[arg-type]  # not used
        )

    async def basic_reject(self, _tag: int, **_: object) -> None:
        self._is_ready = True


async def test_calls_that_have_not_asked_end_with_their_callers() -> None:
    """Otherwise each would take the message later and return it, up to the limit of deliveries."""
    queue = SlowQueue()
    getter = AmqpGetter(queue)  # type: ignore[arg-type]  # a fake
    for _ in range(10):
        calls = (getter.get("q") for _ in range(MAX_GETS_PER_QUEUE - 1))
        outcomes = await asyncio.gather(*calls, return_exceptions=True)
        assert {type(each) for each in outcomes} == {BrokerUnavailableError}
    queue.may.set()
    await asyncio.sleep(10)

    assert queue.num_asked == MAX_GETS_PER_QUEUE
    delivery = await getter.get("q")
    assert delivery is not None
    assert delivery.body == b"message"
    await getter.close()
