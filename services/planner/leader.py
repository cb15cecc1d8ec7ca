"""The leader: snapshot, plan, epochs. Exactly one is active; none is on the data path."""

import asyncio
import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import structlog

from services.planner.explaining import advice_of, advised, cause_of, told, waits_of
from services.planner.forecasting import GROUPER_SILENT_S, forecasts_of
from services.planner.foreseeing import heads_of
from services.planner.inboxes import InboxClaims
from services.planner.policies import Planned, Planner, shape_of
from services.planner.settings import LeaderSettings
from services.planner.state import LeaderState
from services.planner.view import cluster_snapshot, lane_counts, lane_of
from services.planner.work_classes import LaneRetirement, WorkClasses
from shared.broker import topology
from shared.broker.protocol import Broker, OutMessage
from shared.broker.retry import send_softly
from shared.contracts.base import ModelName, Seconds, UnixTime, encode, tag_of
from shared.contracts.lanes import LaneLayout, relegated_name, work_version_of
from shared.contracts.plans import LanesForecast, PlanAsked, PlanExplained, PlanPublished
from shared.runtime.attention import Attention
from shared.runtime.clock import Clock
from solver.planning.lanes import all_lanes
from solver.planning.review import Review
from solver.prediction.lane_waits import LaneWaits

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
    """As the operator set it; `classes` has the one in force."""
    models: tuple[ModelName, ...]
    state: LeaderState
    planner: Planner
    clock: Clock
    leader_id: str
    claims: InboxClaims = field(init=False)
    classes: WorkClasses = field(init=False)
    retirement: LaneRetirement = field(init=False)
    attention: Attention = field(default_factory=Attention)
    waits: LaneWaits = field(default_factory=LaneWaits)
    _scanned_at: UnixTime = -math.inf
    _sent_at: UnixTime = -math.inf
    _planned: Planned | None = None
    """The plan in force."""
    _absent: dict[str, UnixTime] = field(default_factory=dict)
    """Queues that were not there, and when; counting one costs a channel."""

    def __post_init__(self) -> None:
        self.claims = InboxClaims(self.broker)
        self.classes = WorkClasses(self.broker, self.settings, self.layout)
        self.retirement = LaneRetirement(self.broker, self.settings.lane_retire_s)

    def activated(self) -> None:
        """A delivery came: this process is the active consumer."""
        if self.state.active_since is None:
            now = self.state.active_since = self.clock.now()
            # Who does not lead hears and counts nothing: no instance was silent for longer.
            self.state.seen_at = dict.fromkeys(self.state.seen_at, now)
            self.claims.begin_anew(now)
            self.waits.give_up()
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
        """One round: look around, count, plan, publish what changed."""
        now, since = self.clock.now(), self.state.active_since
        if since is None:
            return
        await self._look(now, leads_s=now - since)
        # What comes while lanes are counted, one after the other, may count twice, but is not lost.
        counted_at = self.clock.now()
        await self._count()
        self.waits.counted(lane_counts(self.state), self.clock.now())
        await self.retirement.work(self.state, self.classes.layout.work_version, now)
        if now - since < self.settings.settle_s:
            return
        # In a thread, and solving in a process: the event loop goes on.
        snapshot = await asyncio.to_thread(
            cluster_snapshot,
            self.state.copied(),
            layout=self.classes.layout,
            settings=self.settings,
            now=now,
        )
        if not snapshot.instances:
            return  # none, or all of them drain
        planned = await self.planner.plan(snapshot)
        if not self.state.leads:
            return  # deposed meanwhile
        solve_s = self.clock.now() - now
        self._take(planned, now=now, solve_s=solve_s)
        await self._publish(planned, now=now, solve_s=solve_s)
        if planned.review is not None:
            await self._forecast(planned, planned.review, counted_at)

    async def _look(self, now: UnixTime, *, leads_s: Seconds) -> None:
        """Who is there, what is to be done for who is not, and which lanes there may be."""
        await self.attend()
        self.state.forget_groupers(now - GROUPER_MEMORY_S)
        for name in self.state.forget_silent(now - self.settings.instance_timeout_s):
            log.warning("instance.lost", instance_id=name)
            self.claims.add(name, now)
        for name in self.state.instances:
            self.claims.returned(name)
        if leads_s >= self.settings.instance_timeout_s:
            await self.claims.work(now)
        known = self.classes.layout
        await self.classes.work(self.state, now)
        if self.classes.layout != known:
            self._scanned_at = -math.inf
        if now - self._scanned_at > self.settings.scan_period_s:
            self.state.known_queues.update(self._possible_lanes())
            self._scanned_at = now

    async def attend(self) -> None:
        """Excuse others' silence while this process stood still; to be called all the time."""
        self.state.excuse(self.attention.missed_s())

    def _take(self, planned: Planned, *, now: UnixTime, solve_s: Seconds) -> None:
        """Follow *planned* from now on."""
        state = self.state
        state.record.take(planned, state.places, now=now, duration_s=solve_s)
        state.alarms_planned += planned.snapshot.alarms_raised
        state.worker_restarts = self.planner.worker_restarts
        state.places = planned.places
        self._planned = planned

    async def advise(self) -> None:
        """Find out how many instances are needed while too much is expected late."""
        planned = self._planned
        options = self.settings.advice
        review = planned.review if planned else None
        if not self.state.leads or planned is None or review is None:
            return
        if review.cost.late_share <= 1 - options.target:
            self.state.advice = ()
            return
        advice = await self.planner.advise(planned.snapshot, options)
        self.state.advice = advised(advice)
        for each in self.state.advice:
            log.info(
                "scale.advised",
                device=each.device,
                present=each.present,
                advised=each.advised,
                bound=each.bound,
                attainment=each.attainment,
            )

    async def explain(self, asked: PlanAsked) -> None:
        """Answer an operator; only who leads does, and only once there is a plan."""
        planned = self._planned
        if not self.state.leads or planned is None:
            return
        groups = await self.planner.explain(planned, most=asked.others)
        # Milliseconds for each instance that runs hundreds of requests.
        heads = await asyncio.to_thread(
            heads_of, planned, dict(self.state.instances), dict(self.state.profiles)
        )
        explained = PlanExplained(
            epoch=self.state.epoch,
            at=self.clock.now(),
            leader_id=self.leader_id,
            policy=planned.policy,
            cause=cause_of(planned),
            late_share=planned.review.cost.late_share if planned.review else 0.0,
            groups=told(planned.snapshot, groups),
            heads=heads,
            work_version=self.classes.layout.work_version,
            instances=tuple(sorted({*self.state.instances, *self.claims.lost})),
            advice=advice_of(self.state),
            waits=waits_of(self.waits),
        )
        message = OutMessage(body=encode(explained), kind=tag_of(PlanExplained), persistent=False)
        await send_softly(self.broker, topology.REPLIES, asked.reply_to, message)

    def _possible_lanes(self) -> Iterator[str]:
        """Lanes that may be there untold: those of replaced edges only if nobody has looked yet."""
        layout = self.classes.layout
        looked = self._scanned_at > -math.inf
        for key in all_lanes(self.models, layout):
            name = key.queue_name
            if not looked or work_version_of(name) in (0, layout.work_version):
                yield name

    async def _count(self) -> None:
        """Passive counts of all known lanes and their companions."""
        queues: set[str] = set()
        for lane in tuple(self.state.known_queues):
            if (key := lane_of(lane)) is not None:
                queues.update((key.queue_name, key.overflow_name, key.resume_name))
        queues.update(relegated_name(model) for model in self.models)
        now = self.clock.now()
        queues -= self.retirement.deleted
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

    async def _publish(self, planned: Planned, *, now: UnixTime, solve_s: Seconds) -> None:
        queues, review = planned.queues, planned.review
        changed = any(
            (old := self.state.plans.get(queue.instance_id)) is None
            or shape_of(old.queue) != shape_of(queue)
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
                policy=planned.policy,
                expected_late=review.cost.late_share if review else 0.0,
                solve_s=solve_s,
            )
            self.state.plans[queue.instance_id] = plan
            message = OutMessage(body=encode(plan), kind="plan.published.v1", persistent=False)
            await self.broker.send(topology.PLANS, queue.instance_id, message)
            await self.broker.send(
                topology.TELEMETRY, topology.plan_key(queue.instance_id), message
            )
        if changed:
            log.info(
                "plan.applied",
                epoch=self.state.epoch,
                instances=len(queues),
                policy=planned.policy,
                cause=review.cause.value if review and review.cause else None,
                late_share=review.cost.late_share if review else None,
            )

    async def _forecast(self, planned: Planned, review: Review, counted_at: UnixTime) -> None:
        """Each round, whether the plan has changed or not: lanes have."""
        lanes = await forecasts_of(
            planned,
            review,
            self.state,
            self.waits,
            layout=self.classes.layout,
            settings=self.settings,
            counted_at=counted_at,
        )
        if not self.state.leads:
            return
        now = self.clock.now()
        forecast = LanesForecast(
            epoch=self.state.epoch,
            at=now,
            age_s=max(0.0, now - counted_at),
            lanes=lanes,
            groupers=self.state.count_groupers(counted_at - GROUPER_SILENT_S),
        )
        message = OutMessage(body=encode(forecast), kind="lanes.forecast.v1", persistent=False)
        await self.broker.send(topology.TELEMETRY, topology.FORECAST_KEY, message)
