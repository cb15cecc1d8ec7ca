"""SHEPHERD's placement of models on instances, as a mixed-integer program."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from ortools.math_opt.python import mathopt
from ortools.math_opt.python.mathopt import fast_sum

from solver.planning.problem.objective import servable
from solver.planning.problem.problem import Floats, Ints, PlanningProblem

Bools = NDArray[np.bool_]

NODE_LIMIT = 2000
"""
Limit of the program's search; unlike a time limit, this limit gives equal problems equal plans.
"""
_SWAP = 1e-4
"""
Cost of a second of activation, in units of relative throughput; the cost is so small that it only
breaks ties.
"""


def partition(problem: PlanningProblem, *, node_limit: int = NODE_LIMIT) -> Bools:
    """
    Which instance hosts which model, bool[G, M].

    Each instance hosts one model; if a model then has no host, each instance may host two models,
    and so on. Among these partitions, the program minimises the longest time that any model's
    hosts need for its demand. If *node_limit* ends the search without a solution, the result is
    that of `proportional`.

    Source: SHEPHERD (NSDI 2023), Herd: an integer program that gives models to groups of GPUs.
    Differs: groups are single instances; the program finishes a known queue soonest, whereas Herd
        maximises the sustainable load.
    """
    demand_s = demand_of(problem)
    kinds = _kinds(problem)
    for hosted in range(1, problem.num_models + 1):
        model, hosts = _program(problem, demand_s, kinds, hosted)
        result = mathopt.solve(
            model, mathopt.SolverType.GSCIP, params=mathopt.SolveParameters(node_limit=node_limit)
        )
        if result.has_primal_feasible_solution():
            counts = {key: round(result.variable_values(count)) for key, count in hosts.items()}
            return _spread(counts, kinds, demand_s.shape)
        if result.termination.reason != mathopt.TerminationReason.INFEASIBLE:
            break
    return proportional(problem)


def demand_of(problem: PlanningProblem) -> Floats:
    """
    Time that all groups of each model would take on each instance, [G, M]; 0 where the model does
    not fit.
    """
    groups, instances = problem.groups, problem.instances
    by_device = np.zeros((len(groups.work_s), problem.num_models))
    served = servable(problem)
    for device, work_s in enumerate(groups.work_s):
        np.add.at(by_device[device], groups.model[served], work_s[served])
    return np.where(np.isfinite(instances.activate_s), by_device[instances.device], 0.0)


def proportional(problem: PlanningProblem) -> Bools:
    """
    A partition of models over instances that is computed without a solver.

    Each model gets one host, in order of falling demand: an instance with the fewest models, if
    possible one where the model is active. Then each instance without a model takes the model
    whose hosts would need the longest.
    """
    demand_s = demand_of(problem)
    fits = demand_s > 0
    speed = np.divide(1.0, demand_s, out=np.zeros_like(demand_s), where=fits)
    hosts = np.zeros_like(fits)
    largest_first = np.argsort(-demand_s.max(axis=0), kind="stable").tolist()
    for model in (model for model in largest_first if fits[:, model].any()):
        able = np.flatnonzero(fits[:, model])
        active_elsewhere = problem.instances.active[able] != model
        rank = np.lexsort((-speed[able, model], active_elsewhere, hosts[able].sum(axis=1)))
        hosts[able[rank[0]], model] = True
    for instance in np.flatnonzero(~hosts.any(axis=1) & fits.any(axis=1)).tolist():
        rate = (hosts * speed).sum(axis=0)
        slowest = np.where(fits[instance], -rate, -np.inf)
        hosts[instance, int(np.argmax(slowest))] = True
    return hosts


@dataclass(frozen=True, slots=True, kw_only=True)
class _Kind:
    """Instances of one kind, which are interchangeable in the program."""

    members: Ints
    first: int


def _kinds(problem: PlanningProblem) -> list[_Kind]:
    instances = problem.instances
    fits = np.isfinite(instances.activate_s)
    features = np.column_stack([instances.device, instances.active, fits])
    _, kind_of = np.unique(features, axis=0, return_inverse=True)
    kinds = []
    for kind in range(int(kind_of.max()) + 1):
        members = np.flatnonzero(kind_of == kind).astype(np.int32)
        kinds.append(_Kind(members=members, first=int(members[0])))
    return kinds


def _program(
    problem: PlanningProblem, demand_s: Floats, kinds: list[_Kind], hosted: int
) -> tuple[mathopt.Model, dict[tuple[int, int], mathopt.Variable]]:
    """
    The integer program, and its variables: the number of instances of each kind that host each
    model.

    An instance hosts at most *hosted* models.
    """
    model = mathopt.Model()
    hosts = {
        (k, m): model.add_integer_variable(lb=0.0, ub=float(len(kind.members)))
        for k, kind in enumerate(kinds)
        for m in np.flatnonzero(demand_s[kind.first]).tolist()
    }
    # An instance divides its time among the models that it hosts.
    shares = hosts if hosted == 1 else {key: model.add_variable(lb=0.0) for key in hosts}
    for k, kind in enumerate(kinds):
        size, mine = len(kind.members), [key for key in hosts if key[0] == k]
        model.add_linear_constraint(fast_sum(hosts[key] for key in mine) <= hosted * size)
        model.add_linear_constraint(fast_sum(shares[key] for key in mine) <= size)
        if hosted > 1:
            for key in mine:
                model.add_linear_constraint(shares[key] <= hosts[key])
    unit_s = float(demand_s.max(initial=1e-9))
    throughput = model.add_variable(lb=0.0, ub=1e6)
    for m in np.flatnonzero(demand_s.any(axis=0)).tolist():
        of_model = [key for key in hosts if key[1] == m]
        rate = {key: unit_s / float(demand_s[kinds[key[0]].first, m]) for key in of_model}
        model.add_linear_constraint(fast_sum(hosts[key] for key in of_model) >= 1.0)
        served = fast_sum(rate[key] * shares[key] for key in of_model)
        model.add_linear_constraint(served >= throughput)
    swaps_s = fast_sum(_swap_s(problem, kinds[k], m) * count for (k, m), count in hosts.items())
    model.maximize(throughput - _SWAP / problem.num_instances * swaps_s)
    return model, hosts


def _swap_s(problem: PlanningProblem, kind: _Kind, model: int) -> float:
    """Mean time that an instance of *kind* needs to activate *model*."""
    if problem.instances.active[kind.first] == model:
        return 0.0
    return float(problem.instances.activate_s[kind.members, model].mean())


def _spread(
    counts: dict[tuple[int, int], int], kinds: list[_Kind], shape: tuple[int, ...]
) -> Bools:
    """
    Assignment of models to instances, bool[G, M]; the instances of a kind host its models in turn.
    """
    hosts = np.zeros(shape, dtype=np.bool_)
    turn = dict.fromkeys(range(len(kinds)), 0)
    for (k, m), count in sorted(counts.items()):
        members = kinds[k].members
        chosen = (turn[k] + np.arange(count)) % len(members)
        hosts[members[chosen], m] = True
        turn[k] += count
    return hosts
