"""Plans, profiles, commands and notices as events. Messages of unknown kinds are ignored."""

import asyncio
from dataclasses import dataclass
from typing import get_args

import structlog

from services.agent.cancels import Cancels
from services.agent.shell import Shell
from services.agent.telemetry.reporting import Reporter
from shared.broker import topology
from shared.broker.consumer import Handler
from shared.broker.protocol import Delivery
from shared.broker.work_queues import WorkQueues
from shared.contracts.base import InstanceId, Message
from shared.contracts.control import (
    CancelsMarked,
    DrainInstance,
    LaneNonempty,
    LsoCommand,
    QueuesRetired,
    QueuesRetiring,
    RequestCancel,
    RunStop,
    SnapshotRequested,
    StoredCancel,
)
from shared.contracts.errors import ContractError
from shared.contracts.estimates import Profile
from shared.contracts.lanes import LaneKey
from shared.contracts.plans import PlanPublished
from solver.instance.events import (
    Cancelled,
    Draining,
    Noticed,
    Ordered,
    Planned,
    Profiled,
    Retired,
    Retiring,
    RunStopped,
)

log = structlog.get_logger()


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """Components of the agent that the message handlers use."""

    instance_id: InstanceId
    kind: tuple[str, str]
    """Engine and device: the key of profiles."""
    shell: Shell
    reporter: Reporter
    cancels: Cancels
    queues: WorkQueues
    stop: asyncio.Event


async def on_lane_nonempty(message: LaneNonempty, ctx: Context, _delivery: Delivery) -> None:
    # A notice without a source is for the leader: a publisher waits for the queue's lock. The queue
    # may be in creation then, and RabbitMQ closes connections that poll such a queue.
    if not message.source:
        return
    queue = message.queue
    if queue.startswith(("lane.", "overflow.")):
        LaneKey.parse(queue)
    elif queue.startswith("resume.") and not queue.rpartition(".")[2].isdecimal():
        raise ContractError(f"not a resume queue's name: {queue!r}")
    ctx.shell.put(Noticed(queue=queue))


async def on_queues_retiring(message: QueuesRetiring, ctx: Context, _delivery: Delivery) -> None:
    """
    Release queues that the leader is about to delete, stop polling them, and report this to the
    leader.
    """
    ctx.queues.release(message.queues)
    ctx.shell.put(Retiring(queues=message.queues))
    await ctx.reporter.report()


async def on_queues_retired(message: QueuesRetired, ctx: Context, _delivery: Delivery) -> None:
    ctx.queues.forget(message.deleted + message.kept)
    ctx.shell.put(Retired(deleted=message.deleted, kept=message.kept))


async def on_plan(message: PlanPublished, ctx: Context, _delivery: Delivery) -> None:
    ctx.shell.look()
    ctx.shell.put(Planned(plan=message))


async def on_profile(message: Profile, ctx: Context, _delivery: Delivery) -> None:
    if (message.engine, message.device) == ctx.kind:
        ctx.shell.put(Profiled(profile=message))


async def on_run_stop(message: RunStop, ctx: Context, _delivery: Delivery) -> None:
    ctx.shell.put(RunStopped(request_id=message.request_id, run_id=message.run_id))


async def on_request_cancel(message: RequestCancel, ctx: Context, delivery: Delivery) -> None:
    ctx.shell.put(
        Cancelled(request_id=message.request_id, reply_to=message.reply_to, user=delivery.user_id)
    )


async def on_stored_cancel(message: StoredCancel, ctx: Context, delivery: Delivery) -> None:
    # Gateways have checked the tenant; producers may not publish with their key.
    if delivery.routing_key != topology.COMMAND_CANCEL:
        log.warning("cancel.not_of_a_gateway", request_id=message.request_id)
        return
    ctx.shell.put(Cancelled(request_id=message.request_id, stored_of=message.tenant))


async def on_cancels_marked(message: CancelsMarked, ctx: Context, _delivery: Delivery) -> None:
    ctx.cancels.on_mark(message.mark)


async def on_lso(message: LsoCommand, ctx: Context, _delivery: Delivery) -> None:
    ctx.shell.look()
    ctx.shell.put(Ordered(order=message))


async def on_drain(message: DrainInstance, ctx: Context, _delivery: Delivery) -> None:
    log.info("service.draining", instance_id=ctx.instance_id, exit=message.exit)
    if message.exit:
        ctx.stop.set()
    else:
        ctx.shell.put(Draining())


async def on_snapshot_requested(
    _message: SnapshotRequested, ctx: Context, _delivery: Delivery
) -> None:
    ctx.shell.look()
    await ctx.reporter.report()


HANDLERS: dict[type[Message], Handler[Context]] = {
    LaneNonempty: on_lane_nonempty,
    QueuesRetiring: on_queues_retiring,
    QueuesRetired: on_queues_retired,
    PlanPublished: on_plan,
    Profile: on_profile,
    RunStop: on_run_stop,
    RequestCancel: on_request_cancel,
    StoredCancel: on_stored_cancel,
    **dict.fromkeys(get_args(LsoCommand), on_lso),
    DrainInstance: on_drain,
    SnapshotRequested: on_snapshot_requested,
}
CANCEL_HANDLERS: dict[type[Message], Handler[Context]] = {
    RequestCancel: on_request_cancel,
    StoredCancel: on_stored_cancel,
    CancelsMarked: on_cancels_marked,
}
"""Handlers of the stream of cancellations; a kept message of another kind does nothing."""
