"""
The leader makes plans and numbers them with epochs.

Exactly one leader is active. Agents serve requests even without a leader.
"""

import asyncio
import math
from collections.abc import Callable
from dataclasses import dataclass, field

import structlog

from services.planner.leader.lane_forecasts import GROUPER_SILENT_S, forecasts_of
from services.planner.leader.lso_preview import heads_of
from services.planner.leader.orphaned_inboxes import InboxClaims
from services.planner.leader.plan_report import advice_of, cause_of, named_groups, waits_of
from services.planner.leader.policies import Planned, Planner, shape_of
from services.planner.leader.retirement import Retirement
from services.planner.leader.scaling import Scaling
from services.planner.leader.snapshot_builder import cluster_snapshot, lane_counts
from services.planner.settings import LeaderSettings
from services.planner.state import LeaderState
from shared.broker import topology
from shared.broker.counting import depths_of
from shared.broker.protocol import Broker, OutMessage
from shared.broker.queue_list import rewriting
from shared.broker.retry import send_best_effort
from shared.broker.work_queues import WorkQueues
from shared.contracts.base import InstanceId, ModelName, Seconds, UnixTime
from shared.contracts.control import LaneNonempty
from shared.contracts.lanes import LaneLayout, inbox_name, is_inbox, model_of, owner_of
from shared.contracts.plans import LanesForecast, PlanExplained, PlanPublished, PlanRequested
from shared.contracts.telemetry import InstanceStatus, LanesObserved, LanesPulled
from shared.runtime.clock import Clock
from shared.runtime.stall_detector import StallDetector
from solver.planning.capacity.advice import DeviceAdvice
from solver.planning.lanes import all_lanes, earlier_lanes, longest_deadline_s, queues_of
from solver.planning.problem.queue_counts import QueueCounts
from solver.planning.review import Review
from solver.prediction.calibration.lane_waits import LaneWaits

log = structlog.get_logger()
GROUPER_MEMORY_S = 600.0
"""Time for which a silent grouper's totals are kept, as its requests may still wait in lanes."""


@dataclass(slots=True, kw_only=True)
class Leader:
    """Plans while this process is the active consumer of the leader queue."""

    broker: Broker
    settings: LeaderSettings
    layout: LaneLayout
    models: Callable[[], tuple[ModelName, ...]]
    """Returns the models of the registry now."""
    state: LeaderState
    planner: Planner
    clock: Clock
    leader_id: str
    queues: WorkQueues
    """The work queues of this process."""
    claims: InboxClaims = field(init=False)
    retirement: Retirement = field(init=False)
    scaling: Scaling = field(init=False)
    attention: StallDetector = field(default_factory=StallDetector)
    waits: LaneWaits = field(default_factory=LaneWaits)
    _sent_at: UnixTime = -math.inf
    _planned: Planned | None = None
    """The plan in force."""
    _audited_at: UnixTime = -math.inf

    def __post_init__(self) -> None:
        self.claims = InboxClaims(self.broker, self.queues, self._keep)
        self.retirement = Retirement(self.broker, self.queues, self.settings.retire_idle_s)
        self.scaling = Scaling(options=self.settings.advice, layout=self.layout)

    def activated(self) -> None:
        """Record that this process received a delivery and is thus the active consumer."""
        if self.state.active_since is None:
            now = self.state.active_since = self.clock.now()
            # A process that does not lead receives no statuses, so the silence of instances counts
            # only from now.
            self.state.seen_at = dict.fromkeys(self.state.seen_at, now)
            self.claims.restart_grace(now)
            self.scaling = Scaling(options=self.settings.advice, layout=self.layout)
            self.state.advice = ()
            self.waits.give_up()
            self._sent_at = self._audited_at = -math.inf
            # This process has missed notices and reports, so it does not know which counts have
            # changed.
            self.state.counts = QueueCounts(now)
            log.info("leader.elected", leader_id=self.leader_id)

    def deposed(self) -> None:
        """Give up the leader role when its consumer is broken, but keep the view of the cluster."""
        if self.state.active_since is not None:
            self.state.active_since = None
            # Another leader may plan in the meantime, so later plans of this process need a new
            # epoch.
            self.state.plans.clear()
            log.info("leader.deposed", leader_id=self.leader_id)

    async def plan(self) -> None:
        """Execute one planning round: update the view, count queues, plan, and publish changes."""
        now, since = self.clock.now(), self.state.active_since
        if since is None:
            await self.retirement.abandon()
            return
        await self._look(now, leads_s=now - since)
        await self._audit(now)
        await self.retirement.work(self.state.counts, self.clock.now())
        counted_at = self.clock.now()
        self._count_waiting(counted_at)
        self.waits.counted(lane_counts(self.state), self.clock.now())
        if now - since < self.settings.settle_s:
            return
        # Build the snapshot in a thread and solve in a process, so that neither blocks the event
        # loop.
        snapshot = await asyncio.to_thread(
            cluster_snapshot,
            self.state.copied(),
            layout=self.layout,
            settings=self.settings,
            now=now,
        )
        if not snapshot.instances:
            return  # there is no instance, or all instances drain
        self.state.idle.look(
            [each for each in self.state.instances.values() if each.takes_in],
            self.state.counts.passages(),
            {each.instance_id for each in snapshot.instances if each.express_per_s},
            now,
        )
        planned = await self.planner.plan(snapshot)
        if not self.state.leads:
            return  # this process has lost the leader role meanwhile
        solve_s = self.clock.now() - now
        self._take(planned, now=now, solve_s=solve_s)
        await self._publish(planned, now=now, solve_s=solve_s)
        if planned.review is not None:
            await self._forecast(planned, planned.review, counted_at)

    def _count_waiting(self, now: UnixTime) -> None:
        """Update the waiting requests of each queue, and the times for which none was served."""
        state = self.state
        state.waiting = state.counts.waiting()
        state.unserved_s = state.counts.unserved_s(now)
        deadlines = {queue: longest_deadline_s(queue, self.layout) for queue in state.unserved_s}
        state.deadline_s = {queue: at for queue, at in deadlines.items() if at is not None}

    async def _look(self, now: UnixTime, *, leads_s: Seconds) -> None:
        """Update the sets of present and lost instances, and the inboxes of these instances."""
        await self.attend()
        self.state.forget_groupers(now - GROUPER_MEMORY_S)
        for name in self.state.forget_silent(now - self.settings.instance_timeout_s):
            log.warning("instance.lost", instance_id=name)
            self.claims.add(name, now)
        for name in self.state.instances:
            self.claims.returned(name)
        if leads_s >= self.settings.instance_timeout_s:
            await self.claims.work(now)

    def on_status(self, status: InstanceStatus) -> None:
        """Handle an agent's heartbeat."""
        now = self.clock.now()
        self.state.on_status(status, now)
        self.retirement.reported(status.source, status.released, now)

    def on_lanes(self, observed: LanesObserved) -> None:
        """
        Handle a grouper's totals.

        An absent instance counts as lost if the grouper used its inbox.
        """
        now = self.clock.now()
        self.state.on_lanes(observed, now)
        self.retirement.reported(observed.source, observed.released, now)
        for each in observed.inboxes:
            if each.instance_id not in self.state.instances:
                self.claims.used(each.instance_id, now - each.idle_s, now)

    def on_pulled(self, pulled: LanesPulled) -> None:
        """Handle an agent's recent pulls."""
        self.state.counts.pulled(pulled.source, pulled.pulled, self.clock.now())

    async def _keep(self, queue: str) -> None:
        """End the retirement of a queue that gets a request of a lost instance."""
        await self.retirement.keep(queue, self.state.counts, self.clock.now())

    async def attend(self) -> None:
        """Extend the timeouts of peers by stalls of this process; must be called continuously."""
        self.state.excuse(self.attention.missed_s())

    def _take(self, planned: Planned, *, now: UnixTime, solve_s: Seconds) -> None:
        """Make *planned* the plan in force."""
        state = self.state
        state.record.take(planned, state.places, now=now, duration_s=solve_s)
        state.alarms_planned += planned.snapshot.alarms_raised
        state.worker_restarts = self.planner.worker_restarts
        state.places = planned.places
        self._planned = planned

    async def advise(self) -> None:
        """
        Advise a number of instances of each device, by a plan where too many requests are expected
        to be late, or fewer instances may be enough.
        """
        now, since = self.clock.now(), self.state.active_since
        if since is None or now - since < self.settings.settle_s:
            return
        options, planned = self.settings.advice, self._planned
        advice: tuple[DeviceAdvice, ...] = ()
        floors = self.scaling.floors(self.state, now)
        review = planned.review if planned and self.state.instances else None
        if planned is not None and review is not None:
            is_late = review.cost.late_share > 1 - options.target
            if is_late or floors:
                advice = await self.planner.advise(planned.snapshot, options, floors)
        before = {each.device: each.advised for each in self.state.advice}
        self.state.advice = self.scaling.advised(self.state, advice, self.clock.now())
        for each in self.state.advice:
            if each.advised != before.get(each.device, each.present):
                log.info(
                    "scale.advised",
                    device=each.device,
                    present=each.present,
                    advised=each.advised,
                    bound=each.bound,
                    attainment=each.attainment,
                )

    async def explain(self, asked: PlanRequested) -> None:
        """Answer an operator's query if this process is the active leader and has a plan."""
        planned = self._planned
        if not self.state.leads or planned is None:
            return
        groups = await self.planner.explain(planned, most=asked.others)
        # Takes milliseconds for each instance that runs hundreds of requests.
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
            groups=named_groups(planned.snapshot, groups),
            heads=heads,
            instances=tuple(sorted({*self.state.instances, *self.claims.lost})),
            advice=advice_of(self.state),
            waits=waits_of(self.waits),
            work_queues=tuple(sorted(self.state.counts.queues)),
        )
        message = OutMessage.transient(explained)
        await send_best_effort(self.broker, topology.REPLIES, asked.reply_to, message)

    async def _audit(self, now: UnixTime) -> None:
        """
        Count the queues whose known counts may be wrong; every `audit_period_s`, count all existing
        queues.

        Queues whose notices were lost are found in the list of work queues. A queue with a doubtful
        count that is in neither the list nor a notice holds no requests. It is not counted, because
        most of these queues are deleted.
        """
        counts = self.state.counts
        audits = now - self._audited_at >= self.settings.audit_period_s
        if not (audits or counts.due):
            return
        if audits:
            self._audited_at = now
        doubtful = set(counts.due)
        async with rewriting(self.broker) as listed:
            inboxes = {queue for queue in listed.queues if is_inbox(queue)}
            self._claim(inboxes, now)
            found = listed.queues - inboxes - counts.queues
            if not listed.complete:
                log.info("queues.scan")
                found |= self._possible_queues()
            counts.due -= doubtful - counts.queues - found
            await self._count(counts, found | (counts.queues if audits else counts.due), now)
            owners = (*self.state.instances, *self.claims.lost)
            listed.queues = {*counts.queues, *map(inbox_name, owners)}
            listed.complete = True

    def _claim(self, inboxes: set[str], now: UnixTime) -> None:
        """
        Consider the owners of listed inboxes lost until they report: their inboxes may have
        requests that no other process knows of.
        """
        for inbox in inboxes:
            owner = owner_of(inbox)
            if owner not in self.state.instances:
                self.claims.listed(owner, now)

    def _possible_queues(self) -> set[str]:
        """Every lane and companion that can exist; RabbitMQ logs an error for each absent one."""
        models = self.models()
        lanes = all_lanes(models, self.layout) + earlier_lanes(models, self.layout)
        return queues_of(lanes)

    async def _count(self, counts: QueueCounts, queues: set[str], now: UnixTime) -> None:
        audit = counts.begin_audit(queues, now)
        try:
            depths = await depths_of(self.broker, queues)
        except BaseException:  # also when cancelled: the next audit counts these queues
            counts.due |= queues
            raise
        counted = {queue: depth.ready if depth else None for queue, depth in depths.items()}
        counts.counted(audit, counted, self.clock.now())

    def noticed(self, notice: LaneNonempty) -> None:
        """Handle a notice that a queue received requests."""
        counts, now = self.state.counts, self.clock.now()
        if is_inbox(notice.queue):
            return
        if notice.source:
            counts.put(notice.source, notice.queue, notice.put, now)
        else:
            counts.noticed(notice.queue, now)
            counts.due.add(notice.queue)

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
                work_queues=self._work_queues(queue.instance_id),
            )
            self.state.plans[queue.instance_id] = plan
            message = OutMessage.transient(plan)
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

    def _work_queues(self, instance_id: InstanceId) -> tuple[str, ...]:
        """Existing work queues of the models that an instance can serve."""
        status = self.state.instances.get(instance_id)
        models = {entry.model for entry in status.models} if status else set()
        return tuple(sorted(q for q in self.state.counts.queues if model_of(q) in models))

    async def _forecast(self, planned: Planned, review: Review, counted_at: UnixTime) -> None:
        """
        Publish lane forecasts.

        Lanes change in every round, so forecasts are published even if the plan is unchanged.
        """
        lanes = await forecasts_of(
            planned,
            review,
            self.state,
            self.waits,
            layout=self.layout,
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
        message = OutMessage.transient(forecast)
        await self.broker.send(topology.TELEMETRY, topology.FORECAST_KEY, message)
