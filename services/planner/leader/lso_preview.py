"""Predicted operations of instances that follow a plan, from their last statuses."""

from collections.abc import Iterator, Mapping
from itertools import takewhile

from services.planner.leader.policies import Planned
from shared.contracts.base import ModelName
from shared.contracts.estimates import Profile
from shared.contracts.plans import QueueHead, Segment, VirtualQueue
from shared.contracts.telemetry import InstanceStatus
from solver.planning.lso.facts import typical_situation
from solver.planning.lso.preview import preview_operations
from solver.planning.lso.situation import HeadChange
from solver.planning.problem.grouping import RequestGroup

Profiles = Mapping[tuple[str, str, str], Profile]
"""Profiles by model, engine and device."""


def heads_of(
    planned: Planned, instances: Mapping[str, InstanceStatus], profiles: Profiles
) -> tuple[QueueHead, ...]:
    """
    Return the head of each virtual queue, with the operations that activating it requires.

    Operations that an instance has already executed, according to its status, are left out.

    Args:
        planned: The plan in force.
        instances: Last statuses; instances without a status are left out.
        profiles: Profiles of the instances' active models.
    """
    return tuple(
        _head(queue, _head_groups(planned, index), status, profiles)
        for index, queue in enumerate(planned.queues)
        if (status := instances.get(queue.instance_id)) is not None
    )


def _head(
    queue: VirtualQueue,
    coming: tuple[RequestGroup, ...],
    status: InstanceStatus,
    profiles: Profiles,
) -> QueueHead:
    profile = profiles.get((status.model or "", status.engine, status.device))
    situation = typical_situation(
        status, latency=None if profile is None else profile.latency, coming=coming
    )
    segments = tuple(_followed(queue, status))
    # As in agents: an instance to which the plan assigns no segment keeps its active model.
    rest = () if status.model is None else (Segment(model=status.model),)
    change = HeadChange(old_head=None, queue=segments or rest)
    return QueueHead(
        instance_id=queue.instance_id,
        active=status.model,
        model=segments[0].model if segments else None,
        lsos=preview_operations(change, situation),
    )


def _followed(queue: VirtualQueue, status: InstanceStatus) -> Iterator[Segment]:
    """Segments of a virtual queue whose models the instance reports as servable."""
    servable = {ModelName(entry.model) for entry in status.models}
    return (segment for segment in queue.segments if segment.model in servable)


def _head_groups(planned: Planned, index: int) -> tuple[RequestGroup, ...]:
    """Request groups of the first segment of a virtual queue."""
    groups = [planned.snapshot.groups[number] for number in planned.order.queue(index)]
    return tuple(takewhile(lambda group: group.key.model == groups[0].key.model, groups))
