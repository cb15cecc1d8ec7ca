"""QLM's own program (§7, equations 6-13), for reference: which group is at which position."""

from dataclasses import dataclass
from itertools import product
from statistics import NormalDist

import numpy as np
from ortools.sat.python import cp_model

from solver.planning.objective import servable
from solver.planning.order_baselines.queues import order_of
from solver.planning.problem import PlanningProblem, QueueOrder
from solver.planning.programs.succession import setup_s

_TICKS_PER_S = 1000
_FAR = 10**12
"""Ticks; no penalty is beyond."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """What of the printed equations holds."""

    own_swap: bool
    """
    Of equation 10, whether a group's own swap delays it; printed, the sum of swaps ends at j - 1.
    """
    earliness_pays: bool
    """
    Of equation 13, whether negative penalties count; printed, they do, so that the sum is that of
    all completion times and SLOs drop out of it.
    """
    confidence: float | None
    """
    Of equation 12, the least probability with which each group meets its SLO (Delta), 0.5 to 1;
    `None` where it is no constraint.
    """


PRINTED = Reading(own_swap=False, earliness_pays=True, confidence=0.95)
REPAIRED = Reading(own_swap=True, earliness_pays=False, confidence=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class PositionPlan:
    """A plan that the program found."""

    order: QueueOrder
    penalty_s: float
    """Equation 13, as the reading has it."""
    proved: bool
    """Whether no plan has less."""


def position_indexed(
    problem: PlanningProblem, reading: Reading, *, work_limit: float = 10.0
) -> PositionPlan | None:
    """
    The plan of least penalty, as *reading* has it; for some 4 groups on 2 instances.

    Args:
        problem: What groups and instances are; weights and spreads do not count.
        reading: `PRINTED`, or `REPAIRED`, or anything between them.
        work_limit: Of the search, in the solver's own seconds.

    Returns:
        `None` when no plan meets equation 12, or none was found in the limit.

    Source: QLM §7, equations 6-13.
    Differs: positions are filled from the head of each queue, and what is behind stays empty,
        instead of "empty" groups of some model; the first position is compared with the active
        model. Equation 9 has one inequality for each model, since model numbers have no
        distance. The swap estimate S is the instance's longest, drain included. Equation 10
        counts what was pulled before. A group without a deadline has no penalty.
    """
    program = _Program(problem, reading)
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.random_seed = 0
    solver.parameters.max_deterministic_time = work_limit
    status = solver.solve(program.model)
    if status not in {cp_model.OPTIMAL, cp_model.FEASIBLE}:
        return None
    return PositionPlan(
        order=program.order(solver),
        penalty_s=solver.objective_value / _TICKS_PER_S,
        proved=status == cp_model.OPTIMAL,
    )


class _Program:
    """Names are those of QLM's table 2."""

    def __init__(self, problem: PlanningProblem, reading: Reading) -> None:
        self.model = cp_model.CpModel()
        self._problem = problem
        self._reading = reading
        self._served = np.flatnonzero(servable(problem)).tolist()
        self._positions = range(len(self._served))
        self._instances = range(problem.num_instances)
        self._x = {
            (g, i, j): self.model.new_bool_var("")
            for g, i, j in product(self._instances, self._served, self._positions)
            if problem.may_serve(g, i)
        }
        """By virtual queue, group and position."""
        self._fill()
        swaps = {g: self._swaps(g) for g in self._instances}
        self._penalty = self._penalties()
        for g, j in product(self._instances, self._positions):
            self._complete(g, j, swaps[g][: j + 1 if reading.own_swap else j])
        self.model.minimize(sum(self._penalty.values()))

    def order(self, solver: cp_model.CpSolver) -> QueueOrder:
        """What *solver* found."""
        return order_of(
            [
                [
                    i
                    for j in self._positions
                    for i in self._at(g, j)
                    if solver.value(self._x[g, i, j])
                ]
                for g in self._instances
            ]
        )

    def _fill(self) -> None:
        """Equation 6."""
        for i in self._served:
            self.model.add_exactly_one(x for (_, group, _), x in self._x.items() if group == i)
        for g in self._instances:
            taken = [sum(self._x[g, i, j] for i in self._at(g, j)) for j in self._positions]
            for j in self._positions:
                self.model.add(taken[j] <= (taken[j - 1] if j else 1))

    def _swaps(self, instance: int) -> list[cp_model.LinearExprT]:
        """Ticks that each position's swap takes: S t, equations 7 and 9."""
        finite_s = setup_s(self._problem, instance)
        longest = _ticks(finite_s[np.isfinite(finite_s)].max(initial=0.0))
        active = int(self._problem.instances.active[instance])
        had = {m: int(m == active) for m in range(self._problem.num_models)}
        swaps = []
        for j in self._positions:
            t = self.model.new_bool_var("")
            has = {
                m: sum(
                    self._x[instance, i, j]
                    for i in self._at(instance, j)
                    if self._problem.groups.model[i] == m
                )
                for m in had
            }
            for m, here in has.items():
                self.model.add(t >= here - had[m])
            swaps.append(longest * t)
            had = has
        return swaps

    def _penalties(self) -> dict[int, cp_model.IntVar]:
        """Equation 11, for each group that has a deadline; 0 or more unless earliness pays."""
        least = -_FAR if self._reading.earliness_pays else 0
        return {
            i: self.model.new_int_var(least, _FAR, "")
            for i in self._served
            if np.isfinite(self._problem.groups.deadline_s[i])
        }

    def _complete(self, instance: int, position: int, swaps: list[cp_model.LinearExprT]) -> None:
        """Equations 8, 10 and 12 for whatever group is at the position."""
        groups, device = self._problem.groups, self._problem.instances.device[instance]
        waiting = _ticks(self._problem.instances.available_s[instance]) + sum(swaps)
        for k in range(position):
            waiting += sum(
                _ticks(groups.work_s[device, i]) * self._x[instance, i, k]
                for i in self._at(instance, k)
            )
        for i in (i for i in self._at(instance, position) if i in self._penalty):
            own_s = groups.work_s[device, i] + groups.tail_s[device, i]
            here = self._x[instance, i, position]
            late = waiting + _ticks(own_s) - _ticks(groups.deadline_s[i])
            self.model.add(self._penalty[i] >= late).only_enforce_if(here)
            if self._reading.confidence is not None:
                sd_s = float(np.sqrt(groups.work_var[device, i] + groups.tail_var[device, i]))
                margin_s = NormalDist().inv_cdf(self._reading.confidence) * sd_s
                self.model.add(late + _ticks(margin_s) <= 0).only_enforce_if(here)

    def _at(self, instance: int, position: int) -> list[int]:
        """Groups that may be there."""
        return [i for i in self._served if (instance, i, position) in self._x]


def _ticks(seconds: float) -> int:
    return round(seconds * _TICKS_PER_S)
