"""Depths of the queues in which requests wait: fixed queues, lanes, companions, inboxes."""

import asyncio

import msgspec

from shared.broker import topology
from shared.broker.protocol import Broker
from shared.broker.rpc import ask
from shared.contracts.base import Decoder, ModelName
from shared.contracts.lanes import LaneLayout, inbox_name, relegated_name
from shared.contracts.plans import PlanExplained, PlanRequested
from solver.planning.lanes import all_lanes, earlier_lanes

COUNTS_AT_ONCE = 8
LEADER_TIMEOUT_S = 3.0
_decode_plan: Decoder[PlanExplained] = Decoder(PlanExplained)


class QueueCount(msgspec.Struct, frozen=True, kw_only=True):
    """Depth of one queue."""

    queue: str
    ready: int
    consumers: int


async def ask_leader(broker: Broker) -> PlanExplained | None:
    """The leader's answer with lanes and instances; None if no leader answers."""
    plan = await ask(
        broker,
        topology.CONTROL_PLAN,
        lambda reply_to: PlanRequested(reply_to=reply_to),
        _decode_plan,
        timeout_s=LEADER_TIMEOUT_S,
    )
    return plan if isinstance(plan, PlanExplained) else None


async def count_queues(
    broker: Broker,
    models: tuple[ModelName, ...],
    layout: LaneLayout,
    plan: PlanExplained | None = None,
) -> list[QueueCount]:
    """
    Depths of all fixed queues, and of all existing lanes, companions and inboxes.

    Args:
        broker: Broker with the queues.
        models: Models whose lanes are counted.
        layout: Lane layout that the operator configured.
        plan: The leader's answer; None: inboxes are left out.
    """
    names = {spec.name for spec in topology.QUEUES}
    names.update(relegated_name(model) for model in models)
    if plan is not None:
        names.update(inbox_name(instance_id) for instance_id in plan.instances)
    for key in all_lanes(models, layout) + earlier_lanes(models, layout):
        names.update((key.queue_name, key.overflow_name, key.resume_name))
    limit = asyncio.Semaphore(COUNTS_AT_ONCE)

    async def count(name: str) -> QueueCount | None:
        async with limit:
            depth = await broker.depth(name)
        if depth is None:
            return None
        return QueueCount(queue=name, ready=depth.ready, consumers=depth.consumers)

    counted = await asyncio.gather(*(count(name) for name in sorted(names)))
    return [entry for entry in counted if entry is not None]
