"""Random planning problems: valid, equal for equal seeds, and as difficult as specified."""

from dataclasses import fields, replace

import numpy as np
import pytest

from ops.bench.planner_instances import (
    A10,
    A100,
    HARSH,
    instance,
    is_interactive,
    urgent_arrivals,
)
from solver.planning.problem.problem import NONE, GroupArrays, PlanningProblem, QueueOrder

SIZES = [(7, 2, 3), (20, 2, 3), (200, 16, 6), (800, 50, 8), (1600, 100, 12)]


def same(left: PlanningProblem, right: PlanningProblem) -> bool:
    return all(
        np.array_equal(getattr(left.groups, field.name), getattr(right.groups, field.name))
        for field in fields(GroupArrays)
    )


def halves(problem: PlanningProblem) -> QueueOrder:
    """A plan that assigns all groups alternately to two instances."""
    even, odd = np.arange(0, problem.num_groups, 2), np.arange(1, problem.num_groups, 2)
    starts = [0, len(even)] + [problem.num_groups] * (problem.num_instances - 1)
    return QueueOrder(
        groups=np.concatenate([even, odd]).astype(np.int32), starts=np.array(starts, np.int32)
    )


def test_problems_depend_on_the_seed_only() -> None:
    assert same(instance(3, 40, 4, 4), instance(3, 40, 4, 4))
    assert not same(instance(3, 40, 4, 4), instance(4, 40, 4, 4))


@pytest.mark.parametrize("size", SIZES)
def test_every_group_can_be_served(size: tuple[int, int, int]) -> None:
    problem = instance(0, *size)

    able = np.isfinite(problem.instances.activate_s[:, problem.groups.model])
    assert (problem.num_groups, problem.num_instances, problem.num_models) == size
    assert able.any(axis=0).all()


@pytest.mark.parametrize("size", SIZES)
def test_quantities_are_valid(size: tuple[int, int, int]) -> None:
    problem = instance(1, *size)

    groups, instances = problem.groups, problem.instances
    for array in (groups.work_s, groups.work_var, groups.tail_s, groups.tail_var, groups.drain_s):
        assert array.shape == (2, problem.num_groups)
        assert (array > 0).all()
    assert (groups.num_requests >= 1).all()
    assert (groups.spread_s >= 0).all()
    assert (groups.slo_s >= groups.deadline_s).all()
    resident = instances.activate_s[np.arange(problem.num_instances), instances.active]
    assert np.isfinite(resident).all()
    assert (problem.running.instance == NONE).all()


def test_some_models_do_not_fit_small_devices_which_take_three_times_as_long() -> None:
    problem = instance(0, 800, 50, 8)

    small = problem.instances.device == A10
    fits = np.isfinite(problem.instances.activate_s)
    assert small.sum() == 15
    assert fits[~small].all()
    assert not fits[small].all()
    assert fits[small].any()
    assert problem.groups.work_s[A10] == pytest.approx(3 * problem.groups.work_s[A100])


def test_an_interactive_group_takes_at_most_a_quarter_of_its_slo() -> None:
    groups = instance(0, 800, 50, 8).groups
    interactive = is_interactive(instance(0, 800, 50, 8))

    several = interactive & (groups.num_requests > 1)
    assert several.sum() > 100
    assert (groups.work_s[A100] <= groups.slo_s / 4)[several].all()
    assert (groups.work_s[A100] > 10)[~interactive].all()


def test_interactive_groups_are_feasible() -> None:
    many = instance(0, 2000, 10, 8)
    calm = instance(0, 2000, 10, 8, replace(HARSH, urgent_load=0.5))

    assert is_interactive(calm).sum() < is_interactive(many).sum() < 60


def test_longer_lengths_vary_more() -> None:
    wide = instance(0, 50, 4, 4, replace(HARSH, length_cv=3.0))
    narrow = instance(0, 50, 4, 4, replace(HARSH, length_cv=1.0))

    assert wide.groups.work_var == pytest.approx(9 * narrow.groups.work_var)


@pytest.mark.parametrize("size", [(0, 1, 1), (1, 0, 1), (1, 1, 0)])
def test_an_empty_problem_is_rejected(size: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match="needs at least one group"):
        instance(0, *size)


def test_urgent_arrivals_are_last_interactive_and_in_no_queue() -> None:
    before = instance(0, 60, 4, 4)

    after = urgent_arrivals(before, halves(before), 16, seed=1)

    assert after.num_groups == 76
    assert is_interactive(after)[60:].all()
    assert (after.groups.deadline_s[60:] <= 30).all()
    assert (after.running.instance[60:] == NONE).all()


def test_urgent_arrivals_keep_the_running_order_with_new_estimates() -> None:
    before = instance(0, 60, 4, 4)

    after = urgent_arrivals(before, halves(before), 16, seed=1)

    assert after.running.instance[:4].tolist() == [0, 1, 0, 1]
    assert after.running.position[:6].tolist() == [0, 0, 1, 1, 2, 2]
    ratio = after.groups.work_s[:, :60] / before.groups.work_s
    assert np.abs(ratio - 1).max() <= 0.03
    assert np.abs(ratio - 1).max() > 0.01
    assert np.array_equal(after.groups.deadline_s[:60], before.groups.deadline_s)
