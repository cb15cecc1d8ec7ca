"""Forecasts of the wait of a lane's next request, when the plan is made and until the next plan."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import msgspec
import numpy as np

from shared.contracts.base import Seconds
from shared.contracts.plans import LaneForecast
from solver.planning.problem.grouping import RequestGroup
from solver.planning.problem.objective import instance_of, late_probability, turns_s, turns_var
from solver.planning.problem.problem import NONE, PlanningProblem, QueueOrder
from solver.planning.problem.snapshot import DEFAULT_RATE_ERROR, ClusterSnapshot, planning_problem

_LEAST_RETRY_S = 1.0
_MOST_RETRY_S = 3600.0


def lane_forecasts(
    snapshot: ClusterSnapshot, problem: PlanningProblem, order: QueueOrder
) -> tuple[LaneForecast, ...]:
    """
    Forecasts of all lanes with waiting requests: a new request comes after all of its lane.

    Its turn comes when the last of the lane's groups in the plan is done, whichever that is: a
    lane is first in, first out, and a plan may hold its groups in any order where that makes no
    difference. The last group may consist of overflow, which a new request passes. Lanes that no
    instance serves have an infinite wait, published as none. Further requests are served by all
    instances that have some of the lane in the plan or have its model active. The wait's spread
    comes from the work before it and from the throughput (`solver.prediction.completion`).
    """
    late, turns_var_s2 = late_probability(problem, order), turns_var(problem, order, done=1.0)
    groups, device = problem.groups, problem.instances.device
    holder = instance_of(problem, order)
    served = holder != NONE
    work_s = np.where(served, groups.work_s[device[holder], np.arange(len(holder))], 0.0)
    done_s = turns_s(problem, order) + work_s
    members: dict[str, list[int]] = {}
    for number, group in enumerate(snapshot.groups):
        members.setdefault(group.key.queue_name, []).append(number)

    def passing(lane: str, numbers: list[int]) -> tuple[int, float]:
        """Group that a new request is in or behind, and the share of that group it passes."""
        in_turn = sorted(numbers, key=lambda number: done_s[number])
        waiting = np.cumsum(groups.num_requests[in_turn])
        before = max(0.0, waiting[-1] - snapshot.overflow.get(lane, 0))
        place = int(np.searchsorted(waiting, before))
        last = in_turn[place]
        return last, float((waiting[place] - before) / groups.num_requests[last])

    def forecast(lane: str, numbers: list[int]) -> LaneForecast:
        newest, (last, passed) = numbers[-1], passing(lane, numbers)
        if not served[last]:
            return LaneForecast(lane=lane, late_probability=float(late[newest]))
        kind = device[holder[last]]
        (active,) = np.nonzero(problem.instances.active == groups.model[last])
        serving = {*active.tolist(), *holder[numbers].tolist()} - {NONE}
        return LaneForecast(
            lane=lane,
            wait_s=float(done_s[last] - passed * work_s[last]),
            wait_sd_s=math.sqrt(turns_var_s2[last]),
            late_probability=float(late[newest]),
            request_s=float(work_s[last] / groups.num_requests[last]) / len(serving),
            tail_s=float(groups.tail_s[kind, last]),
            tail_sd_s=math.sqrt(groups.tail_var[kind, last]),
        )

    return tuple(forecast(lane, numbers) for lane, numbers in members.items())


def empty_lane_forecasts(
    snapshot: ClusterSnapshot,
    order: QueueOrder,
    typical: Sequence[RequestGroup],
    *,
    importance_weight: Mapping[str, float],
) -> tuple[LaneForecast, ...]:
    """
    Forecasts of lanes in which nothing waits, so that a burst into one of them is predicted.

    A lane's next request begins when an instance with the lane's model active has begun the work
    that this instance has pulled and the work of other lanes with deadlines no later. Lanes of
    models that no instance has active are left out: a plan has to load these models.

    Args:
        typical: One typical request of each such lane, as a group.
        importance_weight: Cost of one late request, by importance.
    """
    asked = replace(snapshot, groups=(*snapshot.groups, *typical), running={})
    problem = planning_problem(asked, importance_weight=importance_weight)
    groups, instances = problem.groups, problem.instances
    found = []
    for number, group in enumerate(typical, start=len(snapshot.groups)):
        (serving,) = np.nonzero(instances.active == groups.model[number])
        if len(serving) == 0:
            continue
        waits_s = [_wait_s(problem, order, index, groups.deadline_s[number]) for index in serving]
        first, wait_s = serving[np.argmin(waits_s)], min(waits_s)
        kind = instances.device[first]
        found.append(
            LaneForecast(
                lane=group.key.queue_name,
                wait_s=wait_s,
                wait_sd_s=wait_s * float(instances.rate_error[kind, groups.model[number]]),
                request_s=float(groups.work_s[kind, number]) / len(serving),
                tail_s=float(groups.tail_s[kind, number]),
                tail_sd_s=math.sqrt(groups.tail_var[kind, number]),
            )
        )
    return tuple(found)


def _wait_s(
    problem: PlanningProblem, order: QueueOrder, instance: int, deadline_s: float
) -> Seconds:
    """Time for the work of *instance* that is served before a request with that deadline."""
    queue = order.queue(instance)
    before = queue[problem.groups.deadline_s[queue] <= deadline_s]
    work_s = problem.groups.work_s[problem.instances.device[instance], before]
    return float(problem.instances.available_s[instance] + work_s.sum())


def forecast_now(
    forecast: LaneForecast, *, age_s: Seconds, came: Sequence[tuple[Seconds, float]]
) -> LaneForecast:
    """
    *forecast* updated to the current time, without a new plan.

    Lindley's recursion: a request that came at some time waits for what came since and is not yet
    served.

    Args:
        forecast: As of the time when lanes were counted.
        age_s: Time since then, during which instances kept serving.
        came: (seconds ago, requests that have come to the lane since), the earliest first.

    Decided: not in QLM, which runs its estimator for each request. Planning takes as long as a
    burst does, and the requests of a burst would be admitted by a forecast made before the burst.
    """
    if forecast.wait_s is None:
        return forecast
    more_s = came[0][1] * forecast.request_s if came else 0.0
    since_s = (requests * forecast.request_s - ago_s for ago_s, requests in came)
    sd_s = forecast.wait_sd_s
    return msgspec.structs.replace(
        forecast,
        wait_s=max(0.0, forecast.wait_s - age_s + more_s, *since_s),
        wait_sd_s=None if sd_s is None else sd_s + DEFAULT_RATE_ERROR * more_s,
    )


def late_with(forecast: LaneForecast, time_left_s: Seconds) -> float:
    """
    Probability that a request with *time_left_s* to its target is late if it comes now.

    Without a published wait or spread, it is the probability of the lane's last group.
    """
    if forecast.wait_s is None or forecast.wait_sd_s is None:
        return forecast.late_probability
    sd_s = math.hypot(forecast.wait_sd_s, forecast.tail_sd_s)
    over_s = forecast.wait_s + forecast.tail_s - time_left_s
    if sd_s == 0:
        return float(over_s > 0)
    return 0.5 * math.erfc(-over_s / (sd_s * math.sqrt(2)))


def retry_after_s(forecast: LaneForecast, time_left_s: Seconds) -> Seconds:
    """
    Time after which a request with *time_left_s* to its deadline would be in time in this lane.

    This is the work of the lane that must be done first while nothing is added; all of it if the
    request is late for another reason than the lane's wait.
    """
    if forecast.wait_s is None:
        return _MOST_RETRY_S
    over_s = forecast.wait_s + min(0.0, forecast.tail_s - time_left_s)
    return min(_MOST_RETRY_S, max(_LEAST_RETRY_S, over_s))
