"""Evaluation of plans, compared with hand-computed queues and the normal distribution."""

import math
from dataclasses import replace

import numpy as np
import pytest

from ops.sim.plans import judge
from solver.planning.problem.problem import PlanningProblem
from tests.planning_problems import NEVER, Group, Instance, a_problem, an_order

BUSY = Instance(active=0)
"""Instance with active model 0; activating model 1 takes 5 s."""


def phi(value: float) -> float:
    return 0.5 * math.erfc(-value / math.sqrt(2))


def three_times_slower(problem: PlanningProblem) -> PlanningProblem:
    groups = problem.groups
    return replace(problem, groups=replace(groups, work_s=3 * groups.work_s))


def test_work_adds_up_along_a_queue_and_tails_do_not() -> None:
    groups = [Group(work_s=10, tail_s=7, deadline_s=limit) for limit in (7.1, 16.9, 27.1)]

    verdict = judge(a_problem(groups, [BUSY]), an_order([0, 1, 2]))

    assert verdict.late_share().tolist() == [0, 1, 0]
    assert verdict.attainment() == pytest.approx(2 / 3)


def test_a_group_waits_for_the_pulled_work_of_its_instance() -> None:
    servers = [Instance(active=0, available_s=20)]

    late = judge(a_problem([Group(deadline_s=19)], servers), an_order([0])).late_share()
    in_time = judge(a_problem([Group(deadline_s=21)], servers), an_order([0])).late_share()

    assert (late.tolist(), in_time.tolist()) == ([1], [0])


def test_another_model_waits_for_the_drain_and_its_activation() -> None:
    # The second group's turn is after 10 s of work, 3 s of drain and 5 s of activation; the third
    # group needs no swap and its turn is at 28 s.
    groups = [
        Group(model=0, drain_s=3),
        Group(model=1, deadline_s=18.1),
        Group(model=1, deadline_s=27.9),
    ]

    verdict = judge(a_problem(groups, [BUSY]), an_order([0, 1, 2]))

    assert verdict.late_share().tolist() == [0, 0, 1]
    assert verdict.swaps == 1
    assert verdict.setup_s == pytest.approx(8)


def test_running_work_drains_only_before_the_first_swap() -> None:
    servers = [Instance(active=0, drain_s=6)]
    groups = [Group(model=0, deadline_s=1), Group(model=1, deadline_s=10.9)]

    assert judge(a_problem(groups[:1], servers), an_order([0])).late_share().tolist() == [0]
    assert judge(a_problem(groups[1:], servers), an_order([0])).late_share().tolist() == [1]


def test_a_group_finishes_one_request_after_another() -> None:
    groups = [Group(num_requests=10, work_s=10, deadline_s=6.5)]

    verdict = judge(a_problem(groups, [BUSY]), an_order([0]))

    assert verdict.late_share() == pytest.approx([0.3])
    assert verdict.late_probability() == pytest.approx([1.0])


def test_large_groups_are_followed_in_parts_with_the_same_share() -> None:
    groups = [Group(num_requests=1600, work_s=160, deadline_s=80)]

    verdict = judge(a_problem(groups, [BUSY]), an_order([0]))

    assert verdict.late_share() == pytest.approx([0.5])


def test_younger_requests_have_later_deadlines() -> None:
    slower = Group(num_requests=11, work_s=11, deadline_s=0.5, spread_s=10)
    without = Group(num_requests=11, work_s=11, deadline_s=0.5, spread_s=0)

    verdict = judge(a_problem([slower, without], [BUSY, BUSY]), an_order([0], [1]))

    assert verdict.late_share() == pytest.approx([0, 10 / 11])


def test_a_slow_device_takes_longer() -> None:
    groups = [Group(work_s=10), Group(deadline_s=25)]

    fast = judge(a_problem(groups, [BUSY]), an_order([0, 1]))
    slow = judge(three_times_slower(a_problem(groups, [BUSY])), an_order([0, 1]))

    assert fast.late_share().tolist() == [0, 0]
    assert slow.late_share().tolist() == [0, 1]


def test_a_group_in_no_queue_is_late_unless_it_has_no_deadline() -> None:
    groups = [Group(deadline_s=100), Group(deadline_s=100), Group(deadline_s=NEVER)]

    verdict = judge(a_problem(groups, [BUSY]), an_order([0]))

    assert verdict.late_share().tolist() == [0, 1, 0]


def test_attainment_is_weighted_and_can_be_of_a_part() -> None:
    groups = [Group(weight=30, deadline_s=1), Group(weight=10, deadline_s=1)]
    problem = a_problem(groups, [BUSY])

    verdict = judge(problem, an_order([0, 1]))

    assert verdict.attainment() == pytest.approx(0.75)
    assert verdict.attainment(np.array([False, True])) == pytest.approx(0)
    assert verdict.attainment(np.array([False, False])) == pytest.approx(1)


def test_independent_work_tends_to_the_normal_distribution() -> None:
    """The variance of twenty groups' total time is the sum of the groups' variances."""
    groups = [Group(work_var=1.0) for _ in range(20)] + [Group(deadline_s=203)]

    verdict = judge(a_problem(groups, [BUSY]), an_order(range(21)), num_scenarios=20_000)

    assert verdict.late_share()[20] == pytest.approx(phi(-3 / math.sqrt(20)), abs=0.01)


def test_a_common_error_adds_up_within_a_model_and_not_across_models() -> None:
    one = [Group(model=0) for _ in range(4)]
    two = [Group(model=0) for _ in range(2)] + [Group(model=1) for _ in range(2)]
    servers = [Instance(active=0, activate_s=(0.0, 0.0))]
    last = Group(model=0, work_s=1, deadline_s=42)

    def late(groups: list[Group]) -> float:
        problem = a_problem([*groups, last], servers, rate_error=0.05)
        return float(judge(problem, an_order(range(5)), num_scenarios=20_000).late_share()[4])

    assert late(one) == pytest.approx(phi(-2 / 2.0), abs=0.01)
    assert late(two) == pytest.approx(phi(-2 / math.sqrt(2.0)), abs=0.01)


def test_availability_and_tails_are_also_uncertain() -> None:
    problem = a_problem(
        [Group(tail_s=50, tail_var=9, deadline_s=155)],
        [Instance(active=0, available_s=100, available_var=16)],
    )

    verdict = judge(problem, an_order([0]), num_scenarios=20_000)

    assert verdict.late_share()[0] == pytest.approx(phi(-1), abs=0.01)


def test_more_variance_gives_more_spread_between_scenarios() -> None:
    def sd(rate_error: float) -> float:
        groups = [Group(num_requests=16, deadline_s=10 * (i + 1)) for i in range(10)]
        problem = a_problem(groups, [BUSY], rate_error=rate_error)
        return float(judge(problem, an_order(range(10))).attainment().std())

    assert 0 == sd(0.0) < sd(0.05) < sd(0.2)


def test_scenarios_depend_on_the_seed_only() -> None:
    problem = a_problem([Group(work_var=25), Group(deadline_s=10)], [BUSY], rate_error=0.1)

    first, again, other = (judge(problem, an_order([0, 1]), seed=seed) for seed in (1, 1, 2))

    assert np.array_equal(first.late, again.late)
    assert not np.array_equal(first.late, other.late)


def test_impossible_plans_are_rejected() -> None:
    problem = a_problem([Group(model=1)], [Instance(activate_s=(0.0, NEVER)), BUSY])

    with pytest.raises(ValueError, match="two positions"):
        judge(problem, an_order([], [0, 0]))
    with pytest.raises(ValueError, match="may not have"):
        judge(problem, an_order([0], []))
