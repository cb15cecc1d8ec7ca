"""Forecasts of the wait of a lane's next request: made with a plan, updated until the next plan."""

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

LATE_PROBABILITY = 0.5
"""Probability of being late from which a request goes to the fallback of its split."""
_LEAST_RETRY_S = 1.0
_MOST_RETRY_S = 3600.0
"""Bounds of the delay after which a refused request may be sent again."""


def lane_forecasts(
    snapshot: ClusterSnapshot, problem: PlanningProblem, order: QueueOrder
) -> tuple[LaneForecast, ...]:
    """
    Forecasts of all lanes with waiting requests; a new request is behind all requests of its lane.

    The turn of a new request comes when all of the lane's groups in the plan are done. A lane is
    first in, first out, regardless of the order of its groups in the plan. A new request overtakes
    the groups that consist of overflow. A lane that no instance serves has an infinite wait,
    published as none. All instances that have a group of the lane in the plan, or have its model
    active, serve further requests. The spread of the wait comes from the work before the request
    and from the throughput (`solver.prediction.completion`).
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
        """
        Last group of the lane before a new request, and the share of this group that the request
        overtakes.
        """
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
    Forecasts of empty lanes, so that the waits in a burst into one of them are predicted.

    The next request of a lane waits for an instance that has the lane's model active. The instance
    first begins the work that it has pulled and the work of other lanes with deadlines no later
    than that of the request. Lanes of models that are active on no instance are left out: a plan
    has to load these models.

    Args:
        typical: One typical request of each empty lane, as a group.
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
    """
    Time that *instance* needs for the work that it serves before a new request with *deadline_s*.
    """
    queue = order.queue(instance)
    before = queue[problem.groups.deadline_s[queue] <= deadline_s]
    work_s = problem.groups.work_s[problem.instances.device[instance], before]
    return float(problem.instances.available_s[instance] + work_s.sum())


def forecast_now(
    forecast: LaneForecast, *, age_s: Seconds, came: Sequence[tuple[Seconds, float]]
) -> LaneForecast:
    """
    *forecast* updated to the current time, without a new plan.

    Source: Lindley's recursion. The wait is the time for the work that arrived and is not served
    yet.

    Args:
        forecast: Forecast at the time when the requests of lanes were counted.
        age_s: Time since the count, during which instances continued to serve.
        came: (seconds ago, requests that have come to the lane from that time on), the earliest
            first.

    Decided: QLM runs its estimator for each request and needs no update. Here planning takes as
    long as a burst, so a whole burst would be admitted by a forecast from before the burst.
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
    Probability that a request with *time_left_s* to its target is late if it enters the lane now.

    Without a published wait or spread, return the late probability of the lane's last group.
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

    The result is the time until the lane's wait has become short enough, if no request is added. If
    the request would be late even without a wait, the result is the time for all of the lane's
    work.
    """
    if forecast.wait_s is None:
        return _MOST_RETRY_S
    over_s = forecast.wait_s + min(0.0, forecast.tail_s - time_left_s)
    return min(_MOST_RETRY_S, max(_LEAST_RETRY_S, over_s))
