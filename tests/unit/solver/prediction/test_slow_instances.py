"""Instances that are slower than their peers."""

from math import inf, nan

import pytest

from shared.contracts.base import InstanceId
from solver.prediction.alarms import AlarmChange, AlarmOptions
from solver.prediction.slow_instances import MEMORY_S, Judged, SlowInstances

PATIENCE = 3
ENOUGH = 16
"""Iterations from which an instance has a pace."""


def watch() -> SlowInstances:
    return SlowInstances(AlarmOptions(raise_above=1.5, clear_below=1.2, patience=PATIENCE))


def judged(
    instances: SlowInstances, *, rounds: int = PATIENCE, at: float = 0.0, **multiples: float
) -> list[Judged]:
    """By rounds in which each instance took so many times as long as predicted."""
    changes: list[Judged] = []
    for number in range(rounds):
        for name, multiple in multiples.items():
            instances.observe(InstanceId(name), [multiple] * 128)
        changes += instances.judge(at + number)
    return changes


def test_an_instance_that_takes_twice_as_long_as_the_others_is_slow():
    instances = watch()
    (change,) = judged(instances, a=1.0, b=2.0, c=1.0)

    assert change == Judged(InstanceId("b"), AlarmChange.RAISED, pytest.approx(2.0))
    assert instances.slow == {"b"}
    assert instances.levels == pytest.approx({"a": 2**-0.5, "b": 2.0, "c": 2**-0.5})


def test_not_before_it_has_been_for_some_time():
    assert judged(watch(), rounds=PATIENCE - 1, a=1.0, b=2.0) == []


def test_against_its_peers_and_not_against_what_is_learnt_of_all():
    """The model of an instance and one twice as slow says 1.2 times the former's time."""
    instances = watch()
    judged(instances, a=1 / 1.2, b=2 / 1.2)

    assert instances.levels["b"] == pytest.approx(2.0)
    assert instances.slow == {"b"}


def test_it_is_no_longer_slow_once_it_is_as_fast_as_they_are():
    instances = watch()
    judged(instances, a=1.0, b=2.0)
    (change,) = judged(instances, a=1.0, b=1.0, at=10.0)

    assert (change.instance_id, change.change) == ("b", AlarmChange.CLEARED)
    assert instances.slow == frozenset()


def test_an_instance_alone_is_never_slow():
    instances = watch()

    assert judged(instances, a=1.0) == []
    assert judged(instances, a=9.0) == []
    assert instances.levels == {}


def test_where_all_are_slow_none_is():
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


def test_what_computes_nothing_is_not_judged_again():
    instances = watch()
    judged(instances, rounds=1, a=1.0, b=2.0)

    assert judged(instances, rounds=2 * PATIENCE, at=5.0, a=1.0) == []


def test_what_has_long_computed_nothing_is_forgotten_and_its_alarm_with_it():
    instances = watch()
    judged(instances, a=1.0, b=2.0)
    (change,) = judged(instances, rounds=1, at=MEMORY_S + PATIENCE, a=1.0)

    assert (change.instance_id, change.change) == ("b", AlarmChange.CLEARED)
    assert (instances.slow, instances.levels) == (frozenset(), {})


def test_without_peers_an_alarm_ends():
    instances = watch()
    judged(instances, a=1.0, b=2.0)
    (change,) = judged(instances, rounds=1, at=MEMORY_S + PATIENCE, b=2.0)

    assert change == Judged(InstanceId("b"), AlarmChange.CLEARED, 1.0)
    assert instances.slow == frozenset()


@pytest.mark.parametrize("multiple", [0.0, -1.0, inf, nan])
def test_times_that_cannot_be_do_not_count(multiple: float):
    instances = watch()
    judged(instances, a=1.0, b=multiple)

    assert instances.levels == {}
