"""Alarms for arbitrary levels."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from shared.contracts.base import InstanceId
from solver.prediction.alarms.alarm import Alarm, AlarmChange, AlarmOptions
from solver.prediction.alarms.slow_instances import SlowInstances

options = st.builds(
    lambda low, band, patience: AlarmOptions(
        clear_below=low, raise_above=low + band, patience=patience
    ),
    st.floats(0.1, 3),
    st.floats(0.01, 3),
    st.integers(1, 6),
)
levels = st.lists(st.floats(0, 8, allow_nan=False), max_size=80)


@given(options, levels, st.lists(st.floats(0, 1), max_size=40), levels)
def test_levels_between_the_thresholds_change_no_alarm(
    thresholds: AlarmOptions, before: list[float], inside: list[float], after: list[float]
):
    alarm = Alarm(thresholds)
    for level in before:
        alarm.observe(level)
    low, high = thresholds.clear_below, thresholds.raise_above
    changes = [alarm.observe(min(high, low + part * (high - low))) for part in inside]

    assert changes == [None] * len(inside)
    raised = [each for level in after if (each := alarm.observe(level))]
    assert all(one is not other for one, other in pairwise(raised))


@given(options, levels)
def test_an_alarm_changes_only_if_all_latest_levels_are_beyond_the_threshold(
    thresholds: AlarmOptions, seen: list[float]
):
    alarm, raised = Alarm(thresholds), False
    for number, level in enumerate(seen, start=1):
        latest = seen[max(0, number - thresholds.patience) : number]
        enough = len(latest) == thresholds.patience
        raises = enough and not raised and all(each > thresholds.raise_above for each in latest)
        clears = enough and raised and all(each < thresholds.clear_below for each in latest)
        change = alarm.observe(level)

        assert (change is AlarmChange.RAISED, change is AlarmChange.CLEARED) == (raises, clears)
        raised = alarm.raised
    assert alarm.raised == raised


paces = st.lists(st.floats(0.2, 5), min_size=1, max_size=6)


def slow_after(rounds: int, thresholds: AlarmOptions, by_instance: dict[str, float]) -> set[str]:
    instances = SlowInstances(thresholds)
    for number in range(rounds):
        for name, pace in by_instance.items():
            instances.observe(InstanceId(name), [pace] * 16)
        instances.judge(float(number))
    return set(instances.slow)


@given(options, paces, st.floats(0.1, 10), st.randoms(use_true_random=False))
def test_slowness_is_independent_of_order_and_common_factors(
    thresholds: AlarmOptions, by_number: list[float], factor: float, random
):
    names = [f"i{n}" for n in range(len(by_number))]
    pairs = list(zip(names, by_number, strict=True))
    shuffled = list(pairs)
    random.shuffle(shuffled)
    # The ratios are not exactly at a threshold, where rounding decides.
    ratios = [one / other for one in by_number for other in by_number]
    near = [r for r in ratios if abs(r / thresholds.raise_above - 1) < 1e-6]
    first = slow_after(thresholds.patience, thresholds, dict(pairs))
    scaled = {name: factor * pace for name, pace in shuffled}

    assert near or slow_after(thresholds.patience, thresholds, scaled) == first


@given(st.floats(0.2, 5), st.floats(1, 3), st.integers(1, 5))
def test_an_instance_slower_than_its_peers_by_the_threshold_is_found(
    pace: float, factor: float, others: int
):
    thresholds = AlarmOptions(raise_above=1.5, clear_below=1.2, patience=2)
    by_instance = {f"i{n}": pace for n in range(others)} | {"slow": factor * pace}
    expected = {"slow"} if factor > 1.5 * (1 + 1e-9) else set()

    assert abs(factor - 1.5) < 1e-6 or slow_after(2, thresholds, by_instance) == expected
