"""The common trend of recent requests' times."""

import pytest

from solver.prediction.calibration.pace import Pace


def pace_after(*scores: float) -> float | None:
    pace = Pace()
    for score in scores:
        pace.observe(score)
    return pace.value


def test_the_pace_is_its_start_value_until_there_are_enough_iterations():
    pace = Pace()
    for _ in range(15):
        pace.observe(3.0)

    assert pace.value is None
    pace.start_at(1.0)
    assert pace.value == 1.0
    pace.observe(3.0)
    assert pace.value == 3.0


def test_few_outliers_do_not_change_the_pace():
    assert pace_after(*[0.1] * 100, *[9.0] * 28) == 0.1


@pytest.mark.parametrize(("since", "expected"), [(63, 0.0), (65, 1.0)])
def test_the_pace_changes_with_half_of_the_latest_scores(since: int, expected: float):
    assert pace_after(*[0.0] * 500, *[1.0] * since) == expected
