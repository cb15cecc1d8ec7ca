"""Creates, connects and runs the planner's components."""

import asyncio
import os
import secrets
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import structlog
from cachetools import FIFOCache

from services.planner.grouper.dead_letter_replies import DeadLetterReplies
from services.planner.grouper.expiry import Expiry
from services.planner.grouper.grouper import Grouper
from services.planner.grouper.intake import Intake
from services.planner.grouper.lane_reports import LaneReports
from services.planner.grouper.placement import Placement
from services.planner.grouper.stored.claims import Claims
from services.planner.grouper.stored.lost_requests import LostRequests
from services.planner.grouper.stored.questions import Questions
from services.planner.grouper.stored.replies import StoredReplies
from services.planner.grouper.tenants import DEMAND_PERIOD_S, TenantGate
from services.planner.grouper.watched_ends import WatchedEnds
from services.planner.handlers import (
    GROUPER_HANDLERS,
    NOTICE_HANDLERS,
    leader_state_handler,
    tick,
)
from services.planner.leader.leader import Leader
from services.planner.leader.plan_worker import PlanWorker
from services.planner.leader.policies import GENERATOR, PLAN_POLICIES, Planner
from services.planner.metrics import LeaderMetrics, grouper_metrics, routing_metrics
from services.planner.routed.routing import PULL, ROUTING_POLICIES, Routing
from services.planner.settings import GrouperSettings, Settings
from services.planner.state import GrouperState, LeaderState
from shared.broker import topology
from shared.broker.consumer import Dispatcher
from shared.broker.declaring import KEEP_PERIOD_S, declare_topology, keep_topology
from shared.broker.protocol import BindingSpec, Broker, DeliveryHandler
from shared.broker.stories import PERIOD_S as STORIES_PERIOD_S
from shared.broker.stories import StoryOutbox
from shared.broker.tasks import InTurn
from shared.broker.work_queues import WorkQueues
from shared.contracts.base import RequestId, Seconds, TenantId
from shared.contracts.errors import SettingsError
from shared.contracts.telemetry import source_name
from shared.models.registry import ModelRegistry
from shared.models.watch import NoSteps, RegistryWatch
from shared.runtime.cli import Ports
from shared.runtime.stall_detector import PERIOD_S as ATTENTION_PERIOD_S
from shared.runtime.tasks import every
from shared.store.settings import StoreSettings
from shared.store.store import Store, opened_store, state_of
from shared.tenants.policies import (
    Policies,
    WatchedPolicies,
    check_policies,
    follow_policies,
    open_policies,
)
from shared.tracing.grouping import traced
from solver.planning.review import ReviewOptions
from solver.prediction.lengths.prompt_lengths import PromptLengths
from solver.routing.shares import TenantShares
from solver.tenants.allocator import Allocator
from solver.tenants.leases import Holder

log = structlog.get_logger()
DISPATCH_PERIOD_S = 0.01
EXPIRY_PERIOD_S = 0.05
DEAD_LETTERS_AT_ONCE = 64
STORED_REPLIES_AT_ONCE = 256
QUESTIONS_AT_ONCE = 16
CLAIMS_PERIOD_S = 0.5
LOST_REQUESTS_PERIOD_S = 1.0
TICK_PERIOD_S = 1.0


def check(settings: Settings) -> None:
    """
    Check that the planner can run with the settings.

    Raises:
        SettingsError: A policy is unknown, and the message lists the known ones; or the file of
            tenants cannot be read or is invalid.
    """
    check_policies(settings.tenants)
    if settings.leader.policy not in PLAN_POLICIES:
        known = ", ".join(PLAN_POLICIES)
        raise SettingsError(
            f"leader.policy {settings.leader.policy!r} does not exist; must be one of: {known}"
        )
    if settings.grouper.routing.policy not in ROUTING_POLICIES:
        known = ", ".join(ROUTING_POLICIES)
        raise SettingsError(
            f"grouper.routing.policy {settings.grouper.routing.policy!r} does not exist; must "
            f"be one of: {known}"
        )


async def serve(ports: Ports[Settings], stop: asyncio.Event) -> None:
    """Run the configured roles until *stop*, then stop consuming and return."""
    check(ports.settings)
    registry = ModelRegistry.load(Path(ports.settings.registry))
    name = f"planner-{os.getpid()}-{secrets.token_hex(3)}"
    async with AsyncExitStack() as stack:
        is_grouper = "grouper" in ports.settings.roles
        settings = ports.settings.store if is_grouper else StoreSettings()
        store = await stack.enter_async_context(opened_store(settings))
        broker = await stack.enter_async_context(ports.open_broker(f"headway-{name}"))
        await declare_topology(broker)
        # A leader needs no policies.
        place = ports.settings.tenants if is_grouper else None
        policies = await open_policies(place, store, kept_s=settings.documents_kept_s)
        async with asyncio.TaskGroup() as tasks:
            planner = _Planner(ports, broker, store, registry, policies, name, tasks, stack, stop)
            if is_grouper:
                await planner.start_grouper()
            if "leader" in ports.settings.roles:
                await planner.start_leader()
            tasks.create_task(
                every(KEEP_PERIOD_S, lambda: keep_topology(broker), stop=stop), name="keep-topology"
            )
            tasks.create_task(planner.follow_registry(), name="follow-registry")
            tasks.create_task(follow_policies(planner.policies, stop), name="follow-tenants")
            ports.health.started()
            log.info("service.started", roles=ports.settings.roles, name=name)
        log.info("service.stopped", name=name)


@dataclass(frozen=True, slots=True)
class _GrouperParts:
    """A grouper and what works with it."""

    grouper: Grouper
    intake: Intake
    tenants: TenantGate
    claims: Claims
    lengths: PromptLengths


class _Planner:
    """The roles (grouper, leader) of one planner process."""

    def __init__(  # noqa: PLR0917 - one composition step
        self,
        ports: Ports[Settings],
        broker: Broker,
        store: Store | None,
        registry: ModelRegistry,
        policies: WatchedPolicies | Policies,
        name: str,
        tasks: asyncio.TaskGroup,
        stack: AsyncExitStack,
        stop: asyncio.Event,
    ) -> None:
        self._ports, self._broker, self._registry, self._name = ports, broker, registry, name
        self._store = store
        self._tasks, self._stack, self._stop = tasks, stack, stop
        self._incarnation = secrets.token_hex(6)
        self._queues = WorkQueues(broker, source_name(name, self._incarnation))
        self.policies = policies

    async def follow_registry(self) -> None:
        """Follow the registry file until the stop."""
        path = Path(self._ports.settings.registry)
        await RegistryWatch(path, self._registry, NoSteps()).follow(self._stop)

    async def start_grouper(self) -> None:
        """Move requests from the global queues to lanes, and publish what is known of the lanes."""
        parts = self._grouper()
        await self._follow_mesh(parts)
        await self._consume_requests(parts)
        if self._store is not None:
            await self._start_store(self._store, parts.claims)
        self._start_reports(parts)
        if parts.grouper.routing is not None:
            self._start_routing(parts.grouper.routing)

    def _grouper(self) -> _GrouperParts:
        ports, settings, policies = self._ports, self._ports.settings.grouper, self.policies
        state = GrouperState(
            shares=TenantShares(
                max_share=settings.max_tenant_share,
                free_tokens=settings.free_outstanding_tokens,
                weight=lambda tenant: policies.policy(tenant).weight,
            ),
            recent=FIFOCache(settings.duplicate_memory),
        )
        source = source_name(self._name, self._incarnation)
        tenants = self._tenant_gate(state, source)

        def finish(request_id: RequestId, tenant: TenantId) -> None:
            state.finish(request_id, tenant)
            tenants.ended(tenant, request_id)

        lengths = PromptLengths()
        intake = Intake(
            registry=self._registry,
            settings=settings,
            layout=ports.settings.layout,
            lengths=lengths,
            policies=policies,
            finals_kept_s=None if self._store is None else ports.settings.store.finals_kept_s,
        )
        claims = Claims(store=self._store, holder=source)
        placement = Placement(
            broker=self._broker,
            queues=self._queues,
            state=state,
            clock=ports.clock,
            routing=self._routing(),
        )
        reports = LaneReports(
            broker=self._broker,
            clock=ports.clock,
            sender=self._name,
            incarnation=self._incarnation,
            state=state,
            queues=self._queues,
            layout=ports.settings.layout,
            policies=policies,
        )
        grouper = Grouper(
            broker=self._broker,
            intake=intake,
            settings=settings,
            state=state,
            clock=ports.clock,
            placement=placement,
            expiry=self._expiry(state, settings, finish),
            tenants=tenants,
            claims=claims,
            reports=reports,
        )
        return _GrouperParts(grouper, intake, tenants, claims, lengths)

    def _tenant_gate(self, state: GrouperState, source: str) -> TenantGate:
        policies = self.policies
        return TenantGate(
            broker=self._broker,
            clock=self._ports.clock,
            policies=policies,
            holder=Holder(source=source),
            allocator=Allocator(
                limit=lambda tenant, kind: policies.policy(tenant).limit(kind),
                listens_since=self._ports.clock.now(),
            ),
            outstanding=state.shares.outstanding,
        )

    async def _follow_mesh(self, parts: _GrouperParts) -> None:
        """Follow what other services publish."""
        keys = [
            (topology.PROFILES, ""),
            (topology.CONTROL, topology.CONTROL_RETIREMENT),
            (topology.TELEMETRY, topology.OBSERVED_REQUEST_KEY),
            (topology.TELEMETRY, topology.FORECAST_KEY),
            (topology.TELEMETRY, topology.EXPIRED_KEY),
            (topology.TELEMETRY, topology.TENANT_DEMAND_KEY),
            (topology.TELEMETRY, topology.TENANT_GRANTS_KEY),
            (topology.TELEMETRY, topology.USAGE_TODAY_KEY),
        ]
        if parts.grouper.routing is not None:
            routed = (topology.STATUS_KEYS, topology.PREFILLS_KEY, topology.ROUTER_KEY)
            keys += [(topology.TELEMETRY, key) for key in routed]
        dispatcher = Dispatcher(GROUPER_HANDLERS, parts.grouper)
        await self._listen(f"grouper.{self._name}", keys, dispatcher, prefetch=256)
        # The time from which this process hears all demands.
        parts.tenants.allocator.listens_since = self._ports.clock.now()
        self._broker.on_connection_lost(parts.tenants.deposed)

    async def _consume_requests(self, parts: _GrouperParts) -> None:
        ports, grouper, settings = self._ports, parts.grouper, self._ports.settings.grouper
        tenants = parts.tenants
        self._stack.push_async_callback(self._queues.close)
        await self._consume(
            topology.TENANTS, tenants.allocate, prefetch=64, on_broken=tenants.deposed
        )
        on_request = traced(ports.tracer, grouper.on_request)
        await self._consume(topology.GLOBAL_INTERACTIVE, on_request, settings.interactive_prefetch)
        await self._consume(topology.GLOBAL_REST, InTurn(on_request), settings.rest_prefetch)
        await self._consume(topology.HELD, InTurn(grouper.on_held), settings.rest_prefetch)
        dead_letter_replies = DeadLetterReplies(
            broker=self._broker,
            clock=ports.clock,
            state=grouper.state,
            expiry=grouper.expiry,
            stored_tenant=parts.intake.stored_tenant,
        )
        await self._consume(
            topology.DEAD_LETTER_REPLIES, dead_letter_replies.on_dead_letter, DEAD_LETTERS_AT_ONCE
        )
        questions = Questions(broker=self._broker, store=self._store, settings=settings)
        await self._consume(topology.QUESTIONS, questions.on_question, QUESTIONS_AT_ONCE)

    def _start_reports(self, parts: _GrouperParts) -> None:
        """Start what the grouper does periodically."""
        ports, grouper, settings = self._ports, parts.grouper, self._ports.settings.grouper
        grouper_metrics(ports.health.metrics, grouper.state, parts.lengths)
        ports.health.details = lambda: {
            "tenants": msgspec.to_builtins(self.policies.state),
            "store": state_of(self._store),
        }
        self._repeat("grouper.report", settings.report_period_s, grouper.report)
        self._repeat("grouper.tenants", DEMAND_PERIOD_S, parts.tenants.report)
        self._repeat("grouper.expiry", EXPIRY_PERIOD_S, grouper.expiry.end_due)

    async def _start_store(self, store: Store, claims: Claims) -> None:
        replies = StoredReplies(broker=self._broker, store=store, stop=self._stop)
        await self._consume(topology.STORED, replies.on_reply, STORED_REPLIES_AT_ONCE)
        self._tasks.create_task(store.follow(self._stop), name="follow-store")
        self._repeat("grouper.claims", CLAIMS_PERIOD_S, claims.mark_late)
        lost = LostRequests(
            broker=self._broker,
            store=store,
            holder=claims.holder,
            own=self._ports.settings.store.memory_mesh,
            clock=self._ports.clock,
        )
        self._repeat("grouper.lost_requests", LOST_REQUESTS_PERIOD_S, lost.end_some)

    def _expiry(
        self,
        state: GrouperState,
        settings: GrouperSettings,
        finish: Callable[[RequestId, TenantId], None],
    ) -> Expiry:
        queue = topology.private_queue(f"grouper.{self._name}").name

        async def hear_first_tokens() -> None:
            key = topology.PREFILLS_KEY
            await self._broker.bind(
                BindingSpec(exchange=topology.TELEMETRY, queue=queue, routing_key=key)
            )

        return Expiry(
            broker=self._broker,
            stories=self._stories(),
            state=state,
            clock=self._ports.clock,
            sender=self._name,
            watched=WatchedEnds(settings.max_watched_ends),
            ended=FIFOCache(settings.expired_memory),
            finish=finish,
            hear_first_tokens=hear_first_tokens,
        )

    def _stories(self) -> StoryOutbox | None:
        """Records of the requests that this grouper ends, if the settings ask for them."""
        if not self._ports.settings.stories:
            return None
        stories = StoryOutbox(self._broker, self._name)
        self._stack.push_async_callback(stories.send)
        self._repeat("grouper.stories", STORIES_PERIOD_S, stories.send)
        return stories

    def _start_routing(self, routing: Routing) -> None:
        settings = self._ports.settings.grouper.routing
        routing_metrics(self._ports.health.metrics, routing)
        self._broker.on_connection_lost(routing.on_connection_lost)
        # When the process stops consuming, it waits for requests in progress. `close` therefore
        # first releases the requests that wait to be sent.
        self._stack.callback(routing.close)
        self._repeat("routing.dispatch", DISPATCH_PERIOD_S, routing.dispatch)
        self._repeat("routing.share_work", settings.work_period_s, routing.share_work)
        self._repeat("routing.share", settings.share_period_s, routing.share)

    def _routing(self) -> Routing | None:
        settings = self._ports.settings.grouper.routing
        if settings.policy == PULL:
            return None
        return Routing(
            broker=self._broker, settings=settings, clock=self._ports.clock, sender=self._name
        )

    async def start_leader(self) -> None:
        ports, broker, settings = self._ports, self._broker, self._ports.settings.leader
        worker = None
        if settings.policy == GENERATOR:
            options = ReviewOptions(
                importance_weight=settings.importance_weight, budget_s=settings.solve_budget_s
            )
            worker = await self._stack.enter_async_context(PlanWorker(options))
        leader = Leader(
            broker=broker,
            settings=settings,
            planner=Planner(settings.policy, settings.importance_weight, worker),
            layout=ports.settings.layout,
            models=lambda: self._registry.bases,
            state=LeaderState(),
            queues=self._queues,
            clock=ports.clock,
            leader_id=self._name,
        )
        plan = LeaderMetrics(ports.health.metrics, leader.state).counting(leader.plan)
        keys = [
            (topology.CONTROL, topology.CONTROL_LANE),
            (topology.CONTROL, topology.CONTROL_PLAN),
            (topology.PROFILES, ""),
        ]
        dispatcher = Dispatcher(NOTICE_HANDLERS, leader)
        await self._listen(f"leader.{self._name}", keys, dispatcher, prefetch=64)
        broker.on_connection_lost(leader.deposed)
        handler = leader_state_handler(leader)
        await self._consume(
            topology.LEADER, handler, prefetch=64, gathers_acks=True, on_broken=leader.deposed
        )
        self._repeat("leader.plan", settings.plan_period_s, plan)
        self._repeat("leader.attend", ATTENTION_PERIOD_S, leader.attend)
        self._repeat("leader.advise", settings.advise_period_s, leader.advise)
        self._repeat("leader.tick", TICK_PERIOD_S, lambda: tick(leader))

    async def _listen(
        self, name: str, keys: list[tuple[str, str]], dispatcher: Dispatcher[Any], prefetch: int
    ) -> None:
        """Consume messages of pairs (exchange, routing key) on a queue of this process."""
        queue = topology.private_queue(name)
        await self._broker.declare_queue(queue)
        for exchange, key in keys:
            await self._broker.bind(
                BindingSpec(exchange=exchange, queue=queue.name, routing_key=key)
            )
        await self._consume(queue.name, dispatcher.handle, prefetch, gathers_acks=True)

    async def _consume(
        self,
        queue: str,
        handler: DeliveryHandler,
        prefetch: int,
        *,
        gathers_acks: bool = False,
        on_broken: Callable[[], None] = lambda: None,
    ) -> None:
        """Consume *queue* until the process stops."""
        subscription = await self._broker.consume(
            queue, handler, prefetch=prefetch, gathers_acks=gathers_acks, on_broken=on_broken
        )
        self._stack.push_async_callback(subscription.cancel)

    def _repeat(self, name: str, period_s: Seconds, action: Callable[[], Awaitable[None]]) -> None:
        """Start a task that calls *action* periodically until the process stops."""
        self._tasks.create_task(every(period_s, action, stop=self._stop), name=name)
