"""A leader's record of plans and alarms, and its scaling advice."""

import math
from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest
from prometheus_client import CollectorRegistry

from services.planner.leader.policies import Planned, Planner
from services.planner.metrics import LeaderMetrics
from services.planner.state import LeaderState
from shared.broker import topology
from shared.broker.protocol import OutMessage
from shared.contracts.base import Decoder, InstanceId, ModelName, encode
from shared.contracts.estimates import AlarmKind, AlarmRaised
from shared.contracts.plans import PlanExplained, PlanRequested
from solver.planning.capacity.advice import AdviceOptions, DeviceAdvice
from solver.planning.problem.grouping import GroupId, RequestGroup
from solver.planning.problem.problem import PlanCost, QueueOrder
from solver.planning.problem.snapshot import ClusterSnapshot, InstanceView
from solver.planning.review import Basis, Cause, Review
from tests.queued import a_request
from tests.unit.planner.leader_rig import SETTINGS, LeaderRig, settled, status
from tests.unit.planner.rig import listen
from tests.unit.solver.planning.groups import a_group

M = ModelName("m")
CHAT = a_group(M, 0, num_requests=30, interactive=True)
BATCH = a_group(M, 1, num_requests=10)
DUMP = a_group(M, 2, oldest_deadline_at=math.inf, youngest_deadline_at=math.inf)
COST = PlanCost(late_share=0.2, tardiness=0.0, drain=0.0, moved=0.0, unserved=0.0, waiting=0.0)
DEVICE = "simulated simulated"


def planned(
    *groups: RequestGroup,
    places: dict[GroupId, tuple[InstanceId, int]] | None = None,
    cause: Cause | None = None,
    late: dict[GroupId, float] | None = None,
    snapshot: ClusterSnapshot | None = None,
) -> Planned:
    """A plan as the generator returns it; queues do not matter here."""
    instance = InstanceView(instance_id=InstanceId("i1"), device="d", active=M, activate_s={})
    order = QueueOrder(groups=np.zeros(0, np.int32), starts=np.zeros(2, np.int32))
    review = Review(
        order=order,
        cause=cause,
        cost=COST,
        kept_cost=COST,
        basis=Basis(instances=frozenset(), rates={}, late_share=0.2),
        late_probability=late or {},
        alarms=tuple(late or ()),
    )
    return Planned(
        snapshot=snapshot or ClusterSnapshot(now=0.0, groups=groups, instances=(instance,)),
        order=order,
        queues=(),
        places=places or {},
        policy="qlm",
        review=review,
    )


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


@pytest.fixture
def state(registry: CollectorRegistry) -> LeaderState:
    state = LeaderState(active_since=1.0)
    LeaderMetrics(registry, state)
    return state


class TestMetrics:
    def test_rounds_are_counted_by_cause(self, registry: CollectorRegistry, state: LeaderState):
        for cause in (Cause.FIRST, None, Cause.ALARMS, None):
            state.record.take(planned(cause=cause), {}, now=7.0, duration_s=0.25)
        state.record.take(replace(planned(), review=None), {}, now=8.0, duration_s=0.5)
        name = "headway_planner_reviews_total"
        counted = {
            cause: registry.get_sample_value(name, {"cause": cause})
            for cause in ("first", "alarms", "kept", "unreviewed", "drift")
        }

        assert counted == {"first": 1, "alarms": 1, "kept": 2, "unreviewed": 1, "drift": None}
        assert registry.get_sample_value("headway_planner_review_seconds_total") == 1.5

    def test_kept_plan_keeps_its_creation_time(
        self, registry: CollectorRegistry, state: LeaderState
    ):
        name = "headway_planner_plan_made_timestamp_seconds"
        state.record.take(planned(cause=Cause.FIRST), {}, now=7.0, duration_s=0.1)
        state.record.take(planned(), {}, now=9.0, duration_s=0.1)

        assert registry.get_sample_value(name) == 7.0

    def test_late_shares_weigh_groups_by_their_requests(
        self, registry: CollectorRegistry, state: LeaderState
    ):
        other = a_group(M, 3, num_requests=10, interactive=True)
        late = {CHAT.group_id: 0.4, BATCH.group_id: 1.0}
        plan = planned(CHAT, other, BATCH, DUMP, late=late)
        state.record.take(plan, {}, now=1.0, duration_s=0.1)
        shares = {
            name: registry.get_sample_value("headway_planner_late_ratio", {"qos_class": name})
            for name in ("interactive", "non_interactive", "best_effort")
        }

        assert shares == {"interactive": 0.3, "non_interactive": 1.0, "best_effort": 0.0}
        assert registry.get_sample_value("headway_planner_groups_alarmed") == 2

    def test_groups_with_a_new_instance_count_as_moved(
        self, registry: CollectorRegistry, state: LeaderState
    ):
        i, j = InstanceId("i"), InstanceId("j")
        before = {CHAT.group_id: (i, 0), BATCH.group_id: (i, 1)}
        now = {CHAT.group_id: (i, 3), BATCH.group_id: (j, 0), DUMP.group_id: (j, 1)}
        state.record.take(planned(places=now), before, now=1.0, duration_s=0.1)

        assert registry.get_sample_value("headway_planner_groups_moved_total") == 1

    def test_totals_continue_after_the_role_ends_and_other_series_end(
        self, registry: CollectorRegistry, state: LeaderState
    ):
        state.worker_restarts = 2
        state.record.take(planned(CHAT), {}, now=1.0, duration_s=0.1)
        state.active_since = None

        assert registry.get_sample_value("headway_planner_worker_restarts_total") == 2
        assert registry.get_sample_value("headway_planner_groups_alarmed") is None


class Advisor(Planner):
    """A planner whose plans expect a fifth of all work to be late, until a test changes it."""

    def __init__(self) -> None:
        super().__init__("edf", SETTINGS.importance_weight)
        self.late_share = 0.2
        self.seen_alarms: list[int] = []
        self.asked: list[AdviceOptions] = []
        self.floors: list[Mapping[str, int]] = []

    async def plan(self, snapshot: ClusterSnapshot) -> Planned:
        self.seen_alarms.append(snapshot.alarms_raised)
        plan = planned(snapshot=snapshot)
        assert plan.review is not None
        cost = replace(COST, late_share=self.late_share)
        return replace(plan, review=replace(plan.review, cost=cost))

    async def advise(
        self, snapshot: ClusterSnapshot, options: AdviceOptions, floors: Mapping[str, int]
    ) -> tuple[DeviceAdvice, ...]:
        self.asked.append(options)
        self.floors.append(floors)
        advice = DeviceAdvice(
            device=DEVICE, present=1, bound=1, confirmed=3, attainment=0.995, most=8
        )
        return (advice,)


async def advised(cluster: LeaderRig) -> Advisor:
    """The planner of a leader that has made a plan."""
    leader = await settled(cluster, advise_target=0.9)
    leader.planner = advisor = Advisor()
    await cluster.wait_in_lane(a_request())
    await leader.plan()
    return advisor


async def explained(cluster: LeaderRig) -> PlanExplained:
    queue = await listen(cluster.far, topology.REPLIES, "answer")
    await cluster.leaders[0].explain(PlanRequested(reply_to="answer"))
    return Decoder(PlanExplained)((await cluster.far.take(queue)).body)


class TestAdvice:
    async def test_advice_is_computed_when_too_much_is_expected_late(
        self, cluster: LeaderRig, registry: CollectorRegistry
    ):
        advisor = await advised(cluster)
        (leader,) = cluster.leaders
        LeaderMetrics(registry, leader.state)
        await leader.advise()
        (reported,) = (await explained(cluster)).advice
        (options,) = advisor.asked

        assert options.target == 0.9
        assert (reported.present, reported.advised, reported.bound) == (1, 4, 1)
        name = "headway_planner_advised_instances"
        assert registry.get_sample_value(name, {"device": DEVICE}) == 4

    async def test_advice_ends_some_time_after_work_is_in_time_again(self, cluster: LeaderRig):
        advisor = await advised(cluster)
        (leader,) = cluster.leaders
        await leader.advise()
        advisor.late_share = 0.05
        numbers = []
        for pause_s in (0.0, 599.0, 1.0):
            cluster.clock.advance(pause_s)
            await cluster.hear(status())
            await leader.plan()
            await leader.advise()
            (reported,) = (await explained(cluster)).advice
            numbers.append((reported.present, reported.advised))

        assert len(advisor.asked) == 1
        assert numbers == [(1, 4), (1, 4), (1, 1)]

    async def test_advice_is_computed_while_fewer_instances_may_be_enough(self, cluster: LeaderRig):
        advisor = await advised(cluster)
        advisor.late_share = 0.0
        (leader,) = cluster.leaders
        await leader.plan()
        await leader.advise()
        await cluster.hear(status("i2"))
        await leader.advise()

        assert advisor.floors == [{DEVICE: 1}]

    async def test_number_is_exported_without_instances(
        self, cluster: LeaderRig, registry: CollectorRegistry
    ):
        leader = await cluster.leader()
        leader.activated()
        cluster.clock.advance(1.5)
        LeaderMetrics(registry, leader.state)
        await leader.advise()
        name = "headway_planner_advised_instances"

        assert registry.get_sample_value(name, {"device": "unknown"}) == 1

    async def test_inactive_leader_computes_no_advice(self, cluster: LeaderRig):
        advisor = await advised(cluster)
        (leader,) = cluster.leaders
        leader.deposed()
        await leader.advise()

        assert advisor.asked == []


async def test_alarm_causes_one_replan(cluster: LeaderRig):
    advisor = await advised(cluster)
    alarm = AlarmRaised(alarm=AlarmKind.INSTANCE_SLOW, instance_id=InstanceId("i1"), at=0.0)
    message = OutMessage(body=encode(alarm))
    await cluster.far.publish(topology.TELEMETRY, topology.ALARM_KEY, message)
    await cluster.hear(status())
    (leader,) = cluster.leaders
    await leader.plan()
    await leader.plan()

    assert advisor.seen_alarms == [0, 1, 0]
    assert leader.state.alarms_heard == 1
