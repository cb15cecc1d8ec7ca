"""Planning as vehicle routing with OR-Tools, to compare its plans with those of the search."""

from collections.abc import Iterable, Sequence

import numpy as np
from ortools.constraint_solver import pywrapcp, routing_enums_pb2

from ops.baselines.planning.succession import setup_s
from solver.planning.orders.queues import order_of
from solver.planning.orders.rules import edf_batching
from solver.planning.problem.objective import plan_cost, servable
from solver.planning.problem.problem import Floats, PlanningProblem, QueueOrder

_TICKS_PER_S = 100
_NEVER = 10**12
"""Time that is never reached, in ticks of the solver."""
_COST_UNITS = 1e6
"""Number of integer cost units that represent the weight of the mean group."""
_SETUP_COST = 0.001
"""
Cost of a second of setup, in mean group weights; guided local search penalises arcs by their cost.
"""
_WIDENED_SD = 1.25
"""Number of standard deviations by which uncertainty extends the ramp of lateness at each end."""


def routed(
    problem: PlanningProblem, *, time_limit_s: float = 1.0, start: QueueOrder | None = None
) -> QueueOrder:
    """
    The better plan, by the true objective, of *start* and its improvement by guided local search.

    Instances are vehicles and groups are stops. A group's cost rises from 0 to its weight over
    the time in which its requests fall due. The search omits groups that would end later; they
    are inserted afterwards where the true objective is least.

    The search holds the interpreter's lock: run it in a separate process.

    Args:
        problem: At most about 50 groups on 4 instances.
        time_limit_s: Wall-clock limit of the search, so that equal problems may have unequal
            plans; building the model and inserting groups take additional time.
        start: Start of the search; by default EDF with model batching.

    Source: QLM §7, on expected times.
    Differs: a routing problem with soft time windows, solved by local search.
    """
    begin = edf_batching(problem) if start is None else start
    if len(begin.groups) == 0:
        return begin
    tours = _Tours(problem).improved(begin, time_limit_s)
    return best_of(problem, [begin, _completed(problem, tours)])


class _Tours:
    """
    Nodes and tours of the routing problem: group i is node i, instance g starts at node I + g, and
    all tours end at the last node.
    """

    def __init__(self, problem: PlanningProblem) -> None:
        self._problem = problem
        num_groups, self._num_tours = problem.num_groups, problem.num_instances
        self._end = num_groups + self._num_tours
        starts = list(range(num_groups, self._end))
        self._manager = pywrapcp.RoutingIndexManager(
            self._end + 1, self._num_tours, starts, [self._end] * self._num_tours
        )
        self._model = pywrapcp.RoutingModel(self._manager)
        self._first, self._last = _ramps(problem)
        self._after = [self._arcs(_spent_s(problem, g) * _TICKS_PER_S) for g in range(len(starts))]
        self._count_time()
        self._price_setups()
        for group, serves in enumerate(servable(problem)):
            self._stop(group, serves=bool(serves))

    def improved(self, start: QueueOrder, time_limit_s: float) -> list[list[int]]:
        """Tours that the search finds from *start*, without the groups that would be late."""
        parameters = pywrapcp.DefaultRoutingSearchParameters()
        metaheuristics = routing_enums_pb2.LocalSearchMetaheuristic
        parameters.local_search_metaheuristic = metaheuristics.GUIDED_LOCAL_SEARCH
        parameters.guided_local_search_lambda_coefficient = 1.0
        parameters.use_multi_armed_bandit_concatenate_operators = True
        parameters.time_limit.FromMilliseconds(max(1, round(1000 * time_limit_s)))
        self._model.CloseModelWithParameters(parameters)
        kept = [self._not_late(g, start.queue(g).tolist()) for g in range(self._num_tours)]
        routes = [[self._manager.NodeToIndex(group) for group in queue] for queue in kept]
        initial = self._model.ReadAssignmentFromRoutes(routes, True)
        if initial is None:
            raise RuntimeError("the routing library rejects the start plan")
        found = self._model.SolveFromAssignmentWithParameters(initial, parameters)
        return kept if found is None else [self._tour(found, g) for g in range(self._num_tours)]

    def _count_time(self) -> None:
        """Add the dimension of completion times along a tour to the routing problem."""
        transits = [self._model.RegisterTransitMatrix(after) for after in self._after]
        self._model.AddDimensionWithVehicleTransitAndCapacity(
            transits, 0, [_NEVER] * self._num_tours, True, "done"
        )

    def _price_setups(self) -> None:
        for g in range(self._num_tours):
            cost = self._arcs(setup_s(self._problem, g) * _SETUP_COST * _COST_UNITS)
            self._model.SetArcCostEvaluatorOfVehicle(self._model.RegisterTransitMatrix(cost), g)

    def _stop(self, group: int, *, serves: bool) -> None:
        """Restrict *group* to the instances that may serve it, and set the cost of its end."""
        groups, index = self._problem.groups, self._manager.NodeToIndex(group)
        price = max(1, round(_COST_UNITS * groups.weight[group] / max(1e-9, groups.weight.mean())))
        able = [g for g in range(self._num_tours) if self._problem.may_serve(g, group)]
        self._model.VehicleVar(index).SetValues([-1, *able])
        if not serves or self._last[group] < 0:
            self._model.AddDisjunction([index], 0)
        elif self._last[group] < _NEVER:
            done = self._model.GetDimensionOrDie("done")
            first, last = int(max(0, self._first[group])), int(self._last[group])
            done.SetCumulVarSoftUpperBound(index, first, max(1, round(price / (last - first + 1))))
            done.CumulVar(index).SetMax(last)
            self._model.AddDisjunction([index], price)

    def _arcs(self, values: Floats) -> list[list[int]]:
        """
        Matrix of values for all arcs, from *values* [I + 1, I]; 0 for arcs to the end node and for
        forbidden arcs.
        """
        num_groups = self._problem.num_groups
        rows = np.minimum(np.arange(self._end + 1), num_groups)
        arcs = np.zeros((self._end + 1, self._end + 1), dtype=np.int64)
        arcs[:, :num_groups] = np.where(np.isfinite(values), np.round(values), 0)[rows]
        return [[int(arc) for arc in row] for row in arcs]

    def _not_late(self, instance: int, queue: Sequence[int]) -> list[int]:
        """Groups of *queue*, in the same order, that end before their latest time."""
        after = self._after[instance]
        kept: list[int] = []
        node, done = self._problem.num_groups + instance, 0
        for group in queue:
            then = done + after[node][group]
            if then <= self._last[group]:
                kept.append(group)
                node, done = group, then
        return kept

    def _tour(self, found: pywrapcp.Assignment, instance: int) -> list[int]:
        tour: list[int] = []
        index = found.Value(self._model.NextVar(self._model.Start(instance)))
        while not self._model.IsEnd(index):
            tour.append(self._manager.IndexToNode(index))
            index = found.Value(self._model.NextVar(index))
        return tour


def _spent_s(problem: PlanningProblem, instance: int) -> Floats:
    """Times from the end of group i to the end of group j, [I + 1, I]; the last row starts now."""
    work_s = problem.groups.work_s[problem.instances.device[instance]]
    spent_s: Floats = setup_s(problem, instance) + work_s
    spent_s[-1] += problem.instances.available_s[instance]
    return spent_s


def _ramps(problem: PlanningProblem) -> tuple[Floats, Floats]:
    """
    Ends of each group at which its first and its last request become late, each [I], in ticks.
    """
    groups = problem.groups
    devices = np.unique(problem.instances.device)
    work_s, tail_s = groups.work_s[devices].mean(axis=0), groups.tail_s[devices].mean(axis=0)
    var = (groups.work_var + groups.tail_var)[devices].mean(axis=0)
    margin_s = _WIDENED_SD * np.sqrt(var)
    due_s = groups.deadline_s - tail_s
    first_s = due_s + np.minimum(work_s, groups.spread_s) - margin_s
    last_s = due_s + np.maximum(work_s, groups.spread_s) + margin_s
    first, last = np.clip(np.round(np.stack([first_s, last_s]) * _TICKS_PER_S), -_NEVER, _NEVER)
    return first, last


def _completed(problem: PlanningProblem, tours: list[list[int]]) -> QueueOrder:
    """
    Insert the omitted groups into *tours*, after groups of the same model or at the end of a queue.
    """
    queues = [list(tour) for tour in tours]
    served = {group for queue in queues for group in queue}
    out = [i for i in np.flatnonzero(servable(problem)).tolist() if i not in served]
    for group in out:
        able = [g for g in range(problem.num_instances) if problem.may_serve(g, group)]
        queues[able[0]].append(group)
    for group in sorted(out, key=lambda group: -problem.groups.weight[group]):
        rest = [[other for other in queue if other != group] for queue in queues]
        choices = [order_of(queues), *_inserted(problem, rest, group)]
        best = best_of(problem, choices)
        queues = [best.queue(g).tolist() for g in range(problem.num_instances)]
    return order_of(queues)


def _inserted(problem: PlanningProblem, queues: list[list[int]], group: int) -> list[QueueOrder]:
    """
    Yield plans in which *group* is inserted after groups of its model, or at the end of a queue.
    """
    model = problem.groups.model
    orders = []
    for g, queue in enumerate(queues):
        if not problem.may_serve(g, group):
            continue
        for at in range(len(queue) + 1):
            follows = at > 0 and model[queue[at - 1]] == model[group]
            continues = at < len(queue) and model[queue[at]] == model[group]
            if at == len(queue) or (follows and not continues):
                changed = [*queue[:at], group, *queue[at:]]
                orders.append(order_of([*queues[:g], changed, *queues[g + 1 :]]))
    return orders


def best_of(problem: PlanningProblem, orders: Iterable[QueueOrder]) -> QueueOrder:
    """
    The cheapest plan of *orders*, by `plan_cost`; the first of equally cheap plans.

    The optimum of a surrogate objective may cost more than the start plan, so plans of solvers are
    compared by `plan_cost`.

    Raises:
        ValueError: *orders* is empty, or contains an invalid plan for *problem*.
    """
    return min(orders, key=lambda order: plan_cost(problem, order).total)
