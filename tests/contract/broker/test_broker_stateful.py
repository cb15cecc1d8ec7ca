"""A work queue under random operations keeps all messages, once and in order, like a model."""

import asyncio
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from shared.broker.protocol import (
    BindingSpec,
    Delivery,
    ExchangeSpec,
    ExchangeType,
    OutMessage,
    PublishOutcome,
    QueueSpec,
    Settlement,
)
from tests.brokers import MemoryRig, RabbitRig, eventually

LIMIT = 2
QUEUE = QueueSpec(name="work", delivery_limit=LIMIT, dead_letter_exchange="dead")
DEAD = QueueSpec(name="dead-letters")
NUM_CLIENTS = 2


@dataclass(slots=True)
class Entry:
    """A message in the model."""

    number: int
    deliveries: int = 0


@dataclass(slots=True, eq=False)
class Held:
    """An unsettled delivery: the model's entry and the broker's delivery."""

    entry: Entry
    client: int
    delivery: Delivery
    stale: bool = False


class WorkQueue(RuleBasedStateMachine):
    """Two clients get messages from one queue, settle them, and lose their connections."""

    rig: MemoryRig | RabbitRig
    runner: asyncio.Runner

    held = Bundle("held")

    def __init__(self) -> None:
        super().__init__()
        self.returned: deque[Entry] = deque()
        self.ready: deque[Entry] = deque()
        self.dead: list[int] = []
        self.acked: list[int] = []
        self.unsettled: list[Held] = []
        self.published = 0

    @initialize()
    def connect(self) -> None:
        self.runner.run(self._connect())

    async def _connect(self) -> None:
        self.clients = [await self.rig.connect(f"client {n}") for n in range(NUM_CLIENTS)]
        self.watcher = await self.rig.connect("watcher")
        await self.watcher.declare_exchange(ExchangeSpec(name="x", type=ExchangeType.DIRECT))
        await self.watcher.declare_exchange(ExchangeSpec(name="dead", type=ExchangeType.FANOUT))
        for spec in (QUEUE, DEAD):
            await self.watcher.delete_queue(spec.name)
            await self.watcher.declare_queue(spec)
        await self.watcher.bind(BindingSpec(exchange="x", queue="work", routing_key="work"))
        await self.watcher.bind(BindingSpec(exchange="dead", queue=DEAD.name, routing_key=""))

    @rule(count=st.integers(1, 3), client=st.integers(0, NUM_CLIENTS - 1))
    def publish(self, count: int, client: int) -> None:
        for _ in range(count):
            entry = Entry(self.published)
            message = OutMessage(body=str(entry.number).encode(), message_id=str(entry.number))
            outcome = self.runner.run(self.clients[client].publish("x", "work", message))
            self.published += 1
            self.ready.append(entry)

            assert outcome is PublishOutcome.CONFIRMED

    @rule(target=held, client=st.integers(0, NUM_CLIENTS - 1))
    def get(self, client: int) -> Held | None:
        delivery = self.runner.run(self.clients[client].get("work"))
        source = self.returned or self.ready
        if not source:
            assert delivery is None
            return None
        entry = source.popleft()
        assert delivery is not None
        assert (int(delivery.body), delivery.delivery_count) == (entry.number, entry.deliveries)
        held = Held(entry, client, delivery)
        self.unsettled.append(held)
        return held

    @rule(held=consumes(held), how=st.sampled_from(Settlement))
    def settle(self, held: Held | None, how: Settlement) -> None:
        if held is None:
            return
        settled = self.runner.run(held.delivery.settle(how))
        assert settled is not held.stale
        if held.stale:
            return
        self.unsettled.remove(held)
        if how is Settlement.REQUEUE:
            self._give_back(held.entry)
        elif how is Settlement.REJECT:
            self.dead.append(held.entry.number)
        else:
            self.acked.append(held.entry.number)
        self.runner.run(self._settled())

    @precondition(lambda self: self.unsettled)
    @rule(client=st.integers(0, NUM_CLIENTS - 1))
    def drop_connection(self, client: int) -> None:
        self.runner.run(self.rig.drop(self.clients[client]))
        lost = [held for held in self.unsettled if held.client == client]
        self.unsettled = [held for held in self.unsettled if held.client != client]
        for held in sorted(lost, key=lambda held: held.entry.number):
            held.stale = True
            self._give_back(held.entry)
        self.runner.run(self._settled())

    def _give_back(self, entry: Entry) -> None:
        entry.deliveries += 1
        if entry.deliveries > LIMIT:
            self.dead.append(entry.number)
        else:
            self.returned.append(entry)

    async def _settled(self) -> None:
        """Wait for settlements and dead letters, which have no reply."""
        for queue, expected in (
            ("work", len(self.returned) + len(self.ready)),
            (DEAD.name, len(self.dead)),
        ):

            async def reached(queue: str = queue, expected: int = expected) -> bool:
                depth = await self.watcher.depth(queue)
                return depth is not None and depth.ready == expected

            await eventually(reached)

    @invariant()
    def the_model_accounts_for_every_message_once(self) -> None:
        held = [each.entry.number for each in self.unsettled]
        waiting = [entry.number for entry in (*self.returned, *self.ready)]

        assert sorted([*held, *waiting, *self.dead, *self.acked]) == list(range(self.published))

    def teardown(self) -> None:
        self.runner.run(self._drain())

    async def _drain(self) -> None:
        """Check that exactly the expected messages remain, in order."""
        if not hasattr(self, "watcher"):
            return
        for client in self.clients:
            await client.close()
        lost: dict[int, list[Entry]] = {}
        for held in self.unsettled:
            lost.setdefault(held.client, []).append(held.entry)
        for client in sorted(lost):
            for entry in sorted(lost[client], key=lambda entry: entry.number):
                self._give_back(entry)
        await self._settled()
        left = []
        while (delivery := await self.watcher.get("work")) is not None:
            left.append(int(delivery.body))
            await delivery.settle(Settlement.ACK)

        assert set(left) == {entry.number for entry in (*self.returned, *self.ready)}
        assert len(left) == len(set(left))
        await self.watcher.close()


@pytest.fixture
def runner() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as runner:
        yield runner


def run(machine: type[WorkQueue], *, max_examples: int, steps: int) -> None:
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=max_examples,
            stateful_step_count=steps,
            deadline=None,
            derandomize=True,
            database=None,
            suppress_health_check=list(HealthCheck),
        ),
    )


def test_in_process_broker_follows_the_model(runner: asyncio.Runner):
    class Machine(WorkQueue):
        def __init__(self) -> None:
            super().__init__()
            self.rig = MemoryRig()
            self.runner = runner

    run(Machine, max_examples=100, steps=50)


@pytest.mark.rabbitmq
@pytest.mark.slow
def test_rabbitmq_follows_the_model(runner: asyncio.Runner, rabbit_url: str):
    class Machine(WorkQueue):
        def __init__(self) -> None:
            super().__init__()
            self.rig = RabbitRig(rabbit_url)
            self.runner = runner

        def teardown(self) -> None:
            super().teardown()
            self.runner.run(self.rig.close())

    run(Machine, max_examples=40, steps=30)
