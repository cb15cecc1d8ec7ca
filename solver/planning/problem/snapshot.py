"""Conversion of request groups and instances to a planning problem, and of plans to queues."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby

import numpy as np

from shared.contracts.base import InstanceId, ModelName, Seconds, UnixTime
from shared.contracts.plans import LaneQuota, Segment, VirtualQueue
from solver.planning.problem.grouping import GroupId, RequestGroup, Spread
from solver.planning.problem.problem import (
    NONE,
    Floats,
    GroupArrays,
    InstanceArrays,
    Objective,
    PlanningProblem,
    QueueOrder,
    RunningPlan,
)

DEFAULT_RATE_ERROR = 0.1
"""Relative standard deviation of a throughput whose error was not measured."""
_DEFAULT = Objective()
_NOTHING = Spread(0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceRates:
    """Service rates of one model on one kind of device."""

    token_rate_per_s: float = 500.0
    """Throughput while the instance is busy, in prompt and output tokens (QLM's Theta)."""
    rate_error: float = DEFAULT_RATE_ERROR
    """Relative standard deviation of the throughput, which all work of the model has in common."""
    prefill_s: Spread = _NOTHING
    """Time of one request from the start of its service to its first token."""
    decode_s_per_token: Seconds = 0.0
    """Time per token within an average batch: QLM's d with its inefficiency factor."""
    is_measured: bool = False
    """True if the rates come from a profile of the device."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceView:
    """One instance: its active model, the models it can serve, its backlog."""

    instance_id: InstanceId
    device: str
    """Name of the kind of device; instances of one kind are equally fast."""
    active: ModelName | None
    """Active model; may be absent from `activate_s`, when the instance must not serve it."""
    activate_s: Mapping[ModelName, Seconds]
    """Time to activate each model that the instance can serve, while another model is active."""
    withheld: frozenset[ModelName] = frozenset()
    """Models of `activate_s` that the instance must not activate now."""
    backlog_s: Spread = _NOTHING
    """Time that the instance needs for the work that it has already pulled."""
    drain_s: Seconds = 0.0
    """Time until the running requests of the instance end if no request is added."""
    reserved_share: float = 0.0
    """Share of the throughput taken by requests with deadlines too short for planning; below 1."""
    express_per_s: Mapping[str, float] = field(default_factory=dict)
    """
    Importance -> arrivals per second of requests that would be late while the active model is away.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterSnapshot:
    """State of the cluster at the time *now*."""

    now: UnixTime
    groups: tuple[RequestGroup, ...]
    instances: tuple[InstanceView, ...]
    rates: Mapping[tuple[str, ModelName], ServiceRates] = field(default_factory=dict)
    """Service rates by device and model; a missing pair was never measured."""
    running: Mapping[GroupId, tuple[InstanceId, int]] = field(default_factory=dict)
    """
    Instance of each group in the plan in force, and position of the group in that instance's queue.
    """
    overflow: Mapping[str, int] = field(default_factory=dict)
    """
    Number of waiting requests per lane of tenants above their share; these requests are served
    last.
    """
    alarms_raised: int = 0
    """
    Number of alarms that the instance monitor raised since the last review of the plan in force.
    """


def planning_problem(
    snapshot: ClusterSnapshot,
    *,
    importance_weight: Mapping[str, float],
    objective: Objective = _DEFAULT,
) -> PlanningProblem:
    """
    *snapshot* as arrays.

    Args:
        snapshot: Has at least one instance.
        importance_weight: Cost of one late request, by importance.

    Source: QLM equations 1-5. Occupancy is tokens over throughput (equation 2). After its turn, an
    interactive request waits for its prefill; any other request also waits for its decoding
    (equations 1 and 4).
    Differs: throughput also counts prompt tokens, since prefills use the part of the token budget
    that decodes do not use.
    """
    models = sorted(
        {model for each in snapshot.instances for model in each.activate_s}
        | {group.key.model for group in snapshot.groups}
    )
    devices = sorted({(each.device, each.reserved_share) for each in snapshot.instances})
    number = {model: index for index, model in enumerate(models)}
    rates = [
        [snapshot.rates.get((device, model), ServiceRates()) for model in models]
        for device, _ in devices
    ]
    return PlanningProblem(
        groups=_group_arrays(snapshot, importance_weight, number, devices, rates),
        instances=_instance_arrays(snapshot.instances, importance_weight, number, devices, rates),
        running=_running_plan(snapshot),
        objective=objective,
    )


def virtual_queues(snapshot: ClusterSnapshot, order: QueueOrder) -> tuple[VirtualQueue, ...]:
    """
    Virtual queues of *order*, as published: consecutive groups of one model form one segment.

    All lanes of a segment are served together, so a segment lists each lane once.
    """
    queues = []
    for index, instance in enumerate(snapshot.instances):
        groups = [snapshot.groups[number] for number in order.queue(index)]
        segments = tuple(
            _segment(model, list(members))
            for model, members in groupby(groups, key=lambda group: group.key.model)
        )
        queues.append(VirtualQueue(instance_id=instance.instance_id, segments=segments))
    return tuple(queues)


def places(snapshot: ClusterSnapshot, order: QueueOrder) -> dict[GroupId, tuple[InstanceId, int]]:
    """Instance and position of each group in *order*; the field `running` of the next snapshot."""
    return {
        snapshot.groups[number].group_id: (instance.instance_id, position)
        for index, instance in enumerate(snapshot.instances)
        for position, number in enumerate(order.queue(index))
    }


def _group_arrays(
    snapshot: ClusterSnapshot,
    importance_weight: Mapping[str, float],
    number: Mapping[ModelName, int],
    devices: Sequence[tuple[str, float]],
    rates: Sequence[Sequence[ServiceRates]],
) -> GroupArrays:
    groups = snapshot.groups
    counts = _floats([group.num_requests for group in groups])
    oldest = _floats([group.oldest_deadline_at - snapshot.now for group in groups])
    prompt = _floats([group.prompt_tokens for group in groups]).reshape(-1, 2)
    output = _floats([group.output_tokens for group in groups]).reshape(-1, 2)
    interactive = np.array([group.interactive for group in groups], dtype=np.bool_)
    model = np.array([number[group.key.model] for group in groups], dtype=np.int32)
    shape = (len(devices), len(groups))
    work_s, work_var = np.zeros(shape), np.zeros(shape)
    tail_s, tail_var, drain_s = np.zeros(shape), np.zeros(shape), np.zeros(shape)
    for device, (_, reserved_share) in enumerate(devices):
        row = rates[device]
        free_rate = (1 - reserved_share) * _floats([rate.token_rate_per_s for rate in row])[model]
        prefill = _floats([rate.prefill_s for rate in row]).reshape(-1, 2)[model]
        decode = _floats([rate.decode_s_per_token for rate in row])[model]
        work_s[device] = counts * (prompt[:, 0] + output[:, 0]) / free_rate
        work_var[device] = counts * (prompt[:, 1] ** 2 + output[:, 1] ** 2) / free_rate**2
        decoded = np.where(interactive, 0.0, decode)
        tail_s[device] = prefill[:, 0] + decoded * output[:, 0]
        tail_var[device] = prefill[:, 1] ** 2 + (decoded * output[:, 1]) ** 2
        drain_s[device] = decode * (output[:, 0] + output[:, 1])
    return GroupArrays(
        model=model,
        num_requests=counts,
        weight=counts * _floats([importance_weight[group.key.importance] for group in groups]),
        deadline_s=oldest,
        spread_s=_spreads(groups),
        slo_s=_floats([max(1e-3, group.time_left_s) for group in groups]),
        relegated_share=_floats([group.relegated_share for group in groups]),
        work_s=work_s,
        work_var=work_var,
        tail_s=tail_s,
        tail_var=tail_var,
        drain_s=drain_s,
    )


def _instance_arrays(
    instances: Sequence[InstanceView],
    importance_weight: Mapping[str, float],
    number: Mapping[ModelName, int],
    devices: Sequence[tuple[str, float]],
    rates: Sequence[Sequence[ServiceRates]],
) -> InstanceArrays:
    activate_s = np.full((len(instances), len(number)), math.inf)
    withheld = np.zeros(activate_s.shape, dtype=np.bool_)
    for index, instance in enumerate(instances):
        for model in instance.activate_s.keys() - instance.withheld:
            activate_s[index, number[model]] = instance.activate_s[model]
        withheld[index, [number[model] for model in instance.withheld]] = True
    return InstanceArrays(
        device=np.array(
            [devices.index((each.device, each.reserved_share)) for each in instances],
            dtype=np.int32,
        ),
        active=np.array(
            [
                number[each.active] if each.active and each.active in each.activate_s else NONE
                for each in instances
            ],
            dtype=np.int32,
        ),
        activate_s=activate_s,
        withheld=withheld,
        available_s=_floats([each.backlog_s.mean for each in instances]),
        available_var=_floats([each.backlog_s.sd**2 for each in instances]),
        drain_s=_floats([each.drain_s for each in instances]),
        rate_error=_floats([[rate.rate_error for rate in row] for row in rates]),
        express_per_s=_floats(
            [
                sum(importance_weight[name] * rate for name, rate in each.express_per_s.items())
                for each in instances
            ]
        ),
    )


def _running_plan(snapshot: ClusterSnapshot) -> RunningPlan:
    known = {each.instance_id: index for index, each in enumerate(snapshot.instances)}
    found = [snapshot.running.get(group.group_id) for group in snapshot.groups]
    return RunningPlan(
        instance=np.array(
            [NONE if place is None else known.get(place[0], NONE) for place in found],
            dtype=np.int32,
        ),
        position=np.array([0 if place is None else place[1] for place in found], dtype=np.int32),
    )


def _segment(model: ModelName, groups: Sequence[RequestGroup]) -> Segment:
    quotas: dict[str, int] = {}
    for group in groups:
        lane = group.group_id.lane
        quotas[lane] = quotas.get(lane, 0) + group.num_requests
    lanes = tuple(LaneQuota(lane=lane, quota=quota) for lane, quota in quotas.items())
    return Segment(model=model, lanes=lanes)


def _spreads(groups: Sequence[RequestGroup]) -> Floats:
    return _floats(
        [
            group.youngest_deadline_at - group.oldest_deadline_at
            if math.isfinite(group.oldest_deadline_at)
            else 0.0
            for group in groups
        ]
    )


def _floats(values: Sequence[object]) -> Floats:
    return np.array(values, dtype=np.float64)
