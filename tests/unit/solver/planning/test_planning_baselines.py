"""Plans that are always there, and swaps that pay."""

import math

from hypothesis import given
from hypothesis import strategies as st

from shared.contracts.base import InstanceId, ModelName
from shared.contracts.lanes import LaneKey
from shared.contracts.plans import VirtualQueue
from solver.planning.baselines import PLAN_POLICIES, PlanPolicy, edf_with_batching, fcfs
from solver.planning.snapshot import ClusterSnapshot, GroupView, InstanceView

NOW = 1000.0
A, B, C = (ModelName(name) for name in "abc")


def group(
    model: ModelName,
    *,
    deadline_at: float = NOW + 5,
    waiting: int = 10,
    tokens: float = 100.0,
    band: int = 3,
    work: str = "short",
) -> GroupView:
    key = LaneKey(layout=1, model=model, importance="high", band=band, work=work)
    return GroupView(key=key, waiting=waiting, deadline_at=deadline_at, tokens_per_request=tokens)


def instance(
    name: str,
    active: ModelName | None = A,
    *,
    swap_s: float = 1.0,
    models: tuple[ModelName, ...] = (A, B),
    backlog_s: float = 0.0,
    rate: float = 100.0,
) -> InstanceView:
    return InstanceView(
        instance_id=InstanceId(name),
        active=active,
        activate_s={model: 0.0 if model == active else swap_s for model in models},
        token_rate_per_s=dict.fromkeys(models, rate),
        backlog_s=backlog_s,
    )


def snapshot(groups: list[GroupView], instances: list[InstanceView]) -> ClusterSnapshot:
    return ClusterSnapshot(now=NOW, groups=tuple(groups), instances=tuple(instances))


def models_of(queues: tuple[VirtualQueue, ...]) -> list[list[str]]:
    return [[segment.model for segment in queue.segments] for queue in queues]


def test_best_effort_leaves_the_last_instance_of_an_express_model_alone():
    dump = group(A, deadline_at=math.inf, waiting=1000, band=12)
    two = [instance("1", A), instance("2", B)]
    free = ClusterSnapshot(now=NOW, groups=(dump,), instances=tuple(two))
    leased = ClusterSnapshot(now=NOW, groups=(dump,), instances=tuple(two), express=frozenset({B}))

    assert models_of(edf_with_batching(free)) == [["a"], ["a"]]
    assert models_of(edf_with_batching(leased)) == [["a"], []]


def test_a_deadline_takes_even_the_last_instance_of_an_express_model():
    urgent = group(A, deadline_at=NOW + 5)
    only = (instance("1", B),)
    plan = edf_with_batching(
        ClusterSnapshot(now=NOW, groups=(urgent,), instances=only, express=frozenset({B}))
    )

    assert models_of(plan) == [["a"]]


groups = st.lists(
    st.builds(
        group,
        st.sampled_from([A, B, C]),
        deadline_at=st.one_of(st.floats(NOW - 100, NOW + 1000), st.just(math.inf)),
        waiting=st.integers(0, 500),
        tokens=st.floats(1, 5000),
        band=st.integers(0, 12),
        work=st.sampled_from(["short", "long"]),
    ),
    max_size=12,
    unique_by=lambda group: group.key,
)
instances = st.lists(
    st.builds(
        instance,
        st.integers(0, 10_000).map(str),
        st.sampled_from([None, A, B]),
        swap_s=st.floats(0, 100),
        models=st.sampled_from([(), (A,), (A, B)]),
        backlog_s=st.floats(0, 100),
        rate=st.floats(1, 1e5),
    ),
    max_size=5,
    unique_by=lambda instance: instance.instance_id,
)
policies = st.sampled_from(sorted(PLAN_POLICIES)).map(PLAN_POLICIES.__getitem__)


@given(policy=policies, groups=groups, instances=instances)
def test_every_instance_gets_a_queue_in_order(
    policy: PlanPolicy, groups: list[GroupView], instances: list[InstanceView]
):
    queues = policy(snapshot(groups, instances))
    assert [queue.instance_id for queue in queues] == [view.instance_id for view in instances]


@given(policy=policies, groups=groups, instances=instances)
def test_all_waiting_work_that_can_be_served_is_in_some_queue(
    policy: PlanPolicy, groups: list[GroupView], instances: list[InstanceView]
):
    servable = {model for view in instances for model in view.activate_s}
    quotas: dict[str, int] = {}
    for queue in policy(snapshot(groups, instances)):
        for segment in queue.segments:
            for quota in segment.lanes:
                quotas[quota.lane] = quotas.get(quota.lane, 0) + quota.quota
    wanted = {
        view.key.queue_name: view.waiting
        for view in groups
        if view.waiting and view.key.model in servable
    }
    assert quotas.keys() == wanted.keys()
    assert all(quotas[lane] >= waiting for lane, waiting in wanted.items())


@given(policy=policies, groups=groups, instances=instances)
def test_nobody_is_given_a_model_that_it_cannot_serve(
    policy: PlanPolicy, groups: list[GroupView], instances: list[InstanceView]
):
    queues = policy(snapshot(groups, instances))
    for view, planned in zip(instances, models_of(queues), strict=True):
        assert set(planned) <= set(view.activate_s)
        assert len(planned) == len(set(planned))


@given(groups=groups, instances=instances)
def test_edf_segments_come_in_order_of_their_most_urgent_request(
    groups: list[GroupView], instances: list[InstanceView]
):
    urgency: dict[str, float] = {}
    for view in groups:
        if view.waiting:
            known = urgency.get(view.key.model, math.inf)
            urgency[view.key.model] = min(known, view.deadline_at)
    for planned in models_of(edf_with_batching(snapshot(groups, instances))):
        deadlines = [urgency[model] for model in planned]
        assert deadlines == sorted(deadlines)


def test_lanes_of_one_segment_come_in_order_of_deadline():
    late, soon = group(A, deadline_at=NOW + 9, band=4), group(A, deadline_at=NOW + 1, band=1)
    (queue,) = edf_with_batching(snapshot([late, soon], [instance("i")]))
    assert [quota.lane for quota in queue.segments[0].lanes] == [
        soon.key.queue_name,
        late.key.queue_name,
    ]


def test_the_most_urgent_model_is_served_first():
    plan = snapshot([group(A, deadline_at=NOW + 9), group(B, deadline_at=NOW + 1)], [instance("i")])
    assert models_of(edf_with_batching(plan)) == [["b", "a"]]


def test_work_goes_where_its_model_is_active():
    work = [group(A, tokens=10), group(B, tokens=10)]
    plan = snapshot(work, [instance("i", B), instance("j", A)])
    assert models_of(edf_with_batching(plan)) == [["b"], ["a"]]


def test_an_idle_instance_is_swapped_when_that_saves_time():
    """10 requests of 1000 tokens are 100 s of work for one, 50 s and a swap of 1 s for two."""
    plan = snapshot([group(B, tokens=1000)], [instance("i", A), instance("j", B)])
    queues = edf_with_batching(plan)
    assert models_of(queues) == [["b"], ["b"]]
    assert [queue.segments[0].lanes[0].quota for queue in queues] == [5, 5]


def test_an_idle_instance_is_not_swapped_when_that_takes_longer_than_it_saves():
    """1 s of work for one, or half that and a swap of 1 s."""
    plan = snapshot([group(B, tokens=10)], [instance("i", A), instance("j", B)])
    assert models_of(edf_with_batching(plan)) == [[], ["b"]]


def test_two_instances_do_not_both_swap_for_one_request():
    """However long it is: one request cannot be in two places."""
    plan = snapshot([group(B, waiting=1, tokens=100_000)], [instance("i"), instance("j")])
    assert models_of(edf_with_batching(plan)) == [["b"], []]


def test_of_equal_urgency_the_active_model_goes_first():
    """All best effort is equally urgent; swapping back and forth for it serves nobody."""
    filler = [group(model, deadline_at=math.inf, band=12) for model in (A, B)]
    assert models_of(edf_with_batching(snapshot(filler, [instance("i", B)]))) == [["b", "a"]]


def test_a_share_is_kept_for_best_effort_where_there_is_any():
    filler = group(A, deadline_at=math.inf, band=12)
    (with_filler,) = edf_with_batching(snapshot([group(A), filler], [instance("i")]))
    (without,) = edf_with_batching(snapshot([group(A)], [instance("i")]))
    assert with_filler.segments[0].best_effort_share > 0
    assert without.segments[0].best_effort_share == 0


def test_fcfs_serves_what_is_active_first():
    plan = snapshot([group(A), group(B)], [instance("i", B), instance("j", A)])
    assert models_of(fcfs(plan)) == [["b", "a"], ["a", "b"]]


def test_no_work_and_no_instances_are_plans_too():
    for policy in PLAN_POLICIES.values():
        assert policy(snapshot([], [])) == ()
        assert models_of(policy(snapshot([], [instance("i")]))) == [[]]
        assert models_of(policy(snapshot([group(C)], [instance("i")]))) == [[]]
        assert policy(snapshot([group(A)], [])) == ()
