"""Delays between attempts of a delivery."""

from itertools import count

from hypothesis import given
from hypothesis import strategies as st

from solver.storage.retries import FIRST_S, LONGEST_S, MAX_JITTER, retry_delay_s

DAY_S = 86400.0


@given(
    attempts=st.integers(1, 10_000),
    asked_s=st.none() | st.floats(0.0, DAY_S),
    chance=st.floats(0.0, 1.0),
)
def test_a_delay_is_at_least_what_the_receiver_asks_for_and_bounded(
    attempts: int, asked_s: float | None, chance: float
):
    delay_s = retry_delay_s(
        attempts, age_s=0.0, give_up_after_s=1e9, retry_after_s=asked_s, chance=chance
    )

    assert delay_s is not None
    assert max(FIRST_S, asked_s or 0.0) <= delay_s
    assert delay_s <= max(LONGEST_S, asked_s or 0.0) * (1 + MAX_JITTER)


def test_attempts_end_after_three_days_and_come_less_and_less_often():
    age_s, delays = 0.0, []
    for attempts in count(1):
        delay_s = retry_delay_s(attempts, age_s=age_s, give_up_after_s=3 * DAY_S)
        if delay_s is None:
            break
        delays.append(delay_s)
        age_s += delay_s

    assert delays[:4] == [5.0, 20.0, 80.0, 320.0]
    assert delays == sorted(delays)
    assert 2.7 * DAY_S < age_s <= 3 * DAY_S


def test_a_receiver_that_asks_for_more_than_is_left_gets_no_attempt():
    assert retry_delay_s(1, age_s=10.0, give_up_after_s=100.0, retry_after_s=91.0) is None
