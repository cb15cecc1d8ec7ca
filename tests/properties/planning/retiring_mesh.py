"""
Publishers, agents and leaders that share work queues, over a slow broker in virtual time.

Each process has its own client, whose operations take a random time before and after the broker
executes them. A killed process stops between any two operations.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine
from contextlib import suppress
from itertools import count
from random import Random
from typing import Any

from ops.sim.virtual_time import LoopClock
from services.planner.handlers import NOTICE_HANDLERS, leader_state_handler, tick
from services.planner.leader.leader import Leader
from services.planner.leader.policies import Planner
from services.planner.settings import LeaderSettings
from services.planner.state import LeaderState
from shared.broker import topology
from shared.broker.consumer import Dispatcher
from shared.broker.memory.broker import MemoryBroker
from shared.broker.memory.hub import MemoryHub
from shared.broker.protocol import (
    BindingSpec,
    Delivery,
    DeliveryHandler,
    OutMessage,
    PublishOutcome,
    QueueDepth,
    QueueSpec,
    Settlement,
)
from shared.broker.work_queues import WorkQueues
from shared.contracts.base import Decoder, Message, encode
from shared.contracts.control import QueuesRetired, QueuesRetiring
from shared.contracts.errors import MeshError, QueueNotFoundError
from shared.contracts.lanes import LaneLayout
from shared.contracts.telemetry import LanesObserved, source_name
from tests.brokers import eventually
from tests.queued import BATCH, CHAT, MODEL, a_request
from tests.unit.planner.leader_rig import status

LANES = tuple(a_request(slo=slo).lane for slo in (CHAT, BATCH))
SETTINGS = LeaderSettings(retire_idle_s=5.0, audit_period_s=3.0, settle_s=1e9)
"""With `settle_s`, the leader finds, counts and retires queues, but makes no plans."""
DELAYS_S = (0.0, 0.001, 0.01, 0.1, 0.3)
REPORT_PERIOD_S = 1.0
HELD_UP_S = 4.0
"""Longest time of a publish, e.g. while the broker is unavailable; below `retire_idle_s`."""
NUM_PUBLISHERS = NUM_AGENTS = NUM_LEADERS = 2
decode: Decoder[QueuesRetiring | QueuesRetired] = Decoder(QueuesRetiring | QueuesRetired)


class SlowBroker(MemoryBroker):
    """An in-process client with a random delay before and after each operation."""

    def __init__(self, hub: MemoryHub, random: Random) -> None:
        super().__init__(hub)
        self._random = random
        self._sending = asyncio.Lock()
        self.on_created: Callable[[str], None] = lambda _: None
        """Function that is called with the name of each queue that was created."""
        self.on_deleting: Callable[[str], None] = lambda _: None
        """Function that is called with each queue whose deletion has been sent to the broker."""
        self.held_up: dict[str, asyncio.Event] = {}
        """Queue -> event for which publishes to it wait, for at most `HELD_UP_S`."""

    async def _travel(self) -> None:
        await asyncio.sleep(self._random.choice(DELAYS_S))

    async def declare_queue(self, spec: QueueSpec) -> None:
        await self._travel()
        await super().declare_queue(spec)
        self.on_created(spec.name)
        await self._travel()

    async def bind(self, spec: BindingSpec) -> None:
        await self._travel()
        await super().bind(spec)

    async def publish(self, exchange: str, routing_key: str, message: OutMessage) -> PublishOutcome:
        if routing_key in self.held_up:
            with suppress(TimeoutError):
                await asyncio.wait_for(self.held_up.pop(routing_key).wait(), HELD_UP_S)
        await self._travel()
        outcome = await super().publish(exchange, routing_key, message)
        await self._travel()
        return outcome

    async def send(self, exchange: str, routing_key: str, message: OutMessage) -> None:
        async with self._sending:  # messages of one process stay in order
            await self._travel()
            await super().send(exchange, routing_key, message)

    async def get(self, queue: str) -> Delivery | None:
        await self._travel()
        delivery = await super().get(queue)
        await self._travel()
        return delivery

    async def depth(self, queue: str) -> QueueDepth | None:
        await self._travel()
        depth = await super().depth(queue)
        await self._travel()
        return depth

    async def delete_queue(self, queue: str) -> None:
        self.on_deleting(queue)
        await self._travel()
        await super().delete_queue(queue)
        await self._travel()


class Process:
    """A process that can be killed."""

    def __init__(self, mesh: "Mesh", name: str, incarnation: str) -> None:
        self.mesh, self.name, self.incarnation = mesh, name, incarnation
        self.broker = SlowBroker(mesh.hub, mesh.random)
        self.queues = WorkQueues(self.broker, source_name(name, incarnation))
        self.deaf = False
        """True if notices of retirements do not arrive."""
        self.tasks: list[asyncio.Task[None]] = []
        self.seq = 0

    async def start(self) -> None:
        await self.broker.__aenter__()
        await self.listen(topology.CONTROL_RETIREMENT, self.on_retirement)
        self.repeat(REPORT_PERIOD_S, self.report)

    async def kill(self) -> None:
        """End all tasks and the connection at once; raise the error of a task that has failed."""
        for task in self.tasks:
            if task.done():
                task.result()
            task.cancel()
        await self.broker.close()

    def repeat(self, period_s: float, action: Callable[[], Coroutine[Any, Any, None]]) -> None:
        async def run() -> None:
            while True:
                with suppress(MeshError):
                    await action()
                await asyncio.sleep(period_s)

        self.spawn(run())

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        self.tasks.append(asyncio.create_task(work))

    async def listen(self, key: str, handler: DeliveryHandler) -> None:
        queue = topology.private_queue(f"{self.incarnation}.{key}")
        await self.broker.declare_queue(queue)
        await self.broker.bind(
            BindingSpec(exchange=topology.CONTROL, queue=queue.name, routing_key=key)
        )
        await self.broker.consume(queue.name, handler, prefetch=64)

    async def on_retirement(self, delivery: Delivery) -> None:
        message = decode(delivery.body)
        if self.deaf:
            pass
        elif isinstance(message, QueuesRetiring):
            self.queues.release(message.queues)
            await self.report()
        else:
            self.queues.forget(message.deleted + message.kept)
        await delivery.settle(Settlement.ACK)

    async def send_report(self, key: str, message: Message) -> None:
        await self.broker.send(topology.TELEMETRY, key, OutMessage(body=encode(message)))

    async def report(self) -> None:
        """Publish the totals of a process without requests."""
        self.seq += 1
        observed = LanesObserved(
            sender=self.name,
            incarnation=self.incarnation,
            seq=self.seq,
            at=self.mesh.clock.now(),
            layout=LaneLayout().version,
            put=dict(self.queues.put),
            released=self.queues.released,
        )
        await self.send_report(topology.LANES_KEY, observed)


class Publisher(Process):
    """A process that puts requests into queues."""

    num_entering = 0
    """Number of publishes in progress."""

    async def publish(self, queue: str, request_id: str) -> None:
        message = OutMessage(body=b"request", message_id=request_id)
        self.num_entering += 1
        outcome = await self.queues.publish(queue, message)
        self.num_entering -= 1
        if outcome is PublishOutcome.CONFIRMED:
            self.mesh.confirmed.add(request_id)


class Agent(Process):
    """A process that pulls requests, and holds some."""

    def __init__(self, mesh: "Mesh", name: str, incarnation: str) -> None:
        super().__init__(mesh, name, incarnation)
        self.held: list[Delivery] = []
        self.pulled: Counter[str] = Counter()

    async def pull(self, queue: str) -> bool:
        """Pull a request and hold it; False if there is none."""
        try:
            delivery = await self.broker.get(queue)
        except QueueNotFoundError:
            return False
        if delivery is None:
            return False
        self.pulled[queue] += 1
        self.held.append(delivery)
        return True

    async def settle(self, how: Settlement) -> None:
        """Settle all held requests."""
        while self.held:
            delivery = self.held.pop()
            assert delivery.message_id is not None
            if await delivery.settle(how) and how is Settlement.ACK:
                self.mesh.served.add(delivery.message_id)

    async def serve(self, queues: frozenset[str]) -> None:
        """Pull and acknowledge all requests in *queues*."""
        for queue in sorted(queues):
            while await self.pull(queue):
                await self.settle(Settlement.ACK)

    async def report(self) -> None:
        self.seq += 1
        held = {delivery.queue for delivery in self.held}
        await self.send_report(
            topology.status_key(self.name),
            status(
                self.name,
                incarnation=self.incarnation,
                seq=self.seq,
                pulled_by_lane=dict(self.pulled),
                released=tuple(name for name in self.queues.released if name not in held),
            ),
        )


class Planning(Process):
    """A process with the leader role."""

    def __init__(self, mesh: "Mesh", name: str, incarnation: str) -> None:
        super().__init__(mesh, name, incarnation)
        self.leader = Leader(
            broker=self.broker,
            settings=SETTINGS,
            planner=Planner("edf", SETTINGS.importance_weight),
            layout=LaneLayout(num_bands=1, num_work_classes=1),
            models=lambda: (MODEL,),
            state=LeaderState(),
            queues=self.queues,
            clock=mesh.clock,
            leader_id=name,
        )

    async def start(self) -> None:
        await super().start()
        leader = self.leader
        self.broker.on_deleting = self.mesh.strike
        self.broker.on_created = self._created
        self.broker.on_connection_lost(leader.deposed)
        await self.listen(topology.CONTROL_LANE, Dispatcher(NOTICE_HANDLERS, leader).handle)
        await self.broker.consume(topology.LEADER, leader_state_handler(leader), prefetch=64)
        self.repeat(0.5, leader.plan)
        self.repeat(1.0, lambda: tick(leader))

    def _created(self, name: str) -> None:
        for queue in LANES:
            if name == topology.lock_of(queue).name:
                self.mesh.begin_strike(queue)


class Mesh:
    """All processes, and the requests that they have published and served."""

    def __init__(self, seed: int) -> None:
        self.hub = MemoryHub()
        self.clock = LoopClock()
        self.random = Random(seed)
        self.confirmed: set[str] = set()
        self.served: set[str] = set()
        self.strikes: dict[str, int] = {}
        """Queue -> publisher that begins to use it while the leader's deletion is on its way."""
        self.late_strikes: dict[str, int] = {}
        """Queue -> publisher that begins to use the queue when its retirement begins."""
        self._held_up: dict[str, asyncio.Event] = {}
        self.publishers: list[Publisher] = []
        self.agents: list[Agent] = []
        self.leaders: list[Planning] = []
        self.num_removed = 0
        """Number of queues that dead leaders have deleted."""
        self._numbers = count()

    async def start(self) -> None:
        async with MemoryBroker(self.hub) as broker:
            await topology.declare(broker)
        for index in range(NUM_PUBLISHERS):
            self.publishers.append(await self.started(Publisher, f"publisher-{index}"))
        for index in range(NUM_AGENTS):
            self.agents.append(await self.started(Agent, f"agent-{index}"))
        for index in range(NUM_LEADERS):
            self.leaders.append(await self.started(Planning, f"leader-{index}"))

    async def started(self, kind: Any, name: str) -> Any:
        process = kind(self, name, f"{name}-{next(self._numbers)}")
        await process.start()
        return process

    async def restart(self, processes: list[Any], index: int) -> None:
        """Kill a process and start it again."""
        killed = processes[index]
        await killed.kill()
        processes[index] = await self.started(type(killed), killed.name)

    async def kill_leader(self) -> None:
        """Kill the active leader; another one takes over."""
        leading = [index for index, each in enumerate(self.leaders) if each.leader.state.leads]
        for index in leading:
            self.num_removed += self.leaders[index].leader.state.counts.num_removed
            await self.restart(self.leaders, index)

    @property
    def num_retired(self) -> int:
        """Number of deletions of queues."""
        return self.num_removed + sum(each.leader.state.counts.num_removed for each in self.leaders)

    @property
    def active(self) -> Leader | None:
        """The active leader."""
        leading = [each.leader for each in self.leaders if each.leader.state.leads]
        return leading[0] if leading else None

    @property
    def named(self) -> frozenset[str]:
        """Queues that plans would name."""
        return frozenset() if self.active is None else self.active.state.counts.queues

    def publish(self, index: int, queue: str) -> None:
        """Begin to publish one request."""
        publisher = self.publishers[index]
        publisher.spawn(publisher.publish(queue, f"r{next(self._numbers)}"))

    def begin_strike(self, queue: str) -> None:
        """Begin a publish to a queue whose retirement begins, if the test wants that."""
        if (index := self.late_strikes.pop(queue, None)) is not None:
            event = self._held_up[queue] = asyncio.Event()
            self.publishers[index].broker.held_up[queue] = event
            self.publish(index, queue)

    def strike(self, queue: str) -> None:
        """Publish to a queue whose deletion is on its way, if the test wants that."""
        if queue in self._held_up:
            self._held_up.pop(queue).set()
        if (index := self.strikes.pop(queue, None)) is not None:
            self.publish(index, queue)

    def disturb(self, queue: str, num: int) -> None:
        """Make the leader's number of requests in *queue* wrong, if it knows the queue."""
        if self.active is None or queue not in self.named:
            return
        counts, now, source = self.active.state.counts, self.clock.now(), f"f{next(self._numbers)}"
        counts.observe(source, {}, now)
        if num > 0:
            counts.put(source, queue, num, now)
        else:
            counts.pulled(source, {queue: -num}, now)
        counts.forget(source)
        counts.due.discard(queue)

    async def serve(self) -> None:
        """Serve all requests in the queues that the leader names."""
        await asyncio.gather(*(agent.serve(self.named) for agent in self.agents))

    async def all_served(self, within_s: float) -> None:
        """Wait until each request whose publish was confirmed is served."""

        async def done() -> bool:
            await self.serve()
            return self.confirmed <= self.served

        await eventually(done, within_s=within_s)

    async def stop(self) -> None:
        for process in (*self.publishers, *self.agents, *self.leaders):
            await process.kill()
