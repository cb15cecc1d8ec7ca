"""Pulls of the simulated mesh's instances, and input of its planners."""

import numpy as np
import pytest

from ops.sim.mesh.conduct import by_arrival, by_deadline
from ops.sim.mesh.kinds import A10, A100, MISTRAL_7B, Fleet
from ops.sim.mesh.lanes import AnswerLengths, MeshLanes
from ops.sim.mesh.planners import IMPORTANCE_WEIGHT, GeneratorPlanner, shepherd_policy
from ops.sim.mesh.profiling import measured
from ops.sim.mesh.request import MeshRequest
from ops.sim.mesh.snapshot import grouped, one_by_one
from ops.sim.mesh.window import QueueInForce
from ops.sim.mesh.workload import MeshTraffic
from ops.sim.request import Arrival
from shared.contracts.base import InstanceId, ModelName
from shared.contracts.plans import LaneQuota, Segment
from shared.contracts.qos import Slo
from solver.planning.problem.snapshot import (
    ClusterSnapshot,
    InstanceView,
    planning_problem,
)
from solver.planning.review import ReviewOptions

A, B = ModelName("a"), ModelName("b")


class Waiting:
    """Lanes with requests of given models, arrival times and times left."""

    def __init__(self, *requests: tuple[ModelName, float, float]) -> None:
        self.requests = [
            MeshRequest(
                number,
                Arrival(
                    arrived_at=at,
                    prompt_tokens=100,
                    output_tokens=50,
                    class_name="any",
                    slo=Slo(ttlt_s=left_s),
                ),
                model,
            )
            for number, (model, at, left_s) in enumerate(requests)
        ]
        self.lanes = MeshLanes(AnswerLengths(self.requests))
        for request in self.requests:
            self.lanes.put(request, request.arrival.arrived_at)

    def segment(self, model: ModelName, **quotas: int) -> Segment:
        """A segment with the lanes of requests *rN* and their quotas."""
        return Segment(
            model=model,
            lanes=tuple(
                LaneQuota(lane=self.requests[int(name[1:])].lane, quota=quota)
                for name, quota in quotas.items()
            ),
        )

    def queue(self, *segments: Segment) -> QueueInForce:
        queue = QueueInForce(self.lanes, by_deadline)
        queue.follow(segments)
        return queue


def test_lanes_of_a_segment_are_served_together_the_earliest_deadline_first():
    waiting = Waiting((A, 0.0, 600.0), (A, 1.0, 60.0), (A, 2.0, 60.0))
    queue = waiting.queue(waiting.segment(A, r0=1, r1=2))
    pulled = [queue.pull_head() for _ in range(4)]

    assert pulled == [waiting.requests[1], waiting.requests[2], waiting.requests[0], None]


def test_a_quota_is_not_exceeded():
    waiting = Waiting((A, 0.0, 60.0), (A, 1.0, 60.0))
    queue = waiting.queue(waiting.segment(A, r0=1))

    assert [queue.pull_head(), queue.pull_head()] == [waiting.requests[0], None]


def test_segments_without_waiting_requests_leave_the_head():
    waiting = Waiting((A, 0.0, 60.0), (B, 0.0, 60.0))
    queue = waiting.queue(waiting.segment(A, r0=1), waiting.segment(B, r1=1))
    queue.pull_head()
    queue.drop_served()

    assert [segment.model for segment in queue.segments()] == [B]


def test_more_urgent_requests_are_taken_wherever_they_are_planned():
    waiting = Waiting((A, 0.0, 600.0), (A, 0.0, 60.0), (A, 0.0, 3000.0), (B, 0.0, 20.0))
    queue = waiting.queue(waiting.segment(A, r0=1))
    pulled = [queue.pull_urgent() for _ in range(3)]

    assert pulled == [waiting.requests[1], waiting.requests[0], None]


def test_looking_ahead_pulls_from_any_segment_in_order():
    waiting = Waiting((A, 0.0, 60.0), (B, 0.0, 20.0))
    queue = waiting.queue(waiting.segment(A, r0=1), waiting.segment(B, r1=1))

    assert [queue.pull_any() for _ in range(3)] == [*waiting.requests, None]


def test_returned_requests_are_next_in_their_old_order():
    waiting = Waiting((A, 0.0, 60.0), (A, 1.0, 60.0), (A, 2.0, 60.0))
    lane = waiting.requests[0].lane
    first, second = waiting.lanes.take(lane), waiting.lanes.take(lane)
    waiting.lanes.put_back([first, second])

    assert waiting.lanes.num_waiting == 3
    assert [waiting.lanes.take(lane) for _ in range(3)] == waiting.requests


def test_a_relegated_request_waits_without_a_deadline():
    waiting = Waiting((A, 0.0, 60.0), (A, 1.0, 60.0))
    late = waiting.lanes.take(waiting.requests[0].lane)
    waiting.lanes.relegate(late, 5.0)
    best_effort = [s for s in waiting.lanes.statistics() if s.time_left_s == float("inf")]

    assert [s.waiting for s in best_effort] == [1]
    assert waiting.lanes.num_waiting == 2


def test_policies_without_groups_see_the_first_requests_one_by_one():
    waiting = Waiting((A, 0.0, 600.0), (B, 1.0, 60.0), (A, 2.0, 20.0))
    by_key = {
        key: [g.group_id.number for g in one_by_one(waiting.lanes, key, count=2)]
        for key in (by_arrival, by_deadline)
    }

    assert by_key == {by_arrival: [0, 1], by_deadline: [2, 1]}


@pytest.fixture(scope="module")
def profiles():
    arrivals = MeshTraffic(models={A: 1.0}, rate_rps=30.0, duration_s=10.0).arrivals()
    fleet = Fleet(devices=(A100, A10), models={A: MISTRAL_7B, B: MISTRAL_7B})
    return measured(fleet, {A: [each.arrival for each in arrivals]}, max_running=128)


def test_a_profile_shows_a_third_of_the_speed(profiles):
    fast, slow = profiles["a100", A], profiles["a10", A]

    assert 2 < fast.rates.token_rate_per_s / slow.rates.token_rate_per_s < 10
    assert profiles["a100", B] == fast
    assert slow.average_batch <= 128


def view(number: int, device: str) -> InstanceView:
    return InstanceView(
        instance_id=InstanceId(str(number)),
        device=device,
        active=A,
        activate_s={A: 0.0, B: 1.0},
    )


def test_equal_generators_give_equal_complete_plans(profiles):
    waiting = Waiting(*((model, 0.1 * n, 60.0) for n in range(40) for model in (A, B)))
    views = [view(0, "a100"), view(1, "a10")]

    def planned() -> list[object]:
        planner = GeneratorPlanner(
            profiles,
            lambda lanes, known, now: grouped(lanes, known, batch_multiple=4.0, now=now),
            moves_per_s=50_000.0,
            options=ReviewOptions(importance_weight=IMPORTANCE_WEIGHT),
            seed=0,
        )
        return list(planner.plan(waiting.lanes, views, 5.0))

    queues = planned()
    quotas = [q.quota for queue in queues for s in queue.segments for q in s.lanes]

    assert queues == planned()
    assert sum(quotas) == 80


def test_shepherds_partition_is_kept_and_hosts_later_models(profiles):
    policy = shepherd_policy(period=10)
    views = (view(0, "a100"), view(1, "a10"))
    rates = {key: each.rates for key, each in profiles.items()}

    def served(*models: ModelName) -> int:
        waiting = Waiting(*((model, 0.0, 60.0) for model in models))
        groups = grouped(waiting.lanes, profiles, batch_multiple=4.0, now=1.0)
        snapshot = ClusterSnapshot(now=1.0, groups=groups, instances=views, rates=rates)
        order = policy(planning_problem(snapshot, importance_weight=IMPORTANCE_WEIGHT))
        return len(np.unique(order.groups))

    assert [served(A), served(A, B), served(B)] == [1, 2, 1]
