"""Publishing on channels that the broker closes slowly."""

import asyncio
from typing import Any

import pytest

from shared.broker.amqp.publisher import AmqpPublisher
from shared.broker.protocol import OutMessage, PublishOutcome
from shared.contracts.errors import BrokerUnavailableError
from tests.brokers import eventually

pytestmark = pytest.mark.virtual_time


class SlowChannel:
    """A channel that accepts publishes after the event *may*, and never closes in time."""

    is_closed = False

    def __init__(self, may: asyncio.Event) -> None:
        self._may = may

    async def basic_publish(self, *_: object, **__: object) -> None:
        await self._may.wait()

    async def close(self, **_: object) -> None:
        raise TimeoutError


class Channels:
    """A connection that returns slow channels."""

    timeout_s = 1.0

    def __init__(self) -> None:
        self.opened = 0
        self.may_publish = asyncio.Event()

    async def open_channel(self, **_: object) -> Any:
        self.opened += 1
        return SlowChannel(self.may_publish)


async def test_a_slow_channel_close_changes_no_outcome() -> None:
    """A second publish with the same message id uses its own channel, which is then closed."""
    connection = Channels()
    publisher = AmqpPublisher(connection)  # type: ignore[arg-type]  # a fake
    message = OutMessage(body=b"a", message_id="m")
    publishing = [asyncio.create_task(publisher.publish("x", "k", message)) for _ in range(2)]
    await eventually(lambda: connection.opened == 2)
    connection.may_publish.set()

    assert await asyncio.gather(*publishing) == [PublishOutcome.CONFIRMED] * 2


class SilentChannel(SlowChannel):
    """A channel whose broker confirms only after the event *may*."""

    async def basic_publish(self, *_: object, **__: object) -> None:
        if not self._may.is_set():
            raise TimeoutError


class SilentChannels(Channels):
    async def open_channel(self, **_: object) -> Any:
        return SilentChannel(self.may_publish)


async def test_a_broker_that_confirms_nothing_three_times_counts_as_away_until_it_does() -> None:
    connection = SilentChannels()
    publisher = AmqpPublisher(connection)  # type: ignore[arg-type]  # a fake
    answered = [publisher.is_answered]
    for number in range(3):
        with pytest.raises(BrokerUnavailableError):
            await publisher.publish("x", "k", OutMessage(body=b"a", message_id=f"m{number}"))
        answered.append(publisher.is_answered)
    connection.may_publish.set()
    await publisher.publish("x", "k", OutMessage(body=b"a", message_id="m"))
    answered.append(publisher.is_answered)

    assert answered == [True, True, True, False, True]
