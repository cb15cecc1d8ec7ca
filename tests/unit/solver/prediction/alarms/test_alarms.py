"""Alarms with hysteresis."""

from math import inf, nan

import pytest

from solver.prediction.alarms.alarm import Alarm, AlarmChange, AlarmOptions

OPTIONS = AlarmOptions(raise_above=1.5, clear_below=1.2, patience=3)
RAISED, CLEARED = AlarmChange.RAISED, AlarmChange.CLEARED


def changes(*levels: float, options: AlarmOptions = OPTIONS) -> list[AlarmChange | None]:
    alarm = Alarm(options)
    return [alarm.observe(level) for level in levels]


def test_alarm_is_raised_after_consecutive_levels_above():
    assert changes(2, 2, 2, 2) == [None, None, RAISED, None]


def test_a_level_that_is_not_above_restarts_the_count():
    assert changes(2, 2, 1.5, 2, 2, 2) == [None] * 5 + [RAISED]


def test_alarm_is_cleared_after_consecutive_levels_below():
    assert changes(2, 2, 2, 1, 1, 1.2, 1, 1, 1) == [None] * 2 + [RAISED] + [None] * 5 + [CLEARED]


def test_alarm_stays_raised_between_the_thresholds():
    assert changes(2, 2, 2, *[1.3] * 50)[3:] == [None] * 50


@pytest.mark.parametrize("level", [nan, 1.5, 1.2, 1.3])
def test_levels_between_the_thresholds_or_nan_change_nothing(level: float):
    assert changes(*[level] * 9) == [None] * 9
    assert changes(2, 2, 2, *[level] * 9)[3:] == [None] * 9


def test_an_infinite_level_counts_as_above():
    assert changes(inf, inf, inf)[-1] is RAISED


def test_a_cleared_alarm_can_be_raised_again():
    found = changes(*([2] * 3 + [1] * 3) * 2)

    assert [each for each in found if each] == [RAISED, CLEARED] * 2


def test_reset_clears_the_alarm_and_the_count():
    alarm = Alarm(OPTIONS)
    for _ in range(2):
        alarm.observe(2)

    assert alarm.reset() is None
    assert [alarm.observe(2) for _ in range(3)] == [None, None, RAISED]
    assert alarm.reset() is CLEARED
    assert not alarm.raised


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"clear_below": 1.5}, r"clear_below is 1\.5: .*below raise_above, 1\.5"),
        ({"clear_below": nan}, "clear_below is nan"),
    ],
)
def test_invalid_thresholds_are_rejected(values: dict[str, float], message: str):
    with pytest.raises(ValueError, match=message):
        AlarmOptions(**values)  # type: ignore[arg-type]  # test data
