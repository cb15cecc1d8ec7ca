"""Publishing on channels that a broker is slow to close."""

import asyncio
from typing import Any

from shared.broker.amqp_publisher import AmqpPublisher
from shared.broker.protocol import OutMessage, PublishOutcome
from tests.brokers import eventually


class SlowChannel:
    """Takes what is published once it *may*, and is never closed in time."""

    is_closed = False

    def __init__(self, may: asyncio.Event) -> None:
        self._may = may

    async def basic_publish(self, *_: object, **__: object) -> None:
        await self._may.wait()

    async def close(self, **_: object) -> None:
        raise TimeoutError


class Channels:
    """A connection that hands out slow channels."""

    def __init__(self) -> None:
        self.opened = 0
        self.may_publish = asyncio.Event()

    async def open_channel(self, **_: object) -> Any:
        self.opened += 1
        return SlowChannel(self.may_publish)


async def test_a_channel_that_is_not_closed_in_time_changes_no_outcome() -> None:
    """The second publish under one message id has a channel of its own, closed after it."""
    connection = Channels()
    publisher = AmqpPublisher(connection, timeout_s=1.0)  # type: ignore[arg-type]  # a fake
    message = OutMessage(body=b"a", message_id="m")
    publishing = [asyncio.create_task(publisher.publish("x", "k", message)) for _ in range(2)]
    await eventually(lambda: connection.opened == 2)
    connection.may_publish.set()

    assert await asyncio.gather(*publishing) == [PublishOutcome.CONFIRMED] * 2
