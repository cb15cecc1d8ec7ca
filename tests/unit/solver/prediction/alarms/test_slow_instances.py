"""Detection of instances that are slower than their peers."""

from math import inf, nan

import pytest

from shared.contracts.base import InstanceId
from solver.prediction.alarms.alarm import AlarmChange, AlarmOptions
from solver.prediction.alarms.slow_instances import MEMORY_S, Judged, SlowInstances

PATIENCE = 3
ENOUGH = 16
"""Number of iterations from which an instance has a pace."""


def watch() -> SlowInstances:
    return SlowInstances(AlarmOptions(raise_above=1.5, clear_below=1.2, patience=PATIENCE))


def judged(
    instances: SlowInstances, *, rounds: int = PATIENCE, at: float = 0.0, **multiples: float
) -> list[Judged]:
    """Judgements after rounds in which instances take the given multiples of predicted times."""
    changes: list[Judged] = []
    for number in range(rounds):
        for name, multiple in multiples.items():
            instances.observe(InstanceId(name), [multiple] * 128)
        changes += instances.judge(at + number)
    return changes


def test_an_instance_twice_as_slow_as_the_others_is_slow():
    instances = watch()
    (change,) = judged(instances, a=1.0, b=2.0, c=1.0)

    assert change == Judged(InstanceId("b"), AlarmChange.RAISED, pytest.approx(2.0))
    assert instances.slow == {"b"}
    assert instances.levels == pytest.approx({"a": 2**-0.5, "b": 2.0, "c": 2**-0.5})


def test_an_instance_must_be_slow_for_some_time():
    assert judged(watch(), rounds=PATIENCE - 1, a=1.0, b=2.0) == []


def test_slowness_is_relative_to_peers_not_to_the_common_model():
    """A latency model fitted to two instances predicts 1.2 times the faster instance's time."""
    instances = watch()
    judged(instances, a=1 / 1.2, b=2 / 1.2)

    assert instances.levels["b"] == pytest.approx(2.0)
    assert instances.slow == {"b"}


def test_an_instance_as_fast_as_its_peers_is_no_longer_slow():
    instances = watch()
    judged(instances, a=1.0, b=2.0)
    (change,) = judged(instances, a=1.0, b=1.0, at=10.0)

    assert (change.instance_id, change.change) == ("b", AlarmChange.CLEARED)
    assert instances.slow == frozenset()


def test_a_single_instance_is_never_slow():
    instances = watch()

    assert judged(instances, a=1.0) == []
    assert judged(instances, a=9.0) == []
    assert instances.levels == {}


def test_no_instance_is_slow_where_all_are():
    assert judged(watch(), a=3.0, b=3.0, c=3.0) == []


def test_pauses_do_not_make_an_instance_slow():
    instances = watch()
    for number in range(2 * PATIENCE):
        instances.observe(InstanceId("a"), [1.0] * 20)
        instances.observe(InstanceId("b"), [1.0] * 11 + [50.0] * 9)

        assert instances.judge(float(number)) == ()
    assert instances.levels["b"] == pytest.approx(1.0)


def test_a_few_iterations_are_not_enough():
    instances = watch()
    for number in range(PATIENCE + 2):
        instances.observe(InstanceId("a"), [1.0] * ENOUGH)
        if number == 0:
            instances.observe(InstanceId("b"), [9.0] * (ENOUGH - 1))

        assert instances.judge(float(number)) == ()


def test_an_idle_instance_is_not_judged_again():
    instances = watch()
    judged(instances, rounds=1, a=1.0, b=2.0)

    assert judged(instances, rounds=2 * PATIENCE, at=5.0, a=1.0) == []


def test_a_long_idle_instance_is_forgotten_with_its_alarm():
    instances = watch()
    judged(instances, a=1.0, b=2.0)
    (change,) = judged(instances, rounds=1, at=MEMORY_S + PATIENCE, a=1.0)

    assert (change.instance_id, change.change) == ("b", AlarmChange.CLEARED)
    assert (instances.slow, instances.levels) == (frozenset(), {})


def test_without_peers_an_alarm_is_cleared():
    instances = watch()
    judged(instances, a=1.0, b=2.0)
    (change,) = judged(instances, rounds=1, at=MEMORY_S + PATIENCE, b=2.0)

    assert change == Judged(InstanceId("b"), AlarmChange.CLEARED, 1.0)
    assert instances.slow == frozenset()


@pytest.mark.parametrize("multiple", [0.0, -1.0, inf, nan])
def test_impossible_times_do_not_count(multiple: float):
    instances = watch()
    judged(instances, a=1.0, b=multiple)

    assert instances.levels == {}
