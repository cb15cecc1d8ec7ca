"""Creates, connects and runs the planner's components."""

import asyncio
import os
import secrets
from contextlib import AsyncExitStack
from pathlib import Path

import structlog
from cachetools import FIFOCache

from services.planner.grouper.dead_letter_replies import DeadLetterReplies
from services.planner.grouper.grouper import Grouper
from services.planner.grouper.intake import Intake
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
from services.planner.settings import Settings
from services.planner.state import GrouperState, LeaderState
from shared.broker import topology
from shared.broker.consumer import Dispatcher
from shared.broker.protocol import BindingSpec, Broker
from shared.contracts.errors import SettingsError
from shared.models.registry import ModelRegistry
from shared.runtime.cli import Ports
from shared.runtime.stall_detector import PERIOD_S as ATTENTION_PERIOD_S
from shared.runtime.tasks import every
from solver.planning.review import ReviewOptions
from solver.prediction.lengths.prompt_lengths import PromptLengths
from solver.routing.shares import TenantShares

log = structlog.get_logger()
NOTICE_PERIOD_S = 0.01
DISPATCH_PERIOD_S = 0.01
TICK_PERIOD_S = 1.0


def check(settings: Settings) -> None:
    """
    Check that the settings can work.

    Raises:
        SettingsError: A policy is unknown; the message lists the known ones.
    """
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
        broker = await stack.enter_async_context(ports.open_broker(f"headway-{name}"))
        await topology.declare(broker)
        async with asyncio.TaskGroup() as tasks:
            if "grouper" in ports.settings.roles:
                await _start_grouper(ports, broker, registry, name, tasks, stack, stop)
            if "leader" in ports.settings.roles:
                await _start_leader(ports, broker, registry, name, tasks, stack, stop)
            ports.health.started()
            log.info("service.started", roles=ports.settings.roles, name=name)
        log.info("service.stopped", name=name)


async def _start_grouper(  # noqa: PLR0917 - one composition step, in its own function
    ports: Ports[Settings],
    broker: Broker,
    registry: ModelRegistry,
    name: str,
    tasks: asyncio.TaskGroup,
    stack: AsyncExitStack,
    stop: asyncio.Event,
) -> None:
    settings = ports.settings.grouper
    lengths = PromptLengths()
    routing = _routing(ports, broker, name)
    grouper = Grouper(
        broker=broker,
        intake=Intake(
            registry=registry, settings=settings, layout=ports.settings.layout, lengths=lengths
        ),
        settings=settings,
        state=GrouperState(
            shares=TenantShares(
                max_share=settings.max_tenant_share, free_tokens=settings.free_outstanding_tokens
            ),
            recent=FIFOCache(settings.duplicate_memory),
        ),
        clock=ports.clock,
        sender=name,
        routing=routing,
    )
    dead_letter_replies = DeadLetterReplies(broker=broker, clock=ports.clock)
    grouper_metrics(ports.health.metrics, grouper.state, lengths)
    observed = topology.private_queue(f"grouper.{name}")
    await broker.declare_queue(observed)
    keys = [topology.OBSERVED_REQUEST_KEY, topology.FORECAST_KEY]
    if routing is not None:
        keys += [topology.STATUS_KEYS, topology.PREFILLS_KEY, topology.ROUTER_KEY]
    await broker.bind(BindingSpec(exchange=topology.PROFILES, queue=observed.name, routing_key=""))
    for key in keys:
        await broker.bind(
            BindingSpec(exchange=topology.TELEMETRY, queue=observed.name, routing_key=key)
        )
    for queue, handler, prefetch in (
        (topology.GLOBAL_INTERACTIVE, grouper.on_request, settings.interactive_prefetch),
        (topology.GLOBAL_REST, grouper.on_request, settings.rest_prefetch),
        (topology.DEAD_LETTER_REPLIES, dead_letter_replies.on_dead_letter, 8),
        (observed.name, Dispatcher(GROUPER_HANDLERS, grouper).handle, 256),
    ):
        subscription = await broker.consume(queue, handler, prefetch=prefetch)
        stack.push_async_callback(subscription.cancel)
    tasks.create_task(
        every(settings.report_period_s, grouper.report, stop=stop), name="grouper.report"
    )
    tasks.create_task(
        every(NOTICE_PERIOD_S, grouper.send_owed_notices, stop=stop), name="grouper.notices"
    )
    if routing is not None:
        routing_metrics(ports.health.metrics, routing)
        broker.on_connection_lost(routing.on_connection_lost)
        # No request may wait for its turn when consuming ends, which waits for requests in
        # progress.
        stack.callback(routing.close)
        tasks.create_task(
            every(DISPATCH_PERIOD_S, routing.dispatch, stop=stop), name="routing.dispatch"
        )
        tasks.create_task(
            every(settings.routing.work_period_s, routing.share_work, stop=stop),
            name="routing.share_work",
        )
        tasks.create_task(
            every(settings.routing.share_period_s, routing.share, stop=stop), name="routing.share"
        )


def _routing(ports: Ports[Settings], broker: Broker, name: str) -> Routing | None:
    settings = ports.settings.grouper.routing
    if settings.policy == PULL:
        return None
    return Routing(broker=broker, settings=settings, clock=ports.clock, sender=name)


async def _start_leader(  # noqa: PLR0917 - one composition step, in its own function
    ports: Ports[Settings],
    broker: Broker,
    registry: ModelRegistry,
    name: str,
    tasks: asyncio.TaskGroup,
    stack: AsyncExitStack,
    stop: asyncio.Event,
) -> None:
    settings = ports.settings.leader
    worker = None
    if settings.policy == GENERATOR:
        options = ReviewOptions(
            importance_weight=settings.importance_weight, budget_s=settings.solve_budget_s
        )
        worker = await stack.enter_async_context(PlanWorker(options))
    leader = Leader(
        broker=broker,
        settings=settings,
        planner=Planner(settings.policy, settings.importance_weight, worker),
        layout=ports.settings.layout,
        models=registry.bases,
        state=LeaderState(),
        clock=ports.clock,
        leader_id=name,
    )
    plan = LeaderMetrics(ports.health.metrics, leader.state).counting(leader.plan)
    broker.on_connection_lost(leader.deposed)
    notices = topology.private_queue(f"leader.{name}")
    await broker.declare_queue(notices)
    for exchange, key in (
        (topology.CONTROL, topology.CONTROL_LANE),
        (topology.CONTROL, topology.CONTROL_PLAN),
        (topology.PROFILES, ""),
    ):
        await broker.bind(BindingSpec(exchange=exchange, queue=notices.name, routing_key=key))
    for queue, handler in (
        (notices.name, Dispatcher(NOTICE_HANDLERS, leader).handle),
        (topology.LEADER, leader_state_handler(leader)),
    ):
        subscription = await broker.consume(queue, handler, prefetch=64)
        stack.push_async_callback(subscription.cancel)
    tasks.create_task(every(settings.plan_period_s, plan, stop=stop), name="leader.plan")
    tasks.create_task(every(ATTENTION_PERIOD_S, leader.attend, stop=stop), name="leader.attend")
    tasks.create_task(
        every(settings.advise_period_s, leader.advise, stop=stop), name="leader.advise"
    )
    tasks.create_task(every(TICK_PERIOD_S, lambda: tick(leader), stop=stop), name="leader.tick")
