"""What is put back after losses and deletions, with a broker that only answers."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable

import pytest

from shared.broker.amqp_restore import AmqpRestorer
from shared.broker.protocol import BindingSpec, QueueSpec
from shared.contracts.errors import QueueNotFoundError
from tests.brokers import eventually

QUEUES = {name: QueueSpec(name=name, exclusive=True) for name in ("a", "b")}
BINDINGS = {
    name: BindingSpec(exchange="x", queue=queue, routing_key=name)
    for name, queue in (("first", "a"), ("second", "a"))
}


class Subscription:
    """Runs once it was started."""

    def __init__(self, begun: Callable[["Subscription"], None]) -> None:
        self._begun = begun
        self.running = False

    async def start(self) -> None:
        await asyncio.sleep(0)
        self.running = True
        self._begun(self)


class Rig:
    """A restorer that has lost everything; *meanwhile* runs within each call, with its name."""

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
        """Lose all, put it back; twice, since the restorer has to outlive the first."""
        for _ in range(2):
            self.restorer.lost()
            self.restorer.wake()
            await eventually(lambda: self.restorer.complete)


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    made = Rig()
    task = asyncio.create_task(made.restorer.run(), name="restorer")
    yield made
    # A restorer that has ended hands its reason to the test.
    assert not task.done(), task.exception()
    task.cancel()


def other(name: str, names: Iterable[str]) -> str:
    return next(each for each in names if each != name)


async def test_a_queue_that_is_forgotten_meanwhile_is_not_put_back(rig: Rig) -> None:
    for spec in QUEUES.values():
        rig.restorer.remember_queue(spec)
    rig.meanwhile = lambda name: rig.restorer.forget_queue(other(name, QUEUES))
    await rig.restore()

    assert len(rig.declared) == 2
    assert len(set(rig.declared)) == 1


async def test_a_binding_that_is_forgotten_meanwhile_is_not_put_back(rig: Rig) -> None:
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


async def test_a_subscription_that_is_cancelled_meanwhile_stays_so(rig: Rig) -> None:
    started: list[Subscription] = []

    def begun(subscription: Subscription) -> None:
        started.append(subscription)
        for each in made:
            if each is not subscription:
                rig.restorer.discard(each)  # type: ignore[arg-type]  # a fake

    made = [Subscription(begun), Subscription(begun)]
    for each in made:
        rig.restorer.add(each)  # type: ignore[arg-type]  # a fake
    rig.restorer.wake()
    await eventually(lambda: rig.restorer.complete)

    assert len(started) == 1


class Consumer(Subscription):
    """Runs once it was started, and only while its queue was *declared*."""

    def __init__(self, queue: str, declared: list[str]) -> None:
        super().__init__(lambda _: None)
        self.queue = queue
        self._declared = declared

    async def start(self) -> None:
        if self.queue not in self._declared:
            raise QueueNotFoundError(self.queue)
        await super().start()


async def test_a_consumed_queue_that_is_deleted_while_connected_is_put_back(rig: Rig) -> None:
    """Nothing was lost but it: a connection that stands brings nobody to declare it again."""
    for spec in QUEUES.values():
        rig.restorer.remember_queue(spec)
    for binding in BINDINGS.values():
        rig.restorer.remember_binding(binding)
    consumer = Consumer("a", rig.declared)
    rig.restorer.add(consumer)  # type: ignore[arg-type]  # a fake
    rig.restorer.wake()
    await eventually(lambda: rig.restorer.complete)

    assert consumer.running
    assert rig.declared == ["a"]
    assert sorted(rig.bound) == sorted(BINDINGS)


async def test_a_deleted_queue_that_others_declare_is_waited_for(rig: Rig) -> None:
    consumer = Consumer("a", rig.declared)
    rig.restorer.add(consumer)  # type: ignore[arg-type]  # a fake
    rig.restorer.wake()
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert not rig.restorer.complete
    rig.declared.append("a")
    await eventually(lambda: rig.restorer.complete)

    assert rig.bound == []
