"""Leaders over the in-process broker; the test publishes the cluster's messages."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from msgspec.structs import replace

from services.planner.handlers import NOTICE_HANDLERS, leader_state_handler
from services.planner.leader.leader import Leader
from services.planner.leader.policies import Planner
from services.planner.settings import LeaderSettings
from services.planner.state import LeaderState
from shared.broker import topology
from shared.broker.consumer import Dispatcher
from shared.broker.memory.hub import MemoryHub
from shared.broker.protocol import OutMessage
from shared.broker.queue_list import list_queue
from shared.broker.work_queues import WorkQueues
from shared.contracts.base import Decoder, InstanceId, Message, ModelName, encode
from shared.contracts.control import LaneNonempty
from shared.contracts.lanes import LaneLayout
from shared.contracts.plans import PlanPublished
from shared.contracts.requests import QueuedRequest
from shared.contracts.telemetry import InstanceStatus, ModelState, Residency
from tests.clocks import FakeClock
from tests.deliveries import UnreliableBroker
from tests.queued import MODEL, OTHER
from tests.unit.planner.rig import listen, queued_bytes

SETTINGS = LeaderSettings(
    settle_s=1.5, refresh_period_s=2.0, instance_timeout_s=5.0, min_residency_swaps=0.0
)
decode_plan: Decoder[PlanPublished] = Decoder(PlanPublished)
PUBLISHER = "publisher/first"
_seq = count(1)


def status(name: str = "i1", *, active: ModelName | None = MODEL, **fields: Any) -> InstanceStatus:
    """Status of an instance that can serve the two models."""
    values: dict[str, Any] = {
        "incarnation": "first",
        "seq": next(_seq),
        "at": 0.0,
        "engine": "simulated",
        "device": "simulated",
        "model": active,
        "models": tuple(
            ModelState(model=model, residency=Residency.ACTIVE)
            if model == active
            else ModelState(model=model, residency=Residency.COLD, activate_s=1.0)
            for model in (MODEL, OTHER)
        ),
    }
    return InstanceStatus(instance_id=InstanceId(name), **(values | fields))


@dataclass
class LeaderRig:
    """Leaders, and the test's client of their broker."""

    hub: MemoryHub
    far: UnreliableBroker
    clock: FakeClock
    plans: str
    """A queue that receives copies of all plans."""
    stack: AsyncExitStack
    leaders: list[Leader] = field(default_factory=list)
    put: Counter[str] = field(default_factory=Counter)
    """Queue -> number of requests in notices."""

    async def leader(self, *, layout: LaneLayout | None = None, **settings: Any) -> Leader:
        """Add a leader that consumes as in the service."""
        broker = await self.stack.enter_async_context(UnreliableBroker(self.hub))
        leader = Leader(
            broker=broker,
            settings=replace(SETTINGS, **settings),
            planner=Planner("edf", SETTINGS.importance_weight),
            layout=layout or LaneLayout(),
            models=lambda: (MODEL, OTHER),
            state=LeaderState(),
            queues=WorkQueues(broker, f"leader-{len(self.leaders)}"),
            clock=self.clock,
            leader_id=f"leader-{len(self.leaders)}",
        )
        self.leaders.append(leader)
        broker.on_connection_lost(leader.deposed)
        handler = leader_state_handler(leader)
        await broker.consume(topology.LEADER, handler, prefetch=64, on_broken=leader.deposed)
        return leader

    async def hear(self, message: Message, key: str = "status.i") -> None:
        """Publish telemetry and wait until the active leader has handled it."""
        await self.far.publish(topology.TELEMETRY, key, OutMessage(body=encode(message)))
        for _ in range(10):
            await asyncio.sleep(0)

    async def wait_in_lane(self, *requests: QueuedRequest, queue: str | None = None) -> None:
        """Publish requests to their lanes, or all of them to *queue*."""
        for request in requests:
            name = queue or request.lane
            await topology.declare_work_queue(self.far, name)
            await list_queue(self.far, name)
            await self.far.publish(topology.LANES, name, queued_bytes(request))
            self.put[name] += 1
            notice = LaneNonempty(queue=name, source=PUBLISHER, put=self.put[name])
            for leader in self.leaders:
                if leader.state.leads:
                    leader.state.counts.observe(PUBLISHER, {}, self.clock.now())
                    leader.noticed(notice)

    async def published(self) -> list[PlanPublished]:
        """Plans that leaders have published since the last call."""
        found = []
        while (delivery := await self.far.get(self.plans)) is not None:
            found.append(decode_plan(delivery.body))
        return found


@asynccontextmanager
async def open_cluster() -> AsyncIterator[LeaderRig]:
    hub = MemoryHub()
    async with AsyncExitStack() as stack, UnreliableBroker(hub) as far:
        await topology.declare(far)
        plans = await listen(far, topology.TELEMETRY, "plan.#")
        yield LeaderRig(hub, far, FakeClock(), plans, stack)


def notices_of(leader: Leader) -> Dispatcher[Leader]:
    return Dispatcher(NOTICE_HANDLERS, leader)


async def settled(cluster: LeaderRig, **settings: float) -> Leader:
    """A leader with one instance, after its settling time."""
    leader = await cluster.leader(**settings)
    await cluster.hear(status())
    cluster.clock.advance(1.5)
    return leader


def lanes_of(plan: PlanPublished) -> list[tuple[str, set[str]]]:
    return [
        (segment.model, {quota.lane for quota in segment.lanes}) for segment in plan.queue.segments
    ]


def drop(leader: Leader) -> None:
    assert isinstance(leader.broker, UnreliableBroker)
    leader.broker.drop_connection()
