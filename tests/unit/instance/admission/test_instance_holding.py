"""An instance compares holding work back with passing it on, and keeps what serves better."""

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.contracts.qos import Slo
from shared.contracts.telemetry import Capability
from solver.instance.admission.holding import TRIAL_PERIOD_S, TRIAL_S, Holding
from tests.clocks import NOW
from tests.queued import a_request, sampling
from tests.unit.instance.driver import Driver, a_profile

URGENT = Slo(ttft_s=1.0, tbt_s=0.5)
HOUR = Slo(ttlt_s=3000.0)
First = Callable[[bool, int], float]
"""Time to the first token of a request, from whether it is passed on and from its number."""
_STEP_S = 0.1


def served(first_s: First, *, seconds: float, holding: Holding | None = None) -> list[float]:
    """
    Serve ten requests a second with a target of 1 s; return the times at which requests were
    passed on.
    """
    holding = holding or Holding()
    passed = []
    for number in range(round(seconds / _STEP_S)):
        now = NOW + number * _STEP_S
        holding.look(now)
        if holding.passes:
            passed.append(now)
        took_s = first_s(holding.passes, number)
        holding.served(now, took_s, in_time=took_s <= 1.0)
    return passed


def late_each(number: int, every: int) -> float:
    """2 s for one of *every* requests, 0.5 s for the others."""
    return 2.0 if number % every == 0 else 0.5


def test_requests_are_held_while_few_are_late():
    assert served(lambda _passes, number: late_each(number, 30), seconds=1800) == []


def test_the_other_way_is_tried_for_short_times_while_many_are_late():
    passed = served(lambda passes, _number: 5.0 if passes else 2.0, seconds=2 * TRIAL_PERIOD_S)

    assert len(passed) == pytest.approx(2 * TRIAL_S / _STEP_S, abs=2)


def test_holding_that_serves_better_stays_and_is_tried_less_often():
    """After an hour, passing is tried for at most 5 s in 16 minutes."""
    holding = Holding()
    served(lambda passes, n: 5.0 if passes else late_each(n, 8), seconds=3600, holding=holding)
    again = served(
        lambda passes, n: 5.0 if passes else late_each(n, 8),
        seconds=8 * TRIAL_PERIOD_S,
        holding=Holding(doublings=3),
    )

    assert not holding.passes
    assert len(again) <= TRIAL_S / _STEP_S + 1


def test_requests_are_passed_on_where_holding_makes_them_late():
    holding = Holding()
    served(lambda passes, _number: 0.5 if passes else 2.0, seconds=1200, holding=holding)

    assert holding.passes
    assert holding.reason.startswith("since holding did not help: ")


def test_requests_are_passed_on_where_equally_many_are_in_time_and_first_tokens_are_sooner():
    holding = Holding()
    served(
        lambda passes, n: late_each(n, 8) * (0.6 if passes else 1.0), seconds=1200, holding=holding
    )

    assert holding.passes


def test_holding_returns_where_passing_no_longer_serves_better():
    holding = Holding(prefers_passing=True)
    served(lambda passes, _number: 2.0 if passes else 0.5, seconds=1200, holding=holding)

    assert not holding.passes


@settings(max_examples=25, deadline=None)
@given(st.lists(st.booleans(), min_size=50, max_size=50))
def test_chance_alone_keeps_trials_short(late: list[bool]):
    """Equal ways: passing is either preferred, or tried in 5 s of two minutes at most."""
    holding = Holding()
    passed = served(
        lambda _passes, n: 2.0 if late[n * 7 % 50] else 0.5,
        seconds=10 * TRIAL_PERIOD_S,
        holding=holding,
    )

    assert holding.prefers_passing or len(passed) <= 10 * TRIAL_S / _STEP_S + 10


def server(*, passes: bool) -> Driver:
    """A server with eight slots; each prefill takes 0.2 s."""
    driver = Driver(capabilities=frozenset({Capability.CALLS}))
    driver.profile(a_profile(constant_s=0.2))
    driver.instance.holding = Holding(prefers_passing=passes)
    driver.look()
    return driver


@pytest.mark.parametrize(("passes", "running"), [(False, 7), (True, 8)], ids=["holds", "passes"])
def test_work_that_can_wait_takes_all_slots_where_requests_are_passed_on(
    passes: bool,  # noqa: FBT001 - a parameter of the test
    running: int,
):
    driver = server(passes=passes)
    driver.put(a_request("chat", slo=URGENT, sampling=sampling(1000)))
    driver.generate("chat", 5)
    for number in range(9):
        driver.put(a_request(f"b{number}", slo=HOUR))
        if f"b{number}" in driver.running:
            driver.generate(f"b{number}")

    assert len(driver.running) == running


@pytest.mark.parametrize(("passes", "running"), [(False, 5), (True, 6)], ids=["holds", "passes"])
def test_servers_with_much_to_prefill_get_requests_where_they_are_passed_on(
    passes: bool,  # noqa: FBT001 - a parameter of the test
    running: int,
):
    driver = server(passes=passes)
    driver.put(*(a_request(f"r{n}", slo=URGENT) for n in range(6)))
    driver.wait(0.1)

    assert len(driver.running) == running


def test_history_says_that_a_request_was_passed_on_and_why():
    driver = server(passes=True)
    driver.put(a_request("chat", slo=URGENT))
    driver.end("chat")
    (entry,) = driver.departed["chat"].request.history

    assert entry.what == "passed on"
    assert entry.why == driver.instance.holding.reason


def test_first_tokens_and_relegations_are_compared():
    """A request whose first token comes late, one in time, and one that can only be late."""
    driver = server(passes=False)
    driver.put(a_request("late", slo=URGENT, arrived_at=driver.now - 0.5))
    driver.wait(1.0)
    driver.generate("late")
    driver.put(a_request("in time", slo=URGENT, arrived_at=driver.now))
    driver.generate("in time")
    driver.put(a_request("late already", slo=URGENT, arrived_at=driver.now - 5.0))

    arm = driver.instance.holding.arms[False]
    assert (arm.requests, arm.in_time) == (3, 1)
    assert driver.outcome("late already") == "relegated"


def test_requests_from_before_the_remembered_trials_count_nowhere():
    """A producer may state an arrival of long ago."""
    holding = Holding()
    served(lambda _passes, _number: 2.0, seconds=10, holding=holding)
    for number in range(40 * round(TRIAL_PERIOD_S)):
        holding.look(NOW + 10 + number)
    before = sum(arm.requests for arm in holding.arms.values())
    holding.served(NOW - 1e6, 1e6, in_time=False)

    assert sum(arm.requests for arm in holding.arms.values()) == before
