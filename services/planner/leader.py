"""The leader: snapshot, plan, epochs. Exactly one is active; none is on the data path."""

import asyncio
import math
from dataclasses import dataclass, field

import structlog

from services.planner.inboxes import InboxClaims
from services.planner.settings import LeaderSettings
from services.planner.state import LeaderState
from services.planner.view import cluster_snapshot, lane_of
from shared.broker import topology
from shared.broker.protocol import Broker, OutMessage
from shared.contracts.base import ModelName, Seconds, UnixTime, encode
from shared.contracts.lanes import LaneKey, LaneLayout, relegated_name
from shared.contracts.plans import PlanPublished, VirtualQueue
from shared.runtime.clock import Clock
from solver.planning.baselines import PLAN_POLICIES
from solver.planning.lanes import all_lanes

log = structlog.get_logger()
COUNTS_AT_ONCE = 8
ABSENT_RECHECK_S = 5.0
GROUPER_MEMORY_S = 600.0
"""A grouper's totals outlive it: what it put into lanes may still wait there."""


@dataclass(slots=True, kw_only=True)
class Leader:
    """Plans while this process is the active consumer of the leader queue."""

    broker: Broker
    settings: LeaderSettings
    layout: LaneLayout
    models: tuple[ModelName, ...]
    state: LeaderState
    clock: Clock
    leader_id: str
    claims: InboxClaims = field(init=False)
    _scanned_at: UnixTime = -math.inf
    _sent_at: UnixTime = -math.inf
    _absent: dict[str, UnixTime] = field(default_factory=dict)
    """Queues that were not there, and when; counting one costs a channel."""

    def __post_init__(self) -> None:
        self.claims = InboxClaims(self.broker)

    def activated(self) -> None:
        """A delivery came: this process is the active consumer."""
        if self.state.active_since is None:
            self.state.active_since = self.clock.now()
            self._scanned_at = self._sent_at = -math.inf
            log.info("leader.elected", leader_id=self.leader_id)

    def deposed(self) -> None:
        """The connection went, and with it the role; the view of the cluster stays useful."""
        if self.state.active_since is not None:
            self.state.active_since = None
            # Another may plan meanwhile: what comes after it needs an epoch of its own.
            self.state.plans.clear()
            log.info("leader.deposed", leader_id=self.leader_id)

    async def plan(self) -> None:
        """One round: count, plan, publish what changed."""
        now = self.clock.now()
        if self.state.active_since is None:
            return
        self.state.forget_groupers(now - GROUPER_MEMORY_S)
        for name in self.state.forget_silent(now - self.settings.instance_timeout_s):
            log.warning("instance.lost", instance_id=name)
            self.claims.add(name, now)
        for name in self.state.instances:
            self.claims.returned(name)
        await self.claims.work(now)
        if now - self._scanned_at > self.settings.scan_period_s:
            self.state.known_queues.update(key.queue_name for key in self._every_lane())
            self._scanned_at = now
        await self._count()
        if now - self.state.active_since < self.settings.settle_s or not self.state.instances:
            return
        snapshot = cluster_snapshot(self.state, layout=self.layout, settings=self.settings, now=now)
        started = self.clock.now()
        queues = PLAN_POLICIES[self.settings.policy](snapshot)
        await self._publish(queues, now=now, solve_s=self.clock.now() - started)

    def _every_lane(self) -> tuple[LaneKey, ...]:
        return all_lanes(self.models, self.layout)

    async def _count(self) -> None:
        """Passive counts of all known lanes and their companions."""
        queues: set[str] = set()
        for lane in tuple(self.state.known_queues):
            if (key := lane_of(lane)) is not None:
                queues.update((key.queue_name, key.overflow_name, key.resume_name))
        queues.update(relegated_name(model) for model in self.models)
        now = self.clock.now()
        queues -= {queue for queue, at in self._absent.items() if now - at < ABSENT_RECHECK_S}
        limit = asyncio.Semaphore(COUNTS_AT_ONCE)

        async def count(queue: str) -> tuple[str, int | None]:
            async with limit:
                depth = await self.broker.depth(queue)
            return queue, None if depth is None else depth.ready

        counted = await asyncio.gather(*(count(queue) for queue in sorted(queues)))
        self.state.waiting = {queue: ready for queue, ready in counted if ready is not None}
        for queue, ready in counted:
            if ready is None:
                self._absent[queue] = now
                self.state.known_queues.discard(queue)

    def noticed(self, queue: str) -> None:
        """Somebody published to *queue*: it is there."""
        self._absent.pop(queue, None)
        if lane_of(queue) is not None:
            self.state.known_queues.add(queue)

    async def _publish(
        self, queues: tuple[VirtualQueue, ...], *, now: UnixTime, solve_s: Seconds
    ) -> None:
        changed = any(
            (old := self.state.plans.get(queue.instance_id)) is None
            or _shape(old.queue) != _shape(queue)
            for queue in queues
        )
        if not changed and now - self._sent_at < self.settings.refresh_period_s:
            return
        if changed:
            self.state.epoch += 1
        self._sent_at = now
        for queue in queues:
            plan = PlanPublished(
                epoch=self.state.epoch,
                issued_at=now,
                leader_id=self.leader_id,
                queue=queue,
                policy=self.settings.policy,
                solve_s=solve_s,
            )
            self.state.plans[queue.instance_id] = plan
            message = OutMessage(body=encode(plan), kind="plan.published.v1", persistent=False)
            await self.broker.send(topology.PLANS, queue.instance_id, message)
            await self.broker.send(
                topology.TELEMETRY, topology.plan_key(queue.instance_id), message
            )
        if changed:
            log.info("plan.applied", epoch=self.state.epoch, instances=len(queues))


def _shape(queue: VirtualQueue) -> tuple[tuple[str, frozenset[str]], ...]:
    """What makes a plan another plan: models in order and their lanes, not the quotas."""
    return tuple(
        (segment.model, frozenset(quota.lane for quota in segment.lanes))
        for segment in queue.segments
    )
