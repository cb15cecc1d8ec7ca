"""Optimal plan of a small cluster with deterministic mean times: a constraint program (CP-SAT)."""

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from ortools.sat.python import cp_model

from ops.baselines.planning.succession import setup_s, swap_costs_of
from solver.planning.orders.queues import order_of
from solver.planning.orders.rules import edf_batching
from solver.planning.problem.objective import homes, prices_of, scales_of, servable
from solver.planning.problem.problem import NONE, Floats, PlanningProblem, QueueOrder

_TICKS_PER_S = 1000
_COST_UNITS = 1e10
"""
Integer units for a plan cost of 1; one time tick of one group's tardiness costs some hundreds of
units.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExactPlan:
    """Result of the constraint program: a plan and its proof."""

    order: QueueOrder
    proved: bool
    """True if `order` is proved optimal for `certain(problem)`, with times in milliseconds."""


def exact(
    problem: PlanningProblem,
    *,
    work_limit: float = 1.0,
    time_limit_s: float = 60.0,
    start: QueueOrder | None = None,
) -> ExactPlan:
    """
    The plan of least cost for `certain(problem)`.

    The plan's true cost may exceed the cost of *start*: choose the cheaper plan with `best_of`.

    Args:
        problem: At most about 12 groups; with more groups, the search rarely improves on *start*.
        work_limit: Limit of the search in the solver's deterministic seconds; each takes 1 to
            about 10 s. If this limit ends the search, equal problems get equal plans.
        time_limit_s: Wall-clock limit of the search.
        start: Start of the search, returned when it finds nothing; by default EDF with model
            batching.

    Source: QLM §7, equations 6-13, on expected times.
    Differs: a circuit of groups for each instance instead of positions, and the cost is that of
        `solver.planning.problem.objective` without chance.
    """
    begin = edf_batching(problem) if start is None else start
    program = _Program(problem)
    program.hint(begin)
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    # Several interleaved strategies: a single search strategy gets stuck in local optima.
    solver.parameters.interleave_search = True
    solver.parameters.random_seed = 0
    solver.parameters.max_deterministic_time = work_limit
    solver.parameters.max_time_in_seconds = time_limit_s
    status = solver.solve(program.model)
    if status not in {cp_model.OPTIMAL, cp_model.FEASIBLE}:
        return ExactPlan(order=begin, proved=False)
    return ExactPlan(order=program.order(solver), proved=status == cp_model.OPTIMAL)


class _Program:
    """Group i is node i + 1 of one instance's circuit, which begins and ends at node 0."""

    def __init__(self, problem: PlanningProblem) -> None:
        self.model = cp_model.CpModel()
        self._problem = problem
        self._share = problem.groups.weight / scales_of(problem).weight
        self._setup_s = [setup_s(problem, g) for g in range(problem.num_instances)]
        self._swap_costs = swap_costs_of(problem)
        self._end = _ticks(_longest_s(problem, self._setup_s)) + 2 * problem.num_groups
        self._costs: list[tuple[cp_model.LinearExprT, float]] = []
        self._starts = {
            i: self.model.new_int_var(0, self._end, "")
            for i in np.flatnonzero(servable(problem)).tolist()
        }
        self._follows: dict[tuple[int, int, int], cp_model.IntVar] = {}
        """Arcs of the groups' circuits, by (instance, preceding node, node)."""
        self._serves: dict[tuple[int, int], cp_model.IntVar] = {}
        """By (instance, group): true if the instance serves the group."""
        for instance in range(problem.num_instances):
            self._queue(instance)
        self._places()
        for group in self._starts:
            self._late(group)
            self._tardy(group)
        self._waiting()
        self.model.minimize(
            cp_model.LinearExpr.weighted_sum(
                [term for term, _ in self._costs],
                [round(_COST_UNITS * cost) for _, cost in self._costs],
            )
        )

    def hint(self, order: QueueOrder) -> None:
        """Start the search of the constraint program at *order*."""
        arcs = set()
        for instance in range(self._problem.num_instances):
            nodes = [0, *(order.queue(instance) + 1).tolist(), 0]
            arcs |= {(instance, *arc) for arc in pairwise(nodes)}
        for key, follows in self._follows.items():
            self.model.add_hint(follows, key in arcs)

    def order(self, solver: cp_model.CpSolver) -> QueueOrder:
        """The plan that *solver* found."""
        chosen = {(g, a): b for (g, a, b), arc in self._follows.items() if solver.value(arc)}
        queues: list[list[int]] = [[] for _ in range(self._problem.num_instances)]
        for instance, queue in enumerate(queues):
            node = chosen[instance, 0]
            while node != 0:
                queue.append(node - 1)
                node = chosen[instance, node]
        return order_of(queues)

    def _queue(self, instance: int) -> None:
        """Add the constraints of a sequence of groups on *instance* (equations 6, 9 and 10)."""
        problem, model = self._problem, self.model
        available_s = problem.instances.available_s[instance]
        work_s = problem.groups.work_s[problem.instances.device[instance]]
        before_s = self._setup_s[instance]
        swap_cost = self._swap_costs[instance]
        able = [i for i in self._starts if problem.may_serve(instance, i)]
        self._follows[instance, 0, 0] = model.new_bool_var("")
        loops, intervals = [], []
        for i in able:
            serves = self._serves[instance, i] = model.new_bool_var("")
            loops.append((i + 1, i + 1, ~serves))
            size = _ticks(work_s[i])
            intervals.append(
                model.new_optional_fixed_size_interval_var(self._starts[i], size, serves, "")
            )
            first = self._follows[instance, 0, i + 1] = model.new_bool_var("")
            self._follows[instance, i + 1, 0] = model.new_bool_var("")
            head_s = before_s[problem.num_groups, i]
            at = _ticks(available_s + head_s)
            model.add(self._starts[i] == at).only_enforce_if(first)
            self._costs.append((first, swap_cost[problem.num_groups, i]))
            for j in able:
                if j == i:
                    continue
                follows = self._follows[instance, j + 1, i + 1] = model.new_bool_var("")
                later = _ticks(work_s[j] + before_s[j, i])
                model.add(self._starts[i] == self._starts[j] + later).only_enforce_if(follows)
                self._costs.append((follows, swap_cost[j, i]))
        mine = [(a, b, arc) for (g, a, b), arc in self._follows.items() if g == instance]
        model.add_circuit([*loops, *mine])
        model.add_no_overlap(intervals)  # implied by the circuit, but shortens proofs of optimality

    def _places(self) -> None:
        """Add the constraint that each group is on one instance, and the cost of moving a group."""
        problem = self._problem
        home = homes(problem)
        price = prices_of(problem).move
        for i in self._starts:
            self.model.add_exactly_one(self._serves[g, i] for g in self._able(i))
            if home[i] != NONE:
                self._costs.append((~self._serves[int(home[i]), i], price[i]))

    def _late(self, group: int) -> None:
        """
        Add a cost for each milestone of *group* that is reached too late (equations 11 and 12,
        soft).
        """
        groups, milestones = self._problem.groups, self._problem.objective.milestones
        if np.isinf(groups.deadline_s[group]):
            return
        for done in milestones:
            late = self.model.new_bool_var("")
            self._costs.append((late, self._share[group] / len(milestones)))
            due_s = groups.deadline_s[group] + done * groups.spread_s[group]
            for g in self._able(group):
                device = self._problem.instances.device[g]
                ahead_s = done * groups.work_s[device, group] + groups.tail_s[device, group]
                self.model.add(self._starts[group] <= _ticks(due_s - ahead_s)).only_enforce_if(
                    self._serves[g, group], ~late
                )

    def _tardy(self, group: int) -> None:
        """Add the cost of the tardiness of the group's last request, capped at `max_tardiness`."""
        groups, objective = self._problem.groups, self._problem.objective
        if np.isinf(groups.deadline_s[group] + groups.slo_s[group]):
            return
        most = _ticks(objective.max_tardiness * groups.slo_s[group])
        tardy = self.model.new_int_var(0, most, "")
        lost = self.model.new_bool_var("")
        self.model.add(tardy == most).only_enforce_if(lost)
        rate = objective.tardiness / (groups.slo_s[group] * _TICKS_PER_S)
        self._costs.append((tardy, self._share[group] * rate))
        due_s = groups.deadline_s[group] + groups.spread_s[group]
        for g in self._able(group):
            device = self._problem.instances.device[g]
            ahead_s = groups.work_s[device, group] + groups.tail_s[device, group]
            over = self._starts[group] + _ticks(ahead_s - due_s)
            self.model.add(tardy >= over).only_enforce_if(self._serves[g, group], ~lost)

    def _waiting(self) -> None:
        """
        Add the cost of the waiting time of all groups, each until its last request ends.
        """
        problem = self._problem
        rate = problem.objective.waiting / scales_of(problem).queue_s
        for i in self._starts:
            self._costs.append((self._starts[i], self._share[i] * rate / _TICKS_PER_S))
            for g in self._able(i):
                work_s = problem.groups.work_s[problem.instances.device[g], i]
                self._costs.append((self._serves[g, i], self._share[i] * rate * work_s))

    def _able(self, group: int) -> list[int]:
        """Instances that may serve *group*."""
        return [g for g in range(self._problem.num_instances) if (g, group) in self._serves]


def _ticks(seconds: float) -> int:
    return round(seconds * _TICKS_PER_S)


def _longest_s(problem: PlanningProblem, setups_s: list[Floats]) -> float:
    """Upper bound of the end of every plan in which no instance is idle."""
    devices = problem.instances.device
    most_s = np.zeros(problem.num_groups)
    for device, before_s in zip(devices, setups_s, strict=True):
        each_s = problem.groups.work_s[device] + before_s.max(axis=0, initial=0.0)
        most_s = np.maximum(most_s, np.where(np.isfinite(each_s), each_s, 0.0))
    return float(problem.instances.available_s.max(initial=0.0) + most_s.sum())
