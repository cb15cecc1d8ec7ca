"""Content of the console's views."""

from typing import Any

import pytest

from services.gateway.console.frames import (
    MOST_GROUPS,
    NO_LEADER_S,
    InstanceState,
    instances,
    overview,
    queues,
)
from services.gateway.console.watching import FORGET_S, MeshWatch
from services.gateway.instances import SILENCE_S
from shared.broker.memory.hub import MemoryHub
from shared.contracts.base import InstanceId, ModelName
from shared.contracts.plans import PlacedGroup, PlanExplained
from shared.contracts.telemetry import (
    InstanceStatus,
    Iteration,
    IterationsObserved,
    LsoExecuted,
)
from tests.clocks import NOW, FakeClock
from tests.deliveries import UnreliableBroker
from tests.queued import MODEL, OTHER


def status(name: str = "one", **fields: Any) -> InstanceStatus:
    values: dict[str, Any] = {"model": MODEL, "running": 2, "max_running": 8}
    return InstanceStatus(
        instance_id=InstanceId(name),
        incarnation="i",
        seq=1,
        at=NOW,
        engine="e",
        device="d",
        **(values | fields),
    )


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def watch(clock: FakeClock) -> MeshWatch:
    return MeshWatch(UnreliableBroker(MemoryHub()), clock)


def planned(watch: MeshWatch, *groups: PlacedGroup) -> None:
    """The leader has just answered with *groups*."""
    watch.plan = PlanExplained(epoch=7, at=NOW, leader_id="p1", policy="qlm", groups=groups)
    watch.plan_at = watch.clock.now()


def group(number: int = 0, **fields: Any) -> PlacedGroup:
    values: dict[str, Any] = {"instance_id": InstanceId("one"), "wait_s": 4.0, "wait_sd_s": 1.0}
    return PlacedGroup(lane="lane.x", number=number, num_requests=3, **(values | fields))


@pytest.mark.parametrize(
    ("fields", "state"),
    [
        ({}, InstanceState.SERVING),
        ({"draining": True}, InstanceState.DRAINING),
        ({"activating": ModelName(OTHER)}, InstanceState.ACTIVATING),
        ({"model": None}, InstanceState.IDLE),
    ],
)
def test_state_of_an_instance_follows_from_its_status(
    watch: MeshWatch, fields: dict[str, Any], state: InstanceState
):
    watch.on_message(status(**fields))
    assert instances(watch).rows[0].state is state


def test_an_instance_without_a_status_is_silent_and_later_forgotten(
    watch: MeshWatch, clock: FakeClock
):
    watch.on_message(status())
    clock.advance(SILENCE_S)

    (row,) = instances(watch).rows
    assert (row.state, row.seen_s) == (InstanceState.SILENT, SILENCE_S)
    assert (overview(watch).silent, overview(watch).running) == (1, 0)

    clock.advance(FORGET_S)
    assert instances(watch).rows == ()


def test_pace_is_the_mean_of_the_last_iterations(watch: MeshWatch):
    iterations = tuple(
        Iteration(compute_tokens=1, context_tokens=1, num_decodes=1, duration_s=duration_s)
        for duration_s in (0.1, 0.3)
    )
    observed = IterationsObserved(
        instance_id=InstanceId("one"), model=MODEL, engine="e", device="d", at=NOW,
        iterations=iterations,
    )  # fmt: skip
    watch.on_message(status())
    assert instances(watch).rows[0].pace_s is None

    watch.on_message(observed)

    assert instances(watch).rows[0].pace_s == pytest.approx(0.2)


def test_operations_are_listed_newest_first(watch: MeshWatch):
    for number in range(3):
        watch.on_message(
            LsoExecuted(instance_id=InstanceId("one"), at=NOW + number, lso="evict", outcome="done")
        )
    assert [each.at for each in instances(watch).lsos] == [NOW + 2, NOW + 1, NOW]


def test_a_group_has_its_turn_its_interval_and_its_deadline(watch: MeshWatch):
    planned(watch, group(time_left_s=9.0, late_probability=0.25))

    (bar,) = queues(watch).bars

    assert (bar.turn_s, bar.due_s, bar.late) == (4.0, 9.0, 0.25)
    assert bar.interval_s is not None
    low_s, high_s = bar.interval_s
    assert 0 < low_s < 4.0 < high_s


def test_a_group_that_no_instance_serves_has_no_turn(watch: MeshWatch):
    planned(watch, group(instance_id=None, wait_s=None, wait_sd_s=None))
    (bar,) = queues(watch).bars
    assert (bar.turn_s, bar.interval_s, bar.due_s) == (None, None, None)


def test_a_plan_of_a_leader_that_no_longer_answers_is_not_shown(watch: MeshWatch, clock: FakeClock):
    planned(watch, group())
    assert (overview(watch).leader, overview(watch).queued) == ("p1", 3)

    clock.advance(NO_LEADER_S)

    assert (overview(watch).leader, queues(watch).leader, queues(watch).bars) == (None, None, ())


def test_of_many_groups_the_first_are_shown_and_the_rest_counted(watch: MeshWatch):
    planned(watch, *(group(number) for number in range(MOST_GROUPS + 5)))
    assert (len(queues(watch).bars), queues(watch).more) == (MOST_GROUPS, 5)
