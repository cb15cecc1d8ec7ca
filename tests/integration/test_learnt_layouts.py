"""Edges between work classes change while requests flow: none is lost, old lanes go."""

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field

import msgspec
import pytest

from services.planner.grouper import Grouper
from services.planner.handlers import GROUPER_HANDLERS, leader_state_handler
from services.planner.leader import Leader
from services.planner.policies import Planner
from services.planner.settings import GrouperSettings, LeaderSettings
from services.planner.state import GrouperState, LeaderState, RecentIds
from shared.broker import topology
from shared.broker.consumer import Dispatcher
from shared.broker.protocol import BindingSpec, Broker, Delivery, OutMessage, Settlement
from shared.contracts.base import Decoder, InstanceId, encode
from shared.contracts.errors import QueueNotFoundError
from shared.contracts.lanes import LaneLayout, work_version_of
from shared.contracts.plans import PlanPublished
from shared.contracts.requests import QueuedRequest
from shared.contracts.telemetry import InstanceStatus, ModelState, Residency
from shared.models.registry import ModelRegistry
from shared.models.tiny import make_tiny_models
from shared.runtime.clock import SystemClock
from shared.runtime.tasks import every
from solver.planning.lanes import all_lanes
from solver.routing.shares import TenantShares
from tests.brokers import BrokerRig, eventually
from tests.queued import MODEL
from tests.unit.planner.rig import intake_of

pytestmark = pytest.mark.slow

CLOCK = SystemClock()
PERIOD_S = 0.05
SETTINGS = LeaderSettings(
    classes_period_s=0.4,
    classes_least_requests=60,
    lane_retire_s=0.3,
    settle_s=0.2,
    refresh_period_s=0.2,
)
decode_plan: Decoder[PlanPublished] = Decoder(PlanPublished)
decode_queued: Decoder[QueuedRequest] = Decoder(QueuedRequest)


@dataclass
class Taker:
    """An instance that pulls what plans name, fails now and then, and remembers what it served."""

    broker: Broker
    lanes: set[str] = field(default_factory=set)
    served: Counter[str] = field(default_factory=Counter)
    lanes_served: set[str] = field(default_factory=set)
    chance: random.Random = field(default_factory=lambda: random.Random(7))
    seq: int = 0

    async def status(self) -> None:
        self.seq += 1
        status = InstanceStatus(
            instance_id=InstanceId("i"),
            incarnation="first",
            seq=self.seq,
            at=CLOCK.now(),
            engine="e",
            device="d",
            model=MODEL,
            models=(ModelState(model=MODEL, residency=Residency.ACTIVE),),
        )
        message = OutMessage(body=encode(status), persistent=False)
        await self.broker.send(topology.TELEMETRY, topology.status_key("i"), message)

    async def on_plan(self, delivery: Delivery) -> None:
        plan = decode_plan(delivery.body)
        self.lanes = {lane.lane for segment in plan.queue.segments for lane in segment.lanes}
        await delivery.settle(Settlement.ACK)

    async def head(self, lane: str) -> Delivery | None:
        """None, too, when the lane has been deleted since the plan."""
        with suppress(QueueNotFoundError):
            return await self.broker.get(lane)
        return None

    async def pull(self) -> None:
        for lane in sorted(self.lanes):
            while (delivery := await self.head(lane)) is not None:
                await asyncio.sleep(self.chance.random() * 0.002)
                if self.chance.random() < 0.05:
                    await delivery.settle(Settlement.REQUEUE)
                    break
                self.served[decode_queued(delivery.body).request_id] += 1
                self.lanes_served.add(lane)
                await delivery.settle(Settlement.ACK)


async def start_grouper(broker: Broker, registry: ModelRegistry, name: str) -> Grouper:
    settings = GrouperSettings()
    grouper = Grouper(
        broker=broker,
        intake=intake_of(registry, settings),
        settings=settings,
        state=GrouperState(
            shares=TenantShares(max_share=1.0, free_tokens=10**9), recent=RecentIds(10_000)
        ),
        clock=CLOCK,
        sender=name,
    )
    broker.on_connection_lost(grouper.forget_layout)
    queue = topology.private_queue(f"grouper.{name}")
    await broker.declare_queue(queue)
    binding = BindingSpec(
        exchange=topology.TELEMETRY, queue=queue.name, routing_key=topology.LAYOUT_KEY
    )
    await broker.bind(binding)
    await broker.consume(queue.name, Dispatcher(GROUPER_HANDLERS, grouper).handle, prefetch=8)
    await broker.consume(topology.GLOBAL_REST, grouper.on_request, prefetch=8)
    return grouper


async def start_leader(broker: Broker) -> Leader:
    leader = Leader(
        broker=broker,
        settings=SETTINGS,
        planner=Planner("edf", SETTINGS.tier_weight),
        layout=LaneLayout(),
        models=(MODEL,),
        state=LeaderState(),
        clock=CLOCK,
        leader_id="leader",
    )
    broker.on_connection_lost(leader.deposed)
    await broker.consume(topology.LEADER, leader_state_handler(leader), prefetch=64)
    return leader


@dataclass
class Mesh:
    leader: Leader
    groupers: list[Grouper]
    taker: Taker
    brokers: list[Broker]
    """Of the groupers."""
    producer: Broker
    sent: int = 0

    async def produce(self, num: int, *, sizes: tuple[int, int]) -> None:
        """So many requests of two kinds of work, at a pace that lets plans be made."""
        for _ in range(num):
            body = {"model": MODEL, "prompt": [1] * 4, "max_tokens": sizes[self.sent % 5 == 0]}
            message = OutMessage(
                body=msgspec.json.encode(body), message_id=f"r{self.sent}", reply_to="nobody"
            )
            await self.producer.publish(topology.REQUESTS, topology.REST_KEY, message)
            self.sent += 1
            await asyncio.sleep(0.002)

    @property
    def version(self) -> int:
        return self.leader.classes.layout.work_version


@asynccontextmanager
async def flowing(rig: BrokerRig, registry: ModelRegistry) -> AsyncIterator[Mesh]:
    stop = asyncio.Event()
    brokers = [await rig.connect(name) for name in ("leader", "taker", "producer", "g0", "g1")]
    await topology.declare(brokers[0])
    leader, taker = await start_leader(brokers[0]), Taker(brokers[1])
    queue, binding = topology.plan_queue("i", "test")
    await taker.broker.declare_queue(queue)
    await taker.broker.bind(binding)
    await taker.broker.consume(queue.name, taker.on_plan, prefetch=1)
    groupers = [
        await start_grouper(broker, registry, f"g{number}")
        for number, broker in enumerate(brokers[3:])
    ]
    loops = (leader.plan, taker.status, taker.pull, *(each.report for each in groupers))
    async with AsyncExitStack() as stack, asyncio.TaskGroup() as tasks:
        stack.callback(stop.set)
        for loop in loops:
            tasks.create_task(every(PERIOD_S, loop, stop=stop))
        try:
            yield Mesh(leader, groupers, taker, brokers[3:], brokers[2])
        finally:
            stop.set()


@pytest.fixture(scope="module")
def registry(tmp_path_factory: pytest.TempPathFactory) -> ModelRegistry:
    return ModelRegistry.load(make_tiny_models(tmp_path_factory.mktemp("models"), weights=False))


async def existing(broker: Broker, version: int) -> set[int]:
    """Versions of learnt edges that have lanes."""
    layout = LaneLayout(work_version=version)
    found = set()
    for key in all_lanes((MODEL,), layout):
        if await broker.depth(key.queue_name) is not None:
            found.add(work_version_of(key.queue_name))
    return found - {0}


async def test_edges_change_under_load_and_no_request_is_lost(
    broker_rig: BrokerRig, registry: ModelRegistry
) -> None:
    async with asyncio.timeout(120.0), flowing(broker_rig, registry) as mesh:
        # No edge between the two kinds of one round parts those of the next.
        for sizes, drop in (((8, 400), False), ((40, 60), True), ((500, 1500), False)):
            before = mesh.version
            while mesh.version == before:
                await mesh.produce(40, sizes=sizes)
            if drop:
                await broker_rig.drop(mesh.brokers[0])
            await mesh.produce(150, sizes=sizes)
        ids = {f"r{number}" for number in range(mesh.sent)}
        await eventually(lambda: set(mesh.taker.served) == ids, within_s=60.0)
        version = mesh.version

        async def old_lanes_are_gone() -> bool:
            return await existing(mesh.producer, version) <= {version}

        await eventually(old_lanes_are_gone, within_s=60.0)
        assert version >= 3
        versions = {work_version_of(lane) for lane in mesh.taker.lanes_served}
        # The last edges may have been learnt when everything was in its lane already.
        assert 0 in versions
        assert len(versions) >= 4
        assert set(mesh.taker.served) == ids
