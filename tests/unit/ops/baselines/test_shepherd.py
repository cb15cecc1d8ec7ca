"""SHEPHERD: models stay on their hosts, batches are static, large batches preempt."""

from itertools import product

import numpy as np
import pytest

from ops.baselines.planning.shepherd import STATIC_BATCH, shepherd, static_batches
from ops.baselines.planning.shepherd_partition import demand_of, partition, proportional
from ops.bench.planner_instances import instance
from solver.planning.orders.rules import edf_batching
from solver.planning.problem.problem import PlanningProblem
from tests.planning_problems import NEVER, Group, Instance, a_problem, queues_of

FREE = Instance()


def loads(*work_s: float) -> list[Group]:
    """One group for each entry of *work_s*; each group has its own model."""
    return [Group(model=m, work_s=work) for m, work in enumerate(work_s)]


def test_hosts_are_in_proportion_to_demand() -> None:
    hosts = partition(a_problem(loads(30, 10), [FREE] * 4))

    assert hosts.sum(axis=0).tolist() == [3, 1]
    assert hosts.sum(axis=1).tolist() == [1, 1, 1, 1]


@pytest.mark.parametrize("seed", range(8))
def test_partition_matches_exhaustive_search(seed: int) -> None:
    random = np.random.default_rng(seed)
    work_s = random.uniform(5, 50, 3)
    instances = [
        Instance(activate_s=tuple(np.where(random.random(3) < 0.2, NEVER, 1.0))) for _ in range(4)
    ]
    instances[0] = instances[1] = instances[2] = Instance(activate_s=(1.0, 1.0, 1.0))
    problem = a_problem(loads(*work_s), instances)
    demand_s = demand_of(problem)

    def slowest(hosted: tuple[int, ...]) -> float:
        rate = np.zeros(3)
        for pair in enumerate(hosted):
            if demand_s[pair]:
                rate[pair[1]] += 1 / demand_s[pair]
        return float(rate.min())

    chosen = tuple(int(np.argmax(row)) for row in partition(problem))
    best = max(slowest(hosted) for hosted in product(range(3), repeat=4))
    assert slowest(chosen) == pytest.approx(best, rel=0.01)


def test_an_active_model_stays_where_it_is() -> None:
    instances = [Instance(active=1), Instance(active=0), Instance(active=1)]

    hosts = partition(a_problem(loads(10, 20), instances))

    assert hosts.tolist() == [[False, True], [True, False], [False, True]]


def test_an_instance_hosts_several_models_only_if_instances_are_few() -> None:
    three = [Instance(activate_s=(1.0, 1.0, 1.0))]

    assert partition(a_problem(loads(9, 9, 9), three * 2)).sum() > 2
    assert partition(a_problem(loads(9, 9, 9), three * 3)).sum(axis=1).tolist() == [1, 1, 1]


def test_partition_without_a_solution_is_proportional() -> None:
    problem = instance(0, 200, 16, 6)

    without = partition(problem, node_limit=0)

    assert (without == proportional(problem)).all()
    assert not (without == partition(problem)).all()


def test_proportional_partition_gives_more_hosts_to_more_demand() -> None:
    hosts = proportional(a_problem(loads(30, 10), [FREE] * 4))

    assert hosts.sum(axis=0).tolist() == [3, 1]
    assert hosts.sum(axis=1).tolist() == [1, 1, 1, 1]


def test_groups_stay_on_the_hosts_of_their_model() -> None:
    groups = [Group(model=0)] * 9 + [Group(model=1)]
    problem = a_problem(groups, [Instance(active=0), Instance(active=1)])

    assert queues_of(shepherd(problem)) == [list(range(9)), [9]]
    # Without a partition, the second instance also serves the model.
    assert len(queues_of(edf_batching(problem))[1]) > 1


def test_a_static_batch_takes_as_long_as_its_longest_output() -> None:
    alike = Group(num_requests=64, work_s=64)
    varied = Group(num_requests=64, work_s=64, work_var=64)
    single = Group(num_requests=1, work_s=1, work_var=1)

    static = static_batches(a_problem([alike, varied, single]))

    # For one request, the deviation over the mean is 1: sqrt(64 * 64) / 64.
    longest = 1 + np.sqrt(2 * np.log(STATIC_BATCH))
    assert static.groups.work_s[0] == pytest.approx([64, 64 * longest, 1])
    assert not static.groups.work_var.any()


def one_queue(*groups: Group) -> list[list[int]]:
    def everywhere(problem: PlanningProblem) -> np.ndarray:
        return np.isfinite(problem.instances.activate_s)

    problem = a_problem(groups, [Instance(active=0, activate_s=(0.0, 0.0))])
    return queues_of(shepherd(problem, partitioned=everywhere))


def test_the_earliest_deadline_is_next_among_equal_batches() -> None:
    early = Group(num_requests=12, deadline_s=50)
    late = Group(num_requests=32, deadline_s=60)

    assert one_queue(late, early) == [[1, 0]]


def test_a_batch_three_times_as_large_preempts() -> None:
    early = Group(num_requests=10, deadline_s=50)
    late = Group(num_requests=32, deadline_s=60)

    assert one_queue(late, early) == [[0, 1]]


def test_infeasible_groups_neither_preempt_nor_go_first() -> None:
    lost = Group(num_requests=32, work_s=40, deadline_s=30)
    small = Group(num_requests=1, deadline_s=35)

    assert one_queue(lost, small) == [[1, 0]]


def test_only_the_first_batch_must_be_in_time() -> None:
    long = Group(num_requests=64, work_s=64, deadline_s=33)
    small = Group(num_requests=32, deadline_s=90)

    assert one_queue(small, long) == [[1, 0]]
