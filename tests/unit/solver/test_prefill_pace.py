"""Measured times of prefills, as multiples of predicted ones."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from solver.prediction.latency.prefill_pace import PrefillPace

times = st.floats(0.0, 100.0)


def pace_of(*prefills: tuple[float, float]) -> PrefillPace:
    pace = PrefillPace()
    for predicted_s, measured_s in prefills:
        pace.add(predicted_s=predicted_s, measured_s=measured_s)
    return pace


@pytest.mark.parametrize(
    ("prefills", "ratio"),
    [
        ([], 1.0),
        ([(0.5, 5.0)], 1.0),  # too little to judge by
        ([(1.0, 1.5)], 1.5),
        ([(1.0, 0.5)], 1.0),
        ([(1.0, 9.0)], 4.0),
        ([(2.0, 2.0), (2.0, 6.0)], (0.95 * 2.0 + 6.0) / (0.95 * 2.0 + 2.0)),
    ],
    ids=["none", "little", "slower", "faster", "much slower", "the last counts most"],
)
def test_ratio_is_that_of_recent_sums(prefills: list[tuple[float, float]], ratio: float) -> None:
    assert pace_of(*prefills).ratio == pytest.approx(ratio)


def test_ratio_follows_a_change() -> None:
    assert pace_of(*[(1.0, 3.0)] * 50, *[(1.0, 1.0)] * 100).ratio < 1.02


@given(st.lists(st.tuples(times, times)))
def test_ratio_has_bounds(prefills: list[tuple[float, float]]) -> None:
    assert 1.0 <= pace_of(*prefills).ratio <= 4.0
