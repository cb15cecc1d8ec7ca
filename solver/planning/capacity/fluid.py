"""
Smallest number of added instances for a load of arbitrarily divisible work: a linear program
(HiGHS).
"""

from dataclasses import dataclass
from math import ceil

import numpy as np
from numpy.typing import NDArray
from ortools.math_opt.python import mathopt
from ortools.math_opt.python.mathopt import fast_sum

from solver.planning.problem.problem import Floats, PlanningProblem

_PARTS = 4
"""
Number of parts into which each group's work is divided; each part is due when its last request is
due.
"""
_STEPS = 12
"""Number of distinct deadlines; each deadline is rounded up to the latest deadline of its step."""
_ROUNDING = 1e-6
"""Rounding error of the solver, as a share of all work and as a share of one instance."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SpareInstance:
    """Properties of each added instance. Seconds from now."""

    device: int
    """Index of the instance's kind of device, below the number D of kinds."""
    activate_s: Floats
    """Activation time of each model, [M]; infinite where the instance may not have the model."""
    available_s: float
    """Time at which the instance would be ready to activate its first model."""


def least_added(problem: PlanningProblem, spare: SpareInstance, *, tolerance: float) -> int | None:
    """
    Lower bound of the number of instances like *spare* that serve nearly all work in time.

    Work is a fluid: any part of it may run on any instance at any time, once the work's model is
    active on the instance. All times are means. Half an instance, for example, needs half the time
    of a swap. Best-effort work does not count. Work that would be late even at the head of a queue
    does not count.

    Args:
        problem: Work of the current instances.
        tolerance: Share of the remaining work that may be late, 0..1.

    Returns:
        A lower bound, or `None` when no number is enough.

    Raises:
        RuntimeError: The solver neither solved the program nor proved it infeasible.

    Source: QLM §7, relaxed.
    Differs: the paper has no lower bound of the number of instances.
    """
    kinds = [*_kinds(problem), _spare_kind(spare)]
    demand = _demand(problem, kinds)
    if not demand.due_s.size:
        return 0
    model, added = _program(demand, kinds, tolerance)
    # GLOP reports feasible programs of this form as infeasible, by primal and by dual simplex.
    result = mathopt.solve(model, mathopt.SolverType.HIGHS)
    if result.termination.reason == mathopt.TerminationReason.INFEASIBLE:
        return None
    if result.termination.reason != mathopt.TerminationReason.OPTIMAL:
        raise RuntimeError(f"the solver found no bound: {result.termination.reason.name.lower()}")
    least: float = result.variable_values(added)
    return max(0, ceil(least - _ROUNDING))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Kind:
    """Instances of one kind, which are interchangeable in the linear program."""

    device: int
    available_s: Floats
    """Time at which each of the n instances is free, [n]; one value for all added instances."""
    setup_s: Floats
    """
    Least time to drain and to activate each model on any instance of the kind, [M]; 0 for the
    active model.
    """
    num: int | None
    """Number of instances of this kind; `None` for the kind of the added instances."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Demand:
    """Work by model and deadline, with B deadlines in order of time."""

    due_s: Floats
    """Deadlines of the work in seconds from now, [B]."""
    work_s: Floats
    """Work in seconds by model and deadline, [M, B]; each group counts on its fastest device."""
    slower: Floats
    """Least ratio of a group's work on a device to its work on its fastest device, [D, M, B]."""


def _kinds(problem: PlanningProblem) -> list[_Kind]:
    instances = problem.instances
    fits = np.isfinite(instances.activate_s)
    features = np.column_stack([instances.device, instances.active, fits])
    _, kind_of = np.unique(features, axis=0, return_inverse=True)
    # Before a model change, either the running work or a group served since is drained.
    after_group_s = problem.groups.drain_s.min(axis=1, initial=np.inf)[instances.device]
    drain_s = np.minimum(instances.drain_s, after_group_s)
    setup_s = drain_s[:, np.newaxis] + instances.activate_s
    resident = instances.active[:, np.newaxis] == np.arange(problem.num_models)
    setup_s = np.where(resident & fits, 0.0, setup_s)
    members = (np.flatnonzero(kind_of == kind) for kind in range(int(kind_of.max()) + 1))
    return [
        _Kind(
            device=int(instances.device[mine[0]]),
            available_s=instances.available_s[mine],
            setup_s=setup_s[mine].min(axis=0),
            num=len(mine),
        )
        for mine in members
    ]


def _spare_kind(spare: SpareInstance) -> _Kind:
    return _Kind(
        device=spare.device,
        available_s=np.array([spare.available_s]),
        setup_s=spare.activate_s,
        num=None,
    )


def _demand(problem: PlanningProblem, kinds: list[_Kind]) -> _Demand:
    """Work that can be in time; the work of each group is divided into `_PARTS` parts."""
    groups = problem.groups
    soonest_s = np.min([kind.available_s.min() + kind.setup_s for kind in kinds], axis=0)
    progress = np.arange(1, _PARTS + 1) / _PARTS
    due_s = (groups.deadline_s - groups.tail_s.min(axis=0)) + np.outer(progress, groups.spread_s)
    fastest_s = groups.work_s.min(axis=0)
    counts = np.isfinite(due_s) & (due_s > soonest_s[groups.model]) & (fastest_s > 0)
    group = np.nonzero(counts)[1]
    dues_s, step = _steps(due_s[counts])
    work_s = np.zeros((problem.num_models, len(dues_s)))
    slower = np.full((len(groups.work_s), *work_s.shape), np.inf)
    np.add.at(work_s, (groups.model[group], step), fastest_s[group] / _PARTS)
    for device, of_device in enumerate(slower):
        ratio = groups.work_s[device, group] / fastest_s[group]
        np.minimum.at(of_device, (groups.model[group], step), ratio)
    return _Demand(due_s=dues_s, work_s=work_s, slower=slower)


def _steps(due_s: Floats) -> tuple[Floats, NDArray[np.int64]]:
    """
    At most `_STEPS` deadlines, and for each of the deadlines *due_s* the index of its rounded
    value.
    """
    sooner = np.sort(due_s)
    last = np.arange(1, _STEPS + 1) * len(sooner) // _STEPS - 1
    ends_s = np.unique(sooner[last[last >= 0]])
    return ends_s, np.searchsorted(ends_s, due_s)


def _program(
    demand: _Demand, kinds: list[_Kind], tolerance: float
) -> tuple[mathopt.Model, mathopt.Variable]:
    """The linear program, and the variable that is the number of added instances."""
    model = mathopt.Model()
    added = model.add_variable(lb=0.0)
    model.minimize(added)
    served: dict[tuple[int, int], list[mathopt.LinearBase]] = {}
    for kind in kinds:
        _serve(model, added, demand, kind, served)
    for (m, step), work in served.items():
        model.add_linear_constraint(fast_sum(work) <= demand.work_s[m, step])
    enough_s = (1 - tolerance - _ROUNDING) * float(demand.work_s.sum())
    model.add_linear_constraint(fast_sum(fast_sum(work) for work in served.values()) >= enough_s)
    return model, added


def _serve(
    model: mathopt.Model,
    added: mathopt.Variable,
    demand: _Demand,
    kind: _Kind,
    served: dict[tuple[int, int], list[mathopt.LinearBase]],
) -> None:
    """
    Add the work that instances of *kind* serve by each deadline to *served*.

    An instance that serves a model by a deadline activates the model first, so only the time after
    the activation counts.
    """
    num = added if kind.num is None else kind.num
    after_s = np.maximum(0.0, demand.due_s - kind.available_s[:, np.newaxis])
    load: list[list[mathopt.LinearBase]] = [[] for _ in demand.due_s]
    for m in np.flatnonzero(np.isfinite(kind.setup_s)).tolist():
        setup_s = float(kind.setup_s[m])
        spent_s, holders = mathopt.LinearSum([]), mathopt.LinearSum([])
        for step, due_s in enumerate(demand.due_s.tolist()):
            if demand.work_s[m, step] > 0:
                sooner_s, spent_s = spent_s, model.add_variable(lb=0.0)
                fewer, holders = holders, model.add_variable(lb=0.0)
                slower = float(demand.slower[kind.device, m, step])
                served.setdefault((m, step), []).append((spent_s - sooner_s) / slower)
                left_s = max(0.0, due_s - float(kind.available_s.min()) - setup_s)
                model.add_linear_constraint(spent_s >= sooner_s)
                model.add_linear_constraint(spent_s <= left_s * holders)
                model.add_linear_constraint(holders >= fewer)
                model.add_linear_constraint(holders <= num)
            load[step] += [spent_s, setup_s * holders]
    for step, left_s in enumerate(after_s.sum(axis=0).tolist()):
        capacity_s = left_s * added if kind.num is None else left_s
        model.add_linear_constraint(fast_sum(load[step]) <= capacity_s)
