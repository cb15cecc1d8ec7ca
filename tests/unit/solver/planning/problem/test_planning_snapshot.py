"""Snapshots as arrays, and orders as virtual queues."""

import math
from dataclasses import replace

import numpy as np
import pytest

from shared.contracts.base import InstanceId, ModelName
from shared.contracts.lanes import LaneKey
from shared.contracts.qos import Importance
from solver.planning.problem.grouping import Spread
from solver.planning.problem.problem import NONE, PlanningProblem, QueueOrder
from solver.planning.problem.snapshot import (
    ClusterSnapshot,
    InstanceView,
    ServiceRates,
    places,
    planning_problem,
    virtual_queues,
)
from tests.unit.solver.planning.groups import a_group

IMPORTANCE_WEIGHT = {"high": 4.0, "low": 1.0}
A, B = ModelName("a"), ModelName("b")
FAST, SLOW = InstanceId("fast"), InstanceId("slow")
RATES = {
    ("big", A): ServiceRates(
        token_rate_per_s=1000, rate_error=0.2, prefill_s=Spread(0.5, 0.1), decode_s_per_token=0.01
    ),
    ("small", A): ServiceRates(token_rate_per_s=250),
}


def instance(name: InstanceId, device: str, **fields: object) -> InstanceView:
    known = {
        "instance_id": name,
        "device": device,
        "active": A,
        "activate_s": {A: 1.0, B: 7.0},
    }
    return InstanceView(**(known | fields))


def problem_of(snapshot: ClusterSnapshot) -> PlanningProblem:
    return planning_problem(snapshot, importance_weight=IMPORTANCE_WEIGHT)


@pytest.fixture
def snapshot() -> ClusterSnapshot:
    return ClusterSnapshot(
        now=100.0,
        groups=(a_group(A), a_group(B)),
        instances=(instance(FAST, "big"), instance(SLOW, "small", active=None)),
        rates=RATES,
    )


class TestArrays:
    def test_work_is_tokens_over_throughput(self, snapshot: ClusterSnapshot):
        """A group has ten requests of 100 tokens; lengths vary independently."""
        groups = problem_of(snapshot).groups

        assert groups.work_s[:, 0].tolist() == [1.0, 4.0]
        assert groups.work_var[:, 0] == pytest.approx([10 * 2500 / 1e6, 10 * 2500 / 62500])

    def test_only_whole_answers_wait_for_decoding(self, snapshot: ClusterSnapshot):
        first = replace(snapshot, groups=(a_group(A, interactive=True),))

        assert problem_of(snapshot).groups.tail_s[0, 0] == pytest.approx(0.5 + 20 * 0.01)
        assert problem_of(snapshot).groups.tail_var[0, 0] == pytest.approx(0.01 + 0.4**2)
        assert problem_of(first).groups.tail_s[0, 0] == pytest.approx(0.5)
        assert problem_of(first).groups.drain_s[0, 0] == pytest.approx(60 * 0.01)

    def test_deadlines_are_relative_to_now(self, snapshot: ClusterSnapshot):
        groups = problem_of(snapshot).groups

        assert (groups.deadline_s[0], groups.spread_s[0], groups.slo_s[0]) == (60.0, 5.0, 60.0)

    def test_best_effort_is_never_late(self, snapshot: ClusterSnapshot):
        endless = a_group(
            A, oldest_deadline_at=math.inf, youngest_deadline_at=math.inf, time_left_s=math.inf
        )
        groups = problem_of(replace(snapshot, groups=(endless,))).groups

        assert (groups.deadline_s[0], groups.spread_s[0]) == (math.inf, 0.0)

    def test_important_requests_weigh_more(self, snapshot: ClusterSnapshot):
        key = replace_importance(a_group(A).key, Importance.HIGH)
        groups = problem_of(replace(snapshot, groups=(a_group(A), a_group(A, key=key)))).groups

        assert groups.weight.tolist() == [10.0, 40.0]

    def test_express_load_slows_an_instance_down(self, snapshot: ClusterSnapshot):
        shared = replace(
            snapshot,
            instances=(instance(FAST, "big", reserved_share=0.5), instance(SLOW, "big")),
        )
        problem = problem_of(shared)
        busy, free = problem.instances.device

        assert problem.groups.work_s[busy, 0] == 2 * problem.groups.work_s[free, 0]

    def test_unmeasured_pairs_have_a_prior(self, snapshot: ClusterSnapshot):
        assert np.isfinite(problem_of(snapshot).groups.work_s).all()

    def test_models_without_an_instance_are_accepted(self, snapshot: ClusterSnapshot):
        alone = replace(snapshot, instances=(instance(FAST, "big", activate_s={A: 1.0}),))
        problem = problem_of(alone)

        assert [problem.may_serve(0, index) for index in range(2)] == [True, False]

    @pytest.mark.parametrize("waiting", [(A, B), (B,)])
    def test_an_active_model_that_its_instance_must_not_serve_counts_as_none(
        self, snapshot: ClusterSnapshot, waiting: tuple[ModelName, ...]
    ):
        """The status of an instance leaves out models whose files differ from the gateways'."""
        differing = instance(FAST, "big", active=A, activate_s={B: 7.0})
        instances = problem_of(
            replace(
                snapshot,
                groups=tuple(a_group(model) for model in waiting),
                instances=(differing,),
            )
        ).instances

        assert instances.active.tolist() == [NONE]


class TestRunningPlans:
    def test_places_of_a_plan_become_the_running_plan(self, snapshot: ClusterSnapshot):
        order = QueueOrder(groups=np.array([1, 0], np.int32), starts=np.array([0, 2, 2], np.int32))
        running = problem_of(replace(snapshot, running=places(snapshot, order))).running

        assert running.instance.tolist() == [0, 0]
        assert running.position.tolist() == [1, 0]

    def test_new_groups_and_groups_of_lost_instances_have_no_place(self, snapshot: ClusterSnapshot):
        gone = {snapshot.groups[0].group_id: (InstanceId("gone"), 3)}
        running = problem_of(replace(snapshot, running=gone)).running

        assert running.instance.tolist() == [NONE, NONE]


class TestVirtualQueues:
    def test_neighbours_of_one_model_are_one_segment(self, snapshot: ClusterSnapshot):
        groups = (a_group(A), a_group(A, number=1), a_group(B), a_group(A, number=2))
        order = QueueOrder(
            groups=np.array([0, 1, 2, 3], np.int32), starts=np.array([0, 4, 4], np.int32)
        )
        first, second = virtual_queues(replace(snapshot, groups=groups), order)

        assert [segment.model for segment in first.segments] == [A, B, A]
        (quota,) = first.segments[0].lanes
        assert (quota.lane, quota.quota) == (a_group(A).key.queue_name, 20)
        assert (second.instance_id, second.segments) == (SLOW, ())


def replace_importance(key: LaneKey, importance: Importance) -> LaneKey:
    return LaneKey(
        layout=key.layout,
        model=key.model,
        importance=importance.value,
        band=key.band,
        work=key.work,
    )
