"""What a plan promises to whoever comes to a lane next."""

import math

from shared.contracts.base import Seconds
from shared.contracts.plans import LaneForecast
from solver.planning.building import ClusterSnapshot
from solver.planning.objective import late_probability, turns_s, turns_var
from solver.planning.problem import PlanningProblem, QueueOrder

_LEAST_RETRY_S = 1.0
_MOST_RETRY_S = 3600.0


def lane_forecasts(
    snapshot: ClusterSnapshot, problem: PlanningProblem, order: QueueOrder
) -> tuple[LaneForecast, ...]:
    """
    Forecasts of all lanes with waiting requests: a new one comes last in its lane's last group.

    Lanes that nobody serves have an infinite wait, told as none. The wait's spread is that of the
    work before it and of the throughput (`solver.prediction.completion`).
    """
    late, turns = late_probability(problem, order), turns_s(problem, order)
    variances = turns_var(problem, order, done=1.0)
    device = problem.instances.device
    holders = {
        int(group): int(device[index])
        for index in range(problem.num_instances)
        for group in order.queue(index)
    }
    newest = {group.key.queue_name: number for number, group in enumerate(snapshot.groups)}
    return tuple(
        LaneForecast(
            lane=lane,
            wait_s=float(turns[number] + problem.groups.work_s[holders[number], number])
            if number in holders
            else None,
            wait_sd_s=math.sqrt(variances[number]) if number in holders else None,
            late_probability=float(late[number]),
        )
        for lane, number in newest.items()
    )


def retry_after_s(forecast: LaneForecast, time_left_s: Seconds) -> Seconds:
    """
    When a request with *time_left_s* to its deadline would be in time again in this lane.

    So much of the lane's work must be done first, while nothing is added.
    """
    if forecast.wait_s is None:
        return _MOST_RETRY_S
    return min(_MOST_RETRY_S, max(_LEAST_RETRY_S, forecast.wait_s - time_left_s))
