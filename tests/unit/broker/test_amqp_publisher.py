"""Publishing on channels that the broker closes slowly."""

import asyncio
from typing import Any

import pytest
from aiormq.exceptions import DeliveryError

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
    has_several_nodes = False

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


class Refusing(SlowChannel):
    """A channel of a broker whose queue has no leader for the first publishes of all channels."""

    def __init__(self, owner: "RefusingChannels") -> None:
        self._owner = owner
        self.is_stuck = not owner.has_leader
        """As RabbitMQ's channels do that were first used without a leader."""
        self.closed = False

    async def basic_publish(self, *_: object, **__: object) -> None:
        await asyncio.sleep(0.01)
        if self.is_stuck or not self._owner.has_leader:
            raise DeliveryError(None, None)  # type: ignore[arg-type]  # its fields are not read

    async def close(self, **_: object) -> None:
        self.closed = True


class RefusingChannels(Channels):
    def __init__(self, *, has_several_nodes: bool) -> None:
        super().__init__()
        self.has_several_nodes = has_several_nodes
        self.has_leader = False
        self.all: list[Refusing] = []

    async def open_channel(self, **_: object) -> Any:
        self.all.append(Refusing(self))
        return self.all[-1]


async def test_refused_messages_arrive_when_the_queue_has_a_leader_again() -> None:
    connection = RefusingChannels(has_several_nodes=True)
    publisher = AmqpPublisher(connection)  # type: ignore[arg-type]  # a fake
    messages = [OutMessage(body=b"a", message_id=f"m{number}") for number in range(20)]
    publishing = [asyncio.create_task(publisher.publish("x", "k", each)) for each in messages]
    await asyncio.sleep(0.5)
    connection.has_leader = True

    assert await asyncio.gather(*publishing) == [PublishOutcome.CONFIRMED] * len(messages)
    assert [channel.closed for channel in connection.all] == [
        *(True for _ in connection.all[:-1]),
        False,
    ]
    assert len(connection.all) <= 6


async def test_a_single_node_that_refuses_is_asked_once_and_gets_a_new_channel() -> None:
    connection = RefusingChannels(has_several_nodes=False)
    publisher = AmqpPublisher(connection)  # type: ignore[arg-type]  # a fake
    outcomes = [await publisher.publish("x", "k", OutMessage(body=b"a"))]
    connection.has_leader = True
    outcomes.append(await publisher.publish("x", "k", OutMessage(body=b"a")))

    assert outcomes == [PublishOutcome.REFUSED, PublishOutcome.CONFIRMED]
    assert [channel.closed for channel in connection.all] == [True, False]
