"""Cost of a plan, by worked examples."""

import math
from dataclasses import replace

import numpy as np
import pytest

from solver.planning.problem.objective import alarms, homes, late_probability, plan_cost, servable
from solver.planning.problem.problem import NONE, Objective, PlanCost, PlanningProblem, QueueOrder
from tests.planning_problems import NEVER, Group, Instance, a_problem, an_order

FREE_TIME = Objective(waiting=0.0)
"""Time of drains and activations costs nothing."""
AT_ONCE = Instance(active=0)


def late(problem: PlanningProblem, *queues: list[int]) -> float:
    return plan_cost(problem, an_order(*queues)).late_share


def phi(z: float) -> float:
    return 0.5 * math.erfc(-z / math.sqrt(2))


def test_only_requests_served_after_the_deadline_are_late():
    """Five of ten seconds of work are in time: the milestones at 6.25 and 8.75 s are late."""
    problem = a_problem([Group(deadline_s=5.0)], [AT_ONCE])

    assert late(problem, [0]) == 0.5


def test_spread_deadlines_move_with_the_requests():
    problem = a_problem([Group(deadline_s=1.3, spread_s=9.0)], [AT_ONCE])

    assert late(problem, [0]) == 0.0


def test_late_shares_are_weighted():
    problem = a_problem([Group(weight=3.0, deadline_s=10.0), Group(deadline_s=10.0)], [AT_ONCE])

    assert late(problem, [0, 1]) == 0.25
    assert late(problem, [1, 0]) == 0.75


def test_a_tail_delays_only_its_own_group():
    tailed = Group(deadline_s=20.0, tail_s=100.0)
    problem = a_problem([tailed, Group(deadline_s=20.0)], [AT_ONCE])

    assert late(problem, [0, 1]) == 0.5


def test_pulled_work_delays_all_groups():
    problem = a_problem([Group(deadline_s=10.0)], [Instance(active=0, available_s=9.0)])

    assert late(problem, [0]) == 1.0


@pytest.mark.parametrize(
    ("instance", "models", "setup_s", "back_s"),
    [
        pytest.param(Instance(active=0), (0, 0), 0.0, 0.0, id="stays"),
        pytest.param(Instance(active=1, drain_s=2.0), (0, 0), 7.0, 5.0, id="drains what runs now"),
        pytest.param(
            Instance(active=0, drain_s=2.0), (0, 1), 8.0, 5.0, id="drains the group before"
        ),
        pytest.param(Instance(active=0, drain_s=2.0), (1, 0), 15.0, 10.0, id="returns at a price"),
    ],
)
def test_a_model_change_drains_and_activates_and_costs_the_way_back(
    instance: Instance, models: tuple[int, int], setup_s: float, back_s: float
):
    """
    The first group's drain takes 3 s, the activation 5 s; a deadline measures the delay. The lost
    time counts three times: it also delays work that will arrive.
    """
    groups = [Group(model=model, drain_s=3.0) for model in models]
    problem = a_problem(groups, [instance])

    cost = plan_cost(problem, an_order([0, 1]))

    assert cost.drain == pytest.approx(3 * 0.003 * (setup_s + back_s) / 20.0)
    assert late_after(problem, 20.0 + setup_s) == 0.0
    assert late_after(problem, 18.0 + setup_s) > 0.0


@pytest.mark.parametrize(
    ("instance", "back_s"),
    [
        pytest.param(Instance(active=NONE), 0.0, id="first activation"),
        pytest.param(Instance(active=1), 5.0, id="nothing to do"),
    ],
)
def test_a_model_change_of_an_idle_instance_costs_the_way_back_for_one_request(
    instance: Instance, back_s: float
):
    """Two groups of ten requests wait, and the work of each takes 10 s."""
    problem = a_problem([Group(weight=10.0), Group(weight=10.0)], [instance])
    cost = plan_cost(problem, an_order([0, 1]))

    assert cost.drain == pytest.approx(0.003 * back_s / 20.0 / 20.0)


def test_a_model_change_costs_its_time_if_the_plan_in_force_has_work_for_the_instance():
    problem = a_problem(
        [Group(model=1), Group()], [Instance(active=1)], running=[(0, 0), (NONE, NONE)]
    )
    assert plan_cost(problem, an_order([0, 1])).drain == pytest.approx(3 * 0.003 * 10.0 / 20.0)


def test_a_swap_costs_the_express_requests_that_arrive_until_the_model_is_back():
    """A request of weight 4 arrives every 8 s, and the swap takes 5 s there and 5 s back."""
    problem = a_problem(
        [Group(model=1), Group()], [Instance(active=0, express_per_s=0.5)], objective=FREE_TIME
    )

    assert plan_cost(problem, an_order([0, 1])).drain == pytest.approx(0.5 * 10.0 / 2)
    assert plan_cost(problem, an_order([1, 0])).drain == pytest.approx(0.5 * 10.0 / 2)


def test_relegated_requests_are_late_in_any_plan():
    problem = a_problem([Group(relegated_share=0.5), Group(deadline_s=50.0)], [AT_ONCE])

    assert late(problem, [0, 1]) == late(problem, [1, 0]) == 0.25
    assert late_probability(problem, an_order([0, 1])).tolist() == [0.0, 0.0]


def test_a_group_whose_model_is_withheld_for_now_is_not_late():
    problem = a_problem(
        [Group(deadline_s=50.0), Group(model=1, deadline_s=50.0)],
        [Instance(active=0, activate_s=(5.0, math.inf))],
    )
    soon = replace(problem.instances, withheld=np.array([[False, True]]))
    cost = plan_cost(replace(problem, instances=soon), an_order([0]))

    assert (cost.late_share, cost.unserved) == (0.0, 0.0)
    assert plan_cost(problem, an_order([0])).unserved == 0.5


def late_after(problem: PlanningProblem, deadline_s: float) -> float:
    """Late probability when the second group has *deadline_s*."""
    deadlines = np.array([NEVER, deadline_s])
    changed = replace(problem, groups=replace(problem.groups, deadline_s=deadlines))
    return late(changed, [0, 1])


def test_variances_add_along_the_queue():
    """At the only milestone, the mean is 4 s before the deadline and the deviation is 2 s."""
    problem = a_problem(
        [Group(work_var=1.0), Group(deadline_s=19.0, work_var=2.0, tail_var=1.5)],
        [Instance(active=0, available_var=0.5)],
        objective=Objective(milestones=(0.5,)),
    )

    assert late(problem, [0, 1]) == pytest.approx(phi(-2.0) / 2)


def test_rate_errors_add_up_within_a_model_and_not_across_models():
    """20 s of model 0 and 10 s of model 1, each 10 % wrong: deviations of 2 s and 1 s."""
    groups = [Group(), Group(), Group(model=1, deadline_s=30.0)]
    instances = [Instance(active=0, activate_s=(0.0, 0.0))]
    last = Objective(milestones=(1.0,))
    problem = a_problem(groups, instances, rate_error=0.1, objective=last)
    later = replace(
        problem, groups=replace(problem.groups, deadline_s=np.array([NEVER, NEVER, 32.0]))
    )

    assert late(problem, [0, 1, 2]) == pytest.approx(phi(0.0) / 3)
    assert late(later, [0, 1, 2]) == pytest.approx(phi(-2 / math.sqrt(4 + 1)) / 3)


def test_tardiness_is_counted_in_slos_up_to_its_maximum():
    objective = Objective(tardiness=1.0, max_tardiness=2.0)
    one_over = a_problem([Group(deadline_s=0.0, slo_s=10.0)], [AT_ONCE], objective=objective)
    far_over = a_problem([Group(deadline_s=0.0, slo_s=1.0)], [AT_ONCE], objective=objective)

    assert plan_cost(one_over, an_order([0])).tardiness == pytest.approx(1.0)
    assert plan_cost(far_over, an_order([0])).tardiness == pytest.approx(2.0)


def test_tardiness_is_the_last_requests_tardiness():
    group = Group(deadline_s=0.0, spread_s=8.0, tail_s=4.0, slo_s=10.0)
    problem = a_problem([group], [AT_ONCE], objective=Objective(tardiness=1.0))

    assert plan_cost(problem, an_order([0])).tardiness == pytest.approx(0.6)


def test_best_effort_is_never_late_but_costs_less_if_served_early():
    problem = a_problem([Group(), Group(weight=2.0)], [AT_ONCE])

    heavy_first, heavy_last = (plan_cost(problem, an_order(q)) for q in ([1, 0], [0, 1]))

    assert heavy_first.late_share == heavy_first.tardiness == heavy_last.late_share == 0.0
    assert 0 < heavy_first.waiting < heavy_last.waiting < 0.01


def test_waiting_costs_something_also_for_groups_that_are_in_time():
    """Two equal queues cost less than one, with nothing late, even if a model is activated."""
    group = Group(deadline_s=1000.0, slo_s=1000.0)
    problem = a_problem([group, group, group, group], [AT_ONCE, AT_ONCE])
    one, two = (plan_cost(problem, an_order(*q)) for q in (([0, 1, 2, 3], []), ([0, 1], [2, 3])))

    assert one.late_share == two.late_share == 0.0
    assert two.waiting < one.waiting


def test_moving_a_group_has_a_price_and_a_new_group_has_none():
    late = Group(deadline_s=-1.0)
    problem = a_problem(
        [late, late, late, late],
        [AT_ONCE, AT_ONCE],
        running=[(0, 0), (0, 1), (1, 0), (NONE, NONE)],
    )

    assert plan_cost(problem, an_order([0, 1], [2, 3])).moved == 0.0
    assert plan_cost(problem, an_order([1, 0, 3], [2])).moved == 0.0
    assert plan_cost(problem, an_order([0, 2], [3, 1])).moved == pytest.approx(0.02 * 2 / 4)


def test_a_group_that_is_late_nowhere_moves_without_a_price():
    problem = a_problem(
        [Group(), Group(deadline_s=100.0)], [AT_ONCE, AT_ONCE], running=[(0, 0), (0, 1)]
    )

    assert plan_cost(problem, an_order([], [0, 1])).moved == 0.0


def test_a_group_of_a_vanished_instance_moves_without_a_price():
    problem = a_problem(
        [Group(), Group(model=1)],
        [Instance(activate_s=(5.0, math.inf)), AT_ONCE],
        running=[(7, 0), (0, 0)],
    )

    assert homes(problem).tolist() == [NONE, NONE]
    assert plan_cost(problem, an_order([0], [1])).moved == 0.0


def test_a_group_without_a_permitted_instance_is_late_and_unserved():
    problem = a_problem(
        [Group(), Group(model=1, weight=3.0, deadline_s=1e9)],
        [Instance(activate_s=(5.0, math.inf))],
    )

    cost = plan_cost(problem, an_order([0]))

    assert servable(problem).tolist() == [True, False]
    assert (cost.late_share, cost.unserved) == (0.75, 0.75)
    assert late_probability(problem, an_order([0])).tolist() == [0.0, 1.0]


def test_best_effort_without_a_permitted_instance_is_not_late():
    problem = a_problem([Group(), Group(model=1)], [Instance(activate_s=(5.0, math.inf))])

    cost = plan_cost(problem, an_order([0]))

    assert (cost.late_share, cost.unserved) == (0.0, 0.5)


def test_the_total_is_the_sum_of_its_terms():
    cost = PlanCost(
        late_share=0.1, tardiness=0.02, drain=0.003, moved=0.0004, unserved=9.0, waiting=0.00005
    )

    assert cost.total == pytest.approx(0.12345)


def test_a_problem_without_groups_costs_nothing():
    assert plan_cost(a_problem([]), an_order([])).total == 0.0


@pytest.mark.parametrize(
    "order",
    [
        pytest.param(an_order([0], []), id="left out"),
        pytest.param(an_order([0, 1], [1]), id="twice"),
        pytest.param(an_order([0], [1]), id="on an instance that may not"),
    ],
)
def test_an_invalid_plan_is_rejected(order: QueueOrder):
    able, unable = Instance(), Instance(activate_s=(5.0, math.inf))
    problem = a_problem([Group(), Group(model=1)], [able, unable])

    with pytest.raises(ValueError, match=r"(a|the) plan"):
        plan_cost(problem, order)


def test_groups_that_break_the_chance_constraint_raise_alarms_in_order():
    groups = [
        Group(work_s=1.0, deadline_s=10.0, tail_var=1.0),
        Group(work_s=1.0, deadline_s=2.0, tail_var=1.0),
        Group(work_s=1.0, deadline_s=1.0, tail_var=1.0),
        Group(work_s=1.0, tail_var=1.0),
    ]
    problem = a_problem(groups, [AT_ONCE])
    order = an_order([0, 1, 2, 3])

    probability = late_probability(problem, order)

    assert probability.tolist() == pytest.approx([phi(-9), phi(0), phi(2), 0.0])
    assert alarms(problem, order, confidence=0.9).tolist() == [2, 1]
    assert alarms(problem, order, confidence=0.4).tolist() == [2]


def test_a_groups_late_probability_is_that_of_its_worst_request():
    """With a wide spread of deadlines, the first request is critical, else the last."""
    groups = [Group(deadline_s=0.5, spread_s=100.0, tail_s=1.0), Group(deadline_s=19.9)]
    problem = a_problem(groups, [AT_ONCE], objective=Objective(milestones=(0.5,)))

    assert late_probability(problem, an_order([0, 1])).tolist() == [1.0, 1.0]
    assert late(problem, [0, 1]) == 0.0
