"""Reviews: conditions under which a new plan is made or the old plan is kept."""

from collections.abc import Callable
from dataclasses import replace
from itertools import count
from typing import Any

import pytest

from shared.contracts.base import InstanceId, ModelName
from solver.planning.problem.grouping import GroupId, RequestGroup
from solver.planning.problem.snapshot import ClusterSnapshot, InstanceView, ServiceRates
from solver.planning.review import Cause, Review, ReviewOptions, review
from tests.unit.solver.planning.groups import a_group

A, B = ModelName("a"), ModelName("b")
NOW = 100.0
OPTIONS = ReviewOptions(importance_weight={"high": 4.0, "low": 1.0}, budget_s=0.01)


def ticking() -> Callable[[], float]:
    """A clock that advances by a millisecond with each reading."""
    ticks = count()
    return lambda: 0.001 * next(ticks)


def instance(name: str, **fields: object) -> InstanceView:
    known = {"device": "d", "active": A, "activate_s": {A: 1.0, B: 1.0}}
    return InstanceView(instance_id=InstanceId(name), **(known | fields))


def snapshot_of(*groups: RequestGroup, **fields: object) -> ClusterSnapshot:
    known = {
        "now": NOW,
        "groups": groups,
        "instances": (instance("i"), instance("j")),
        "rates": {("d", model): ServiceRates(token_rate_per_s=1000.0) for model in (A, B)},
    }
    return ClusterSnapshot(**(known | fields))


def reviewed(snapshot: ClusterSnapshot, last: Review | None = None) -> Review:
    basis = None if last is None else last.basis
    return review(snapshot, basis, options=OPTIONS, clock=ticking(), seed=1)


def following(snapshot: ClusterSnapshot, last: Review, **changes: object) -> ClusterSnapshot:
    """*snapshot* with *changes*, and with the plan of *last* in force."""
    return replace(snapshot, running=last.places(snapshot), **changes)


@pytest.fixture
def world() -> ClusterSnapshot:
    return snapshot_of(a_group(A, 0), a_group(B, 0), a_group(A, 1))


def test_the_first_plan_is_made_if_there_is_none(world: ClusterSnapshot):
    first = reviewed(world)

    assert first.cause is Cause.FIRST
    assert sorted(first.order.groups.tolist()) == [0, 1, 2]


def test_the_plan_is_kept_without_a_reason(world: ClusterSnapshot):
    first = reviewed(world)
    second = reviewed(following(world, first), first)

    assert second.cause is None
    assert second.places(world) == first.places(world)
    assert second.basis == first.basis


def test_served_groups_cause_no_new_plan(world: ClusterSnapshot):
    first = reviewed(world)
    rest = following(world, first, groups=world.groups[1:])

    assert reviewed(rest, first).cause is None


@pytest.mark.parametrize(
    "instances",
    [
        (instance("i"),),
        (instance("i"), instance("j"), instance("k")),
        (instance("i"), instance("j", activate_s={A: 1.0})),
    ],
    ids=["one went", "one came", "one has other models"],
)
def test_other_instances_cause_a_new_plan(
    world: ClusterSnapshot, instances: tuple[InstanceView, ...]
):
    first = reviewed(world)

    assert reviewed(following(world, first, instances=instances), first).cause is Cause.INSTANCES


def test_a_planned_swap_causes_no_new_plan(world: ClusterSnapshot):
    first = reviewed(world)
    swapped = (instance("i", active=B), instance("j"))

    assert reviewed(following(world, first, instances=swapped), first).cause is None


def test_groups_without_a_place_cause_a_new_plan(world: ClusterSnapshot):
    first = reviewed(world)
    more = following(world, first, groups=(*world.groups, a_group(B, 7)))
    second = reviewed(more, first)

    assert second.cause is Cause.ARRIVALS
    assert 3 in second.order.groups.tolist()


def test_new_lateness_causes_a_new_plan(world: ClusterSnapshot):
    """Both instances have pulled more work than they can serve in time."""
    first = reviewed(world)
    busy = tuple(
        replace(each, backlog_s=each.backlog_s._replace(mean=500.0)) for each in world.instances
    )
    second = reviewed(following(world, first, instances=busy), first)

    assert second.cause is Cause.VIOLATIONS
    assert set(second.alarms) == {group.group_id for group in world.groups}


def test_another_throughput_causes_a_new_plan(world: ClusterSnapshot):
    first = reviewed(world)
    faster = {key: ServiceRates(token_rate_per_s=1300.0) for key in world.rates}
    little = {key: ServiceRates(token_rate_per_s=1100.0) for key in world.rates}

    assert reviewed(following(world, first, rates=faster), first).cause is Cause.DRIFT
    assert reviewed(following(world, first, rates=little), first).cause is None


def test_a_group_that_becomes_unlikely_in_time_causes_one_new_plan():
    """A little late work is not a violation, but the late group is a new alarm."""
    little = a_group(A, 5, num_requests=1)
    world = snapshot_of(little, *(a_group(A, number, num_requests=120) for number in range(5)))
    first = reviewed(world)
    assert first.alarms == ()
    due = replace(little, oldest_deadline_at=NOW - 1.0, youngest_deadline_at=NOW - 1.0)
    second = reviewed(following(world, first, groups=(due, *world.groups[1:])), first)

    assert (second.cause, second.alarms) == (Cause.ALARMS, (due.group_id,))
    third = reviewed(following(world, second, groups=(due, *world.groups[1:])), second)
    assert (third.cause, third.alarms) == (None, (due.group_id,))


def test_a_raised_alarm_causes_a_new_plan(world: ClusterSnapshot):
    first = reviewed(world)

    assert reviewed(following(world, first, alarms_raised=1), first).cause is Cause.ALARMS


def test_every_lane_with_waiting_requests_has_a_forecast(world: ClusterSnapshot):
    first = reviewed(world)

    assert {each.lane for each in first.forecasts} == {
        group.key.queue_name for group in world.groups
    }
    assert all(each.wait_s is not None for each in first.forecasts)
    assert all((each.wait_sd_s or 0.0) > 0 for each in first.forecasts)


def test_a_lane_without_an_instance_has_no_turn():
    first = reviewed(snapshot_of(a_group(ModelName("unknown"), 0)))
    (forecast,) = first.forecasts

    assert (forecast.wait_s, forecast.wait_sd_s, forecast.late_probability) == (None, None, 1.0)
    assert first.alarms == (GroupId(forecast.lane, 0),)


def test_without_work_the_plan_is_empty():
    first = reviewed(snapshot_of())

    assert len(first.order.groups) == 0
    assert reviewed(snapshot_of(), first).cause is None


def test_an_instance_without_work_beside_waiting_work_causes_a_new_plan():
    """The instances share the groups; then those of one of them have been served."""
    world = snapshot_of(*(a_group(A, number, num_requests=50) for number in range(4)))
    first = reviewed(world)
    left = tuple(group for group in world.groups if first.places(world)[group.group_id][0] == "i")
    second = reviewed(following(world, first, groups=left), first)

    assert len(left) == 2
    assert second.cause is Cause.IDLE
    assert {place[0] for place in second.places(replace(world, groups=left)).values()} == {"i", "j"}


def test_a_plan_of_few_groups_is_improved_although_each_look_at_the_clock_takes_5_ms():
    """All work is on one instance, and the other one has become idle."""
    busy, idle = instance("i"), instance("j", active=B)
    groups = [a_group(A, number) for number in range(4)]
    first = reviewed(snapshot_of(*groups, instances=(busy,)))
    kept = first.places(snapshot_of(*groups, instances=(busy,)))
    both = snapshot_of(*groups, instances=(busy, idle), running=kept)
    ticks = count()
    second = review(
        both,
        first.basis,
        options=ReviewOptions(importance_weight=OPTIONS.importance_weight),
        clock=lambda: 0.005 * next(ticks),
        seed=1,
    )

    assert second.cost.total < second.kept_cost.total
    assert {place for place, _ in second.places(both).values()} == {"i", "j"}


def test_an_instance_that_the_plan_leaves_idle_causes_no_plan_in_each_round():
    """One group cannot be shared, and its model is active on one instance only."""
    world = snapshot_of(a_group(A, 0), instances=(instance("i"), instance("j", active=B)))
    first = reviewed(world)
    second = reviewed(following(world, first), first)

    assert first.basis.idle == {("j", True)}
    assert second.cause is None


@pytest.mark.parametrize(
    "kept",
    [
        pytest.param({"drain_s": 1000.0}, id="what it ran has ended"),
        pytest.param({"express_per_s": {"high": 9.0}}, id="no more express requests are expected"),
    ],
)
def test_an_idle_instance_that_becomes_free_to_swap_causes_a_new_plan(kept: dict[str, Any]):
    dear = instance("j", active=B, **kept)
    world = snapshot_of(*(a_group(A, n) for n in range(8)), instances=(instance("i"), dear))
    first = reviewed(world)
    free = following(world, first, instances=(instance("i"), instance("j", active=B)))
    second = reviewed(free, first)

    assert first.basis.idle == {("j", False)}
    assert second.cause is Cause.IDLE
    assert {place[0] for place in second.places(world).values()} == {"i", "j"}


def test_an_idle_instance_that_begins_to_run_something_causes_no_new_plan():
    world = snapshot_of(a_group(A, 0), instances=(instance("i"), instance("j", active=B)))
    first = reviewed(world)
    busy = (instance("i"), instance("j", active=B, drain_s=1.0))
    second = reviewed(following(world, first, instances=busy), first)

    assert first.basis.idle == {("j", True)}
    assert second.cause is None


def test_an_instance_that_cannot_serve_the_waiting_work_is_not_idle_beside_it():
    apart = (instance("i"), instance("j", active=B, activate_s={B: 1.0}))

    assert reviewed(snapshot_of(a_group(A, 0), instances=apart)).basis.idle == frozenset()
