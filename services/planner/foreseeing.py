"""What instances will do to follow a plan, by what the leader knows of them."""

from collections.abc import Iterator, Mapping
from itertools import takewhile

from services.planner.policies import Planned
from shared.contracts.base import ModelName
from shared.contracts.estimates import Profile
from shared.contracts.plans import QueueHead, Segment, VirtualQueue
from shared.contracts.telemetry import InstanceStatus
from solver.planning.foreseeing import foresee
from solver.planning.grouping import RequestGroup
from solver.planning.lso_facts import typical_situation
from solver.planning.lso_situation import HeadChange

Profiles = Mapping[tuple[str, str, str], Profile]
"""By model, engine and device."""


def heads_of(
    planned: Planned, instances: Mapping[str, InstanceStatus], profiles: Profiles
) -> tuple[QueueHead, ...]:
    """
    The head of each virtual queue, with the operations that it asks for.

    Args:
        planned: The plan in force.
        instances: Last statuses; who is not among them is left out.
        profiles: Of what the instances have active.

    What an instance has done already is not told again: its status has it.
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
    # As agents do: without a plan for it, an instance goes on with what it has.
    rest = () if status.model is None else (Segment(model=status.model),)
    change = HeadChange(old_head=None, queue=segments or rest)
    return QueueHead(
        instance_id=queue.instance_id,
        active=status.model,
        model=segments[0].model if segments else None,
        lsos=foresee(change, situation),
    )


def _followed(queue: VirtualQueue, status: InstanceStatus) -> Iterator[Segment]:
    """Segments of models that the instance says it can serve."""
    servable = {ModelName(entry.model) for entry in status.models}
    return (segment for segment in queue.segments if segment.model in servable)


def _head_groups(planned: Planned, index: int) -> tuple[RequestGroup, ...]:
    """Groups of the first segment of a queue."""
    groups = [planned.snapshot.groups[number] for number in planned.order.queue(index)]
    return tuple(takewhile(lambda group: group.key.model == groups[0].key.model, groups))
