"""Consumers that are cancelled, by their owner or the broker, while they begin."""

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from shared.broker.amqp.subscription import AmqpSubscription
from shared.broker.protocol import Delivery

pytestmark = pytest.mark.virtual_time


class Channel:
    """A channel of *connection*, whose consumers begin after its event `may`."""

    def __init__(self, connection: "Connection") -> None:
        self.is_closed = False
        self.closing: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.on_consumer_cancel_callbacks: set[Callable[[], None]] = set()
        self._connection = connection
        self._tags: set[str] = set()

    async def basic_qos(self, **_: object) -> None:
        """Do nothing."""

    async def basic_consume(self, queue: str, *_: object, **__: object) -> Any:
        await self._connection.may.wait()
        tag = f"{queue}-{len(self._connection.channels)}"
        self._tags.add(tag)
        if self._connection.cancels:
            self._tags.clear()
            for callback in tuple(self.on_consumer_cancel_callbacks):
                callback()
        return SimpleNamespace(consumer_tag=tag)

    async def basic_cancel(self, tag: str, **_: object) -> None:
        self._tags.discard(tag)

    async def close(self, **_: object) -> None:
        self.is_closed = True

    @property
    def consumers(self) -> set[str]:
        return set() if self.is_closed else self._tags


class Connection:
    """A connection to a broker with one queue."""

    timeout_s = 1.0

    def __init__(self) -> None:
        self.may = asyncio.Event()
        self.may.set()
        self.cancels = False
        """True if the broker cancels each consumer before the client reads that it began."""
        self.channels: list[Channel] = []

    async def open_channel(self) -> Any:
        channel = Channel(self)
        self.channels.append(channel)
        return channel

    @property
    def consumers(self) -> set[str]:
        return {tag for channel in self.channels for tag in channel.consumers}


class Owner:
    """The owner of one subscription, which counts its ends."""

    def __init__(self, connection: Connection) -> None:
        self.num_broken = 0
        self.cancelled: list[AmqpSubscription] = []
        self.subscription = AmqpSubscription(
            connection,  # type: ignore[arg-type]  # a fake
            queue="q",
            handler=self._handle,
            prefetch=1,
            gathers_acks=False,
            arguments={},
            on_broken=self._broken,
            on_cancelled=self.cancelled.append,
        )

    async def _handle(self, delivery: Delivery) -> None:
        """Do nothing."""

    def _broken(self) -> None:
        self.num_broken += 1


async def test_a_subscription_that_is_cancelled_while_it_is_restored_has_no_consumer() -> None:
    connection = Connection()
    owner = Owner(connection)
    await owner.subscription.start()
    connection.may.clear()
    restored = asyncio.create_task(owner.subscription.start())
    await asyncio.sleep(0.1)
    cancelled = asyncio.create_task(owner.subscription.cancel())
    await asyncio.sleep(0.1)
    connection.may.set()
    await asyncio.gather(restored, cancelled)

    assert connection.consumers == set()
    assert owner.cancelled == [owner.subscription]
    assert owner.num_broken == 0


async def test_a_cancelled_subscription_is_not_started_again() -> None:
    connection = Connection()
    owner = Owner(connection)
    await owner.subscription.start()
    await owner.subscription.cancel()
    await owner.subscription.start()

    assert connection.consumers == set()


async def test_a_consumer_that_the_broker_cancels_at_once_does_not_run() -> None:
    connection = Connection()
    owner = Owner(connection)
    connection.cancels = True
    await owner.subscription.start()
    assert not owner.subscription.running
    assert owner.num_broken == 1

    connection.cancels = False
    await owner.subscription.start()
    assert owner.subscription.running
    assert len(connection.consumers) == 1
