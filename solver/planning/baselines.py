"""Plan generators to measure against, and to fall back on."""

import math
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from shared.contracts.base import InstanceId, ModelName, Seconds, UnixTime
from shared.contracts.plans import LaneQuota, Segment, VirtualQueue
from solver.planning.snapshot import ClusterSnapshot, GroupView, InstanceView

PlanPolicy = Callable[[ClusterSnapshot], tuple[VirtualQueue, ...]]
"""One virtual queue per instance, in the snapshot's order. Total: overload still has a plan."""

BEST_EFFORT_SHARE = 0.25


def edf_with_batching(snapshot: ClusterSnapshot) -> tuple[VirtualQueue, ...]:
    """
    Earliest deadline first over models, all lanes of a model in one segment.

    A model's work goes where it would finish first, activation included, and is spread over a
    further instance only when that saves more time than activating the model there takes. So
    a swap happens when it pays for itself, and two instances do not both swap for one request.

    Source: QLM §8's EDF baseline, with model batching.
    """
    queues = [_Queue(instance=instance) for instance in snapshot.instances]
    resident = {instance.active for instance in snapshot.instances}
    for demand in sorted(
        _demands(snapshot.groups),
        # Of equal urgency, as all best effort is, what is active goes first: a swap would not pay.
        key=lambda demand: (demand.deadline_at, demand.model not in resident, demand.model),
    ):
        _place(demand, _without_leased(demand, queues, snapshot.express))
    return tuple(queue.as_virtual_queue() for queue in queues)


def fcfs(snapshot: ClusterSnapshot) -> tuple[VirtualQueue, ...]:
    """Every instance serves what it has active first, then all else in name order."""
    demands = sorted(_demands(snapshot.groups), key=lambda demand: demand.model)
    able = Counter(model for instance in snapshot.instances for model in instance.activate_s)
    queues = []
    for instance in snapshot.instances:
        queue = _Queue(instance=instance)
        for demand in sorted(demands, key=lambda demand: demand.model != instance.active):
            if demand.model in instance.activate_s:
                queue.add(demand, share=1 / able[demand.model])
        queues.append(queue)
    return tuple(queue.as_virtual_queue() for queue in queues)


PLAN_POLICIES: dict[str, PlanPolicy] = {"edf-batching": edf_with_batching, "fcfs": fcfs}


@dataclass(slots=True, kw_only=True)
class _Demand:
    """All waiting work for one model."""

    model: ModelName
    groups: list[GroupView]

    @property
    def tokens(self) -> float:
        return sum(group.waiting * group.tokens_per_request for group in self.groups)

    @property
    def num_requests(self) -> int:
        return sum(group.waiting for group in self.groups)

    @property
    def deadline_at(self) -> UnixTime:
        return min(group.deadline_at for group in self.groups)


@dataclass(slots=True, kw_only=True)
class _Queue:
    """A virtual queue in the making and when its instance will be free."""

    instance: InstanceView
    segments: list[Segment] = field(default_factory=list)
    load_s: Seconds = 0.0
    last_model: ModelName | None = None

    def __post_init__(self) -> None:
        self.load_s = self.instance.backlog_s
        self.last_model = self.instance.active

    def activate_s(self, model: ModelName) -> Seconds:
        if model == self.last_model:
            return 0.0
        return self.instance.activate_s.get(model, math.inf)

    def finish_s(self, demand: _Demand, share: float) -> Seconds:
        """When *share* of the demand would be done here."""
        work_s = share * demand.tokens / self.instance.rate(demand.model)
        return self.load_s + self.activate_s(demand.model) + work_s

    def add(self, demand: _Demand, *, share: float) -> None:
        self.load_s = self.finish_s(demand, share)
        self.last_model = demand.model
        urgent_first = sorted(demand.groups, key=lambda g: (g.deadline_at, g.key.queue_name))
        total = max(1.0, demand.tokens)
        self.segments.append(
            Segment(
                model=demand.model,
                lanes=tuple(
                    LaneQuota(
                        lane=group.key.queue_name,
                        quota=max(1, math.ceil(share * group.waiting)),
                        token_share=group.waiting * group.tokens_per_request / total,
                    )
                    for group in urgent_first
                ),
                best_effort_share=BEST_EFFORT_SHARE
                if any(group.best_effort for group in urgent_first)
                else 0.0,
            )
        )

    def as_virtual_queue(self) -> VirtualQueue:
        return VirtualQueue(
            instance_id=InstanceId(self.instance.instance_id), segments=tuple(self.segments)
        )


def _demands(groups: Iterable[GroupView]) -> list[_Demand]:
    by_model: dict[ModelName, list[GroupView]] = {}
    for group in groups:
        if group.waiting > 0:
            by_model.setdefault(group.key.model, []).append(group)
    return [_Demand(model=model, groups=members) for model, members in by_model.items()]


def _without_leased(
    demand: _Demand, queues: list[_Queue], express: frozenset[ModelName]
) -> list[_Queue]:
    """
    Instances that *demand* may have.

    Best effort does not take the last instance of a model with interactive arrivals: bringing
    that back would cost their first tokens more than the instance is worth.
    """
    if not math.isinf(demand.deadline_at):
        return queues
    # The first of each, so that one is left however many are asked for.
    leases = {queue.instance.active: queue.instance.instance_id for queue in reversed(queues)}
    leased = {leases[model] for model in express - {demand.model} if model in leases}
    return [queue for queue in queues if queue.instance.instance_id not in leased]


def _place(demand: _Demand, queues: list[_Queue]) -> None:
    """Give the demand to as many instances as pay for their activation in time saved."""
    able = sorted(
        (queue for queue in queues if demand.model in queue.instance.activate_s),
        key=lambda queue: (queue.finish_s(demand, 1.0), queue.instance.instance_id),
    )
    best: list[_Queue] = []
    best_cost_s = math.inf
    for count in range(1, min(len(able), demand.num_requests) + 1):
        chosen = able[:count]
        finish_s = max(queue.finish_s(demand, 1 / count) for queue in chosen)
        activations_s = sum(queue.activate_s(demand.model) for queue in chosen[1:])
        if finish_s + activations_s < best_cost_s:
            best, best_cost_s = chosen, finish_s + activations_s
    for queue in best:
        queue.add(demand, share=1 / len(best))
