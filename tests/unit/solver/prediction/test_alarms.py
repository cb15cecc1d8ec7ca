"""Alarms with hysteresis."""

from math import inf, nan

import pytest

from solver.prediction.alarms import Alarm, AlarmChange, AlarmOptions

OPTIONS = AlarmOptions(raise_above=1.5, clear_below=1.2, patience=3)
RAISED, CLEARED = AlarmChange.RAISED, AlarmChange.CLEARED


def changes(*levels: float, options: AlarmOptions = OPTIONS) -> list[AlarmChange | None]:
    alarm = Alarm(options)
    return [alarm.observe(level) for level in levels]


def test_it_is_raised_by_so_many_levels_in_a_row():
    assert changes(2, 2, 2, 2) == [None, None, RAISED, None]


def test_one_level_that_is_not_above_begins_the_count_anew():
    assert changes(2, 2, 1.5, 2, 2, 2) == [None] * 5 + [RAISED]


def test_it_is_cleared_by_so_many_levels_below_the_other_threshold():
    assert changes(2, 2, 2, 1, 1, 1.2, 1, 1, 1) == [None] * 2 + [RAISED] + [None] * 5 + [CLEARED]


def test_inside_the_band_it_stays_raised():
    assert changes(2, 2, 2, *[1.3] * 50)[3:] == [None] * 50


@pytest.mark.parametrize("level", [nan, 1.5, 1.2, 1.3])
def test_such_a_level_changes_nothing(level: float):
    assert changes(*[level] * 9) == [None] * 9
    assert changes(2, 2, 2, *[level] * 9)[3:] == [None] * 9


def test_no_level_is_too_high():
    assert changes(inf, inf, inf)[-1] is RAISED


def test_it_is_raised_again_after_it_was_cleared():
    found = changes(*([2] * 3 + [1] * 3) * 2)

    assert [each for each in found if each] == [RAISED, CLEARED] * 2


def test_a_reset_clears_it_and_forgets_the_count():
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
        ({"patience": 0}, "patience is 0: it has to be at least 1"),
    ],
)
def test_thresholds_that_make_no_sense_are_refused(values: dict[str, float], message: str):
    with pytest.raises(ValueError, match=message):
        AlarmOptions(**values)  # type: ignore[arg-type]  # test data
