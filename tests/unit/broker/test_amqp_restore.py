"""Restoration of queues and consumers after losses and deletions, with a scripted broker."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable

import pytest

from shared.broker.amqp.restore import AmqpRestorer
from shared.broker.protocol import BindingSpec, QueueSpec
from shared.contracts.errors import QueueNotFoundError
from tests.brokers import eventually

pytestmark = pytest.mark.virtual_time

QUEUES = {name: QueueSpec(name=name, exclusive=True) for name in ("a", "b")}
BINDINGS = {
    name: BindingSpec(exchange="x", queue=queue, routing_key=name)
    for name, queue in (("first", "a"), ("second", "a"))
}


class Subscription:
    """A fake subscription that runs after `start`."""

    def __init__(self, begun: Callable[["Subscription"], None]) -> None:
        self._begun = begun
        self.running = False

    async def start(self) -> None:
        await asyncio.sleep(0)
        self.running = True
        self._begun(self)


class Rig:
    """A restorer after a lost connection; *meanwhile* is called with each call's name."""

    def __init__(self) -> None:
        self.meanwhile: Callable[[str], None] = lambda _: None
        self.declared: list[str] = []
        self.bound: list[str] = []
        self.restorer = AmqpRestorer(declare=self._declare, bind=self._bind, is_up=lambda: True)

    async def _declare(self, spec: QueueSpec) -> None:
        await asyncio.sleep(0)
        self.declared.append(spec.name)
        self.meanwhile(spec.name)

    async def _bind(self, spec: BindingSpec) -> None:
        await asyncio.sleep(0)
        self.bound.append(spec.routing_key)
        self.meanwhile(spec.routing_key)

    async def restore(self) -> None:
        """Lose and restore all objects twice, because the restorer must survive a restoration."""
        for _ in range(2):
            self.restorer.lost()
            self.restorer.wake()
            await eventually(lambda: self.restorer.complete)


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    made = Rig()
    task = asyncio.create_task(made.restorer.run(), name="restorer")
    yield made
    # Show the exception of a restorer that has ended.
    assert not task.done(), task.exception()
    task.cancel()


def other(name: str, names: Iterable[str]) -> str:
    return next(each for each in names if each != name)


async def test_a_queue_forgotten_meanwhile_is_not_restored(rig: Rig) -> None:
    for spec in QUEUES.values():
        rig.restorer.remember_queue(spec)
    rig.meanwhile = lambda name: rig.restorer.forget_queue(other(name, QUEUES))
    await rig.restore()

    assert len(rig.declared) == 2
    assert len(set(rig.declared)) == 1


async def test_a_binding_forgotten_meanwhile_is_not_restored(rig: Rig) -> None:
    rig.restorer.remember_queue(QUEUES["a"])
    for spec in BINDINGS.values():
        rig.restorer.remember_binding(spec)

    def forget(name: str) -> None:
        if name in BINDINGS:
            rig.restorer.forget_binding(BINDINGS[other(name, BINDINGS)])

    rig.meanwhile = forget
    await rig.restore()

    assert len(rig.bound) == 2
    assert len(set(rig.bound)) == 1


async def test_a_subscription_cancelled_meanwhile_is_not_restored(rig: Rig) -> None:
    started: list[Subscription] = []

    def begun(subscription: Subscription) -> None:
        started.append(subscription)
        for each in made:
            if each is not subscription:
                rig.restorer.subscriptions.discard(each)  # type: ignore[arg-type]  # a fake

    made = [Subscription(begun), Subscription(begun)]
    for each in made:
        rig.restorer.subscriptions.add(each)  # type: ignore[arg-type]  # a fake
    rig.restorer.wake()
    await eventually(lambda: rig.restorer.complete)

    assert len(started) == 1


class Consumer(Subscription):
    """A fake consumer that runs after `start` while its queue is *declared*."""

    def __init__(self, queue: str, declared: list[str]) -> None:
        super().__init__(lambda _: None)
        self.queue = queue
        self._declared = declared

    async def start(self) -> None:
        if self.queue not in self._declared:
            raise QueueNotFoundError(self.queue)
        await super().start()


async def test_a_consumed_queue_deleted_while_connected_is_restored(rig: Rig) -> None:
    """Without a connection loss, only the cancelled consumer triggers the declaration."""
    for spec in QUEUES.values():
        rig.restorer.remember_queue(spec)
    for binding in BINDINGS.values():
        rig.restorer.remember_binding(binding)
    consumer = Consumer("a", rig.declared)
    rig.restorer.subscriptions.add(consumer)  # type: ignore[arg-type]  # a fake
    rig.restorer.wake()
    await eventually(lambda: rig.restorer.complete)

    assert consumer.running
    assert rig.declared == ["a"]
    assert sorted(rig.bound) == sorted(BINDINGS)


async def test_a_deleted_queue_declared_by_others_is_awaited(rig: Rig) -> None:
    consumer = Consumer("a", rig.declared)
    rig.restorer.subscriptions.add(consumer)  # type: ignore[arg-type]  # a fake
    rig.restorer.wake()
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert not rig.restorer.complete
    rig.declared.append("a")
    await eventually(lambda: rig.restorer.complete)

    assert consumer.running
    assert rig.bound == []
