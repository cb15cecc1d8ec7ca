"""The search for a rate at which a share of targets is missed."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ops.bench.rate_search import RateSearch


def test_rates_grow_by_steps_until_the_share_is_passed():
    search = RateSearch(first_rps=4.0, step=1.5)
    first = search.next_rps(0.4)
    search.missed[first] = 0.0
    second = search.next_rps(0.4)

    assert (first, second) == (4.0, 6.0)


def test_rates_fall_by_steps_while_too_many_are_missed():
    search = RateSearch(first_rps=4.0, step=2.0, missed={4.0: 0.9})

    assert search.next_rps(0.4) == 2.0


def test_rate_between_two_trials_is_interpolated():
    search = RateSearch(first_rps=4.0, missed={4.0: 0.2, 6.0: 0.6, 9.0: 1.0})

    assert search.next_rps(0.4) == pytest.approx(5.0)
    assert search.next_rps(0.3) == pytest.approx(4.5)


def test_trials_that_contradict_each_other_are_repeated_between_them():
    search = RateSearch(first_rps=4.0, missed={4.0: 0.5, 6.0: 0.3})

    assert search.next_rps(0.4) == 5.0


def test_nearest_rate_is_that_of_the_nearest_share():
    search = RateSearch(first_rps=4.0, missed={4.0: 0.1, 5.0: 0.38, 6.0: 0.6})

    assert search.nearest_rps(0.4) == 5.0


def test_nearest_rate_needs_a_trial():
    with pytest.raises(ValueError, match="empty"):
        RateSearch(first_rps=4.0).nearest_rps(0.4)


@given(
    knee_rps=st.floats(1.0, 50.0),
    slope=st.floats(0.02, 1.0),
    share=st.sampled_from([0.3, 0.4, 0.5]),
)
def test_share_is_found_if_misses_grow_with_the_rate(knee_rps: float, slope: float, share: float):
    search = RateSearch(first_rps=4.0)
    for _ in range(40):
        rate_rps = search.next_rps(share)
        search.missed[rate_rps] = min(1.0, max(0.0, slope * (rate_rps - knee_rps)))
        if abs(search.missed[rate_rps] - share) <= 0.05:
            break

    assert abs(search.missed[search.nearest_rps(share)] - share) <= 0.05
