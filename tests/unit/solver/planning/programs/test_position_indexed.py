"""QLM's own program: it solves what it says, and what is printed is not what is meant."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import permutations
from math import inf, isfinite, sqrt

import pytest

from solver.planning.objective import plan_cost
from solver.planning.problem import PlanningProblem
from solver.planning.programs.position_indexed import (
    PRINTED,
    REPAIRED,
    PositionPlan,
    Reading,
    position_indexed,
)
from solver.planning.programs.succession import setup_s
from tests.planning_problems import (
    Group,
    Instance,
    a_problem,
    a_random_problem,
    an_order,
    queues_of,
)

SOFT = replace(PRINTED, confidence=None)
Z_95 = 1.6448536


def penalty_s(problem: PlanningProblem, queues: list[list[int]], reading: Reading) -> float | None:
    """Equation 13 by a walk along the queues; `None` where equation 12 is broken."""
    groups, total_s = problem.groups, 0.0
    for g, queue in enumerate(queues):
        device, resident = problem.instances.device[g], problem.instances.active[g]
        swap_s = max((s for s in setup_s(problem, g).flat if isfinite(s)), default=0.0)
        free_s = problem.instances.available_s[g]
        for i in queue:
            own_s = 0.0 if groups.model[i] == resident else swap_s
            resident = groups.model[i]
            done_s = free_s + groups.work_s[device, i] + groups.tail_s[device, i]
            done_s += own_s if reading.own_swap else 0.0
            free_s += own_s + groups.work_s[device, i]
            if not isfinite(groups.deadline_s[i]):
                continue
            late_s = done_s - groups.deadline_s[i]
            sd_s = sqrt(groups.work_var[device, i] + groups.tail_var[device, i])
            if reading.confidence is not None and late_s + Z_95 * sd_s > 0:
                return None
            total_s += late_s if reading.earliness_pays else max(0.0, late_s)
    return total_s


def all_queues(problem: PlanningProblem) -> Iterator[list[list[int]]]:
    """On two instances."""
    served = [i for i in range(problem.num_groups) if any(problem.may_serve(g, i) for g in (0, 1))]
    for ranking in permutations(served):
        for cut in range(len(ranking) + 1):
            queues = [list(ranking[:cut]), list(ranking[cut:])]
            if all(problem.may_serve(g, i) for g, queue in enumerate(queues) for i in queue):
                yield queues


def solved(problem: PlanningProblem, reading: Reading) -> PositionPlan:
    found = position_indexed(problem, reading)
    assert found is not None
    assert found.proved
    return found


@pytest.mark.parametrize(
    "reading",
    [
        pytest.param(SOFT, id="printed"),
        pytest.param(REPAIRED, id="repaired"),
        pytest.param(replace(SOFT, own_swap=True), id="own swap"),
        pytest.param(replace(SOFT, earliness_pays=False), id="no earliness"),
    ],
)
@pytest.mark.parametrize("seed", range(4))
def test_it_finds_the_least_penalty_of_all_plans(seed: int, reading: Reading):
    problem = a_random_problem(seed, num_groups=4, num_instances=2, num_models=2)

    found = solved(problem, reading)

    penalties_s = [penalty_s(problem, queues, reading) for queues in all_queues(problem)]
    least_s = min(each_s for each_s in penalties_s if each_s is not None)
    assert found.penalty_s == pytest.approx(least_s, abs=0.05)
    assert penalty_s(problem, queues_of(found.order), reading) == pytest.approx(least_s, abs=0.05)


@pytest.mark.parametrize(("slack_s", "num_allowed"), [(-6.0, 0), (-1.0, 11), (4.0, 30), (20.0, 99)])
def test_equation_12_leaves_the_plans_that_are_likely_in_time_or_none(
    slack_s: float, num_allowed: int
):
    """Of 120 plans, by the deadlines' slack."""
    groups = [
        Group(model=k % 2, work_s=6.0 + k, work_var=4.0, deadline_s=14.0 + 8 * k + slack_s)
        for k in range(4)
    ]
    instances = [Instance(active=0, activate_s=(3.0, 3.0)), Instance(activate_s=(3.0, 3.0))]
    problem = a_problem(groups, instances)
    meant = replace(PRINTED, own_swap=True)

    found = position_indexed(problem, meant)

    penalties_s = [penalty_s(problem, queues, meant) for queues in all_queues(problem)]
    allowed_s = [each_s for each_s in penalties_s if each_s is not None]
    assert len(allowed_s) == num_allowed
    least_s = min(allowed_s, default=None)
    assert (None if found is None else found.penalty_s) == pytest.approx(least_s, abs=0.05)


def test_as_printed_an_overload_has_no_plan():
    groups = [Group(deadline_s=15.0), Group(deadline_s=15.0)]
    problem = a_problem(groups, [Instance(active=0)])

    assert position_indexed(problem, PRINTED) is None
    assert solved(problem, REPAIRED).penalty_s == 5.0


def test_as_printed_a_group_does_not_wait_for_its_own_swap():
    """The group takes 10 s and its swap 5 s; it is late for 12 s, and the print denies it."""
    problem = a_problem([Group(model=1, deadline_s=12.0)], [Instance(active=0)])

    assert solved(problem, PRINTED).penalty_s == -2.0
    assert solved(problem, REPAIRED).penalty_s == 3.0
    assert plan_cost(problem, an_order([0])).late_share > 0


def test_as_printed_a_plan_swaps_where_the_group_itself_pays():
    """It may swap on an idle instance in 50 s, or follow 4 s of work where its model is active."""
    groups = [Group(work_s=4.0, deadline_s=4.0), Group(deadline_s=15.0)]
    busy, idle = Instance(active=0, activate_s=(50.0,)), Instance(activate_s=(50.0,))
    problem = a_problem(groups, [busy, idle])

    assert [len(queue) for queue in queues_of(solved(problem, SOFT).order)] == [1, 1]
    assert queues_of(solved(problem, REPAIRED).order) == [[0, 1], []]


def test_as_printed_earliness_of_one_group_pays_for_lateness_of_another():
    """Shortest first makes the sum of completions least, and the urgent group late."""
    groups = [Group(work_s=10.0, deadline_s=10.0), Group(work_s=3.0, deadline_s=100.0)]
    problem = a_problem(groups, [Instance(active=0)])

    printed, repaired = (solved(problem, reading).order for reading in (SOFT, REPAIRED))

    assert queues_of(printed) == [[1, 0]]
    assert queues_of(repaired) == [[0, 1]]
    assert plan_cost(problem, printed).late_share > plan_cost(problem, repaired).late_share == 0


def test_as_printed_deadlines_make_no_difference_between_plans_that_are_allowed():
    """The sum of penalties is that of completion times less a constant."""
    groups = [Group(work_s=w, deadline_s=100.0) for w in (7.0, 3.0, 5.0)]
    other = [Group(work_s=w, deadline_s=d) for w, d in ((7.0, 50.0), (3.0, 90.0), (5.0, 70.0))]

    for each in (groups, other):
        problem = a_problem(each, [Instance(active=0)])
        assert queues_of(solved(problem, PRINTED).order) == [[1, 2, 0]]


def test_groups_that_nobody_may_serve_are_in_no_queue_and_best_effort_has_no_penalty():
    groups = [Group(), Group(model=1, deadline_s=1.0)]
    problem = a_problem(groups, [Instance(activate_s=(5.0, inf))])

    found = solved(problem, PRINTED)

    assert queues_of(found.order) == [[0]]
    assert found.penalty_s == 0.0
