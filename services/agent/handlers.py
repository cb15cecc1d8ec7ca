"""Handlers of plans, profiles, commands and notices. Messages of unknown kinds are ignored."""

import asyncio
from dataclasses import dataclass
from typing import get_args

import structlog

from services.agent.aborting import end_run
from services.agent.backends.base import EngineBackend
from services.agent.endings import CANCELLED_ERROR, Endings
from services.agent.gateway_files import GatewayFiles
from services.agent.lso.commands import LsoCommands
from services.agent.reporting import Reporter
from services.agent.residency import ModelResidency
from services.agent.state import AgentState, Ending
from shared.broker.consumer import Handler
from shared.broker.protocol import Delivery
from shared.broker.work_queues import WorkQueues
from shared.contracts.base import Message
from shared.contracts.control import (
    DrainInstance,
    GatewayModels,
    LaneNonempty,
    LsoCommand,
    QueuesRetired,
    QueuesRetiring,
    RequestCancel,
    RunStop,
    SnapshotRequested,
)
from shared.contracts.estimates import Profile
from shared.contracts.plans import PlanPublished

log = structlog.get_logger()


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """Components of the agent that the message handlers use."""

    state: AgentState
    engine: EngineBackend
    residency: ModelResidency
    commands: LsoCommands
    endings: Endings
    reporter: Reporter
    queues: WorkQueues
    gateway_files: GatewayFiles
    stop: asyncio.Event


async def on_lane_nonempty(message: LaneNonempty, ctx: Context, _delivery: Delivery) -> None:
    # A notice without a source is for the leader: a publisher waits for the queue's lock. The queue
    # may be in creation then, and RabbitMQ closes connections that poll such a queue.
    if message.source:
        ctx.residency.noticed(message.queue)


async def on_queues_retiring(message: QueuesRetiring, ctx: Context, _delivery: Delivery) -> None:
    """
    Release queues that the leader is about to delete, stop polling them, and report this to the
    leader.
    """
    ctx.queues.release(message.queues)
    ctx.residency.retiring(message.queues)
    await ctx.reporter.report()


async def on_queues_retired(message: QueuesRetired, ctx: Context, _delivery: Delivery) -> None:
    """Handle the end of a queue retirement: drop deleted queues, and poll kept queues again."""
    ctx.queues.forget(message.deleted + message.kept)
    ctx.residency.retired(deleted=message.deleted, kept=message.kept)


async def on_gateway_models(message: GatewayModels, ctx: Context, _delivery: Delivery) -> None:
    await ctx.gateway_files.observe(message)


async def on_plan(message: PlanPublished, ctx: Context, _delivery: Delivery) -> None:
    ctx.residency.plan_changed(message)


async def on_profile(message: Profile, ctx: Context, _delivery: Delivery) -> None:
    """Store the newest profile of each model on this kind of engine."""
    identity = ctx.engine.identity
    if (message.engine, message.device) == (identity.engine, identity.device):
        known = ctx.state.profiles.get(message.model)
        if known is None or known.version <= message.version:
            ctx.state.profiles[message.model] = message


async def on_run_stop(message: RunStop, ctx: Context, _delivery: Delivery) -> None:
    run = ctx.state.runs.get(message.request_id)
    if run is not None and run.run_id == message.run_id:
        end_run(ctx.state, ctx.engine, run, Ending.STOPPED)


async def on_request_cancel(message: RequestCancel, ctx: Context, _delivery: Delivery) -> None:
    """End the request if this instance holds it, and store the cancellation for later pulls."""
    ctx.state.cancel(message.request_id, message.reply_to)
    known = ctx.state.find(message.request_id)
    if known is None or known.request.reply_to != message.reply_to:
        return
    run = ctx.state.runs.get(message.request_id)
    # While a run is ending, `known` may be another copy of the request, which waits in the window.
    if run is not None and run.pulled is known:
        end_run(ctx.state, ctx.engine, run, Ending.CANCELLED)
    elif (pulled := ctx.state.release(message.request_id)) is not None:
        await ctx.endings.fail(pulled, CANCELLED_ERROR, dead_letter=False)


async def on_lso(message: LsoCommand, ctx: Context, _delivery: Delivery) -> None:
    """
    Start the ordered operation and return, so that later messages do not wait for the operation.
    """
    ctx.commands.take(message)


async def on_drain(message: DrainInstance, ctx: Context, _delivery: Delivery) -> None:
    log.info("service.draining", instance_id=ctx.state.instance_id, exit=message.exit)
    ctx.state.draining = True
    if message.exit:
        ctx.stop.set()
    else:
        # Report immediately: routers send requests to the instance until they receive this status.
        await ctx.reporter.report()
        await ctx.residency.hand_back_window()


async def on_snapshot_requested(
    _message: SnapshotRequested, ctx: Context, _delivery: Delivery
) -> None:
    await ctx.reporter.report()


HANDLERS: dict[type[Message], Handler[Context]] = {
    LaneNonempty: on_lane_nonempty,
    QueuesRetiring: on_queues_retiring,
    QueuesRetired: on_queues_retired,
    GatewayModels: on_gateway_models,
    PlanPublished: on_plan,
    Profile: on_profile,
    RunStop: on_run_stop,
    RequestCancel: on_request_cancel,
    **dict.fromkeys(get_args(LsoCommand), on_lso),
    DrainInstance: on_drain,
    SnapshotRequested: on_snapshot_requested,
}
