"""Cumulative arrivals: exact totals, bounded size, accurate times."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from solver.planning.problem.arrival_curve import (
    MAX_POINTS,
    ArrivalCurve,
    RecentArrivals,
    enqueued_at,
    merged,
)


def curve_of(times: list[float]) -> ArrivalCurve:
    curve = ArrivalCurve()
    for at in times:
        curve.add(at)
    return curve


def test_few_arrivals_are_stored_exactly():
    assert curve_of([1.0, 2.0, 2.0, 5.0]).points() == ((1.0, 1), (2.0, 3), (5.0, 4))


def test_a_clock_that_steps_back_counts_at_the_last_time():
    assert curve_of([5.0, 4.0]).points() == ((5.0, 2),)


@given(st.lists(st.floats(0, 1e6), max_size=400).map(sorted))
def test_the_curve_stays_small_and_counts_every_arrival(times: list[float]):
    curve = curve_of(times)
    points = curve.points()

    assert curve.total == len(times)
    assert len(points) <= MAX_POINTS
    assert list(points) == sorted(set(points))
    for at, total in points:
        assert total == sum(each <= at for each in times)


def test_the_newest_arrivals_are_exact_for_any_total():
    curve = curve_of([float(number) for number in range(10_000)])

    for rank in range(1, MAX_POINTS // 2):
        assert enqueued_at(curve.points(), rank) == 10_000 - rank


def test_old_arrivals_are_assumed_to_be_evenly_spaced():
    curve = curve_of([float(number) for number in range(10_000)])

    for rank in (100, 1000, 5000, 9999):
        assert enqueued_at(curve.points(), rank) == pytest.approx(10_000 - rank, abs=1)


def test_ranks_beyond_the_first_request_have_its_arrival_time():
    assert enqueued_at(((3.0, 2), (4.0, 5)), 99) == 3.0


def test_curves_of_several_groupers_add_up():
    one, other = curve_of([0.0, 10.0]).points(), curve_of([5.0]).points()

    assert merged([one, other, ()]) == [(0.0, 1.0), (5.0, 2.5), (10.0, 3.0)]
    assert merged([]) == []


class TestRecentArrivals:
    @staticmethod
    def of(*times: float) -> RecentArrivals:
        recent = RecentArrivals()
        for at in times:
            recent.add(at)
        return recent

    def test_a_pause_before_a_burst_hides_no_request_of_the_burst(self):
        burst = self.of(0.0, *(50.0 + 0.001 * n for n in range(500)))

        assert burst.after(49.0)[0] == (50.0, 500)
        assert burst.after(51.0) == []
        assert burst.total == 501

    def test_each_mark_gives_the_arrivals_since_then(self):
        assert self.of(1.0, 2.0, 2.05, 3.0).after(1.5) == [(2.0, 3), (3.0, 1)]

    def test_a_burst_that_began_before_the_time_is_counted(self):
        """No mark after the queried time contains the burst."""
        burst = self.of(0.0, *(0.006 + 0.0001 * n for n in range(500)))

        assert burst.after(0.005) == [(0.005, 500)]
        assert self.of(0.0).after(0.005) == []

    def test_an_empty_counter_has_no_arrivals(self):
        assert RecentArrivals().after(0.0) == []

    def test_arrivals_before_the_oldest_mark_are_not_counted(self):
        recent = self.of(*(float(second) for second in range(1000)))

        assert 15 <= recent.after(-1.0)[0][1] <= 150
        assert recent.after(989.0)[0] == (990.0, 10)

    @given(
        st.lists(st.floats(0, 14), max_size=300).map(sorted),
        st.floats(0, 14),
    )
    def test_all_later_arrivals_and_few_earlier_ones_are_counted(
        self, times: list[float], at: float
    ):
        came = sum(time > at for time in times)
        just_before = sum(at - 0.11 <= time <= at for time in times)

        first = next((number for _, number in self.of(*times).after(at)), 0)
        assert came <= first <= came + max(0, just_before - 1)
