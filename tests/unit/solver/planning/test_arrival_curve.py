"""Cumulative arrivals: exact about numbers, bounded in size, right about times."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from solver.planning.arrival_curve import MAX_POINTS, ArrivalCurve, enqueued_at, merged


def curve_of(times: list[float]) -> ArrivalCurve:
    curve = ArrivalCurve()
    for at in times:
        curve.add(at)
    return curve


def test_few_arrivals_are_kept_as_they_came():
    assert curve_of([1.0, 2.0, 2.0, 5.0]).points() == ((1.0, 1), (2.0, 3), (5.0, 4))


def test_a_clock_that_steps_back_counts_at_the_last_time():
    assert curve_of([5.0, 4.0]).points() == ((5.0, 2),)


@given(st.lists(st.floats(0, 1e6), max_size=400).map(sorted))
def test_the_curve_stays_small_and_counts_all(times: list[float]):
    curve = curve_of(times)
    points = curve.points()

    assert curve.total == len(times)
    assert len(points) <= MAX_POINTS
    assert list(points) == sorted(set(points))
    for at, total in points:
        assert total == sum(each <= at for each in times)


def test_the_newest_arrivals_are_known_exactly_however_many_there_were():
    curve = curve_of([float(number) for number in range(10_000)])

    for rank in range(1, MAX_POINTS // 2):
        assert enqueued_at(curve.points(), rank) == 10_000 - rank


def test_old_arrivals_are_taken_to_have_come_evenly():
    curve = curve_of([float(number) for number in range(10_000)])

    for rank in (100, 1000, 5000, 9999):
        assert enqueued_at(curve.points(), rank) == pytest.approx(10_000 - rank, abs=1)


def test_ranks_beyond_the_first_request_came_with_it():
    assert enqueued_at(((3.0, 2), (4.0, 5)), 99) == 3.0


def test_curves_of_several_groupers_add_up():
    one, other = curve_of([0.0, 10.0]).points(), curve_of([5.0]).points()

    assert merged([one, other, ()]) == [(0.0, 1.0), (5.0, 2.5), (10.0, 3.0)]
    assert merged([]) == []
