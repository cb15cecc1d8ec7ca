"""An instance keeps a swapped-out request until it resumes or is evicted; none is lost."""

from collections.abc import Callable

import pytest

from shared.contracts.control import EvictRequest, LsoActivate, LsoOutcome, LsoSwapIn, LsoSwapOut
from solver.instance import commands as do
from solver.instance import events as ev
from solver.instance.end import RETURNED_AT_CRASH
from solver.planning.lso.operations import SwapIn
from solver.scheduling.pull_room import PullBounds
from tests.queued import BEST_EFFORT, OTHER, a_request
from tests.unit.instance.driver import OURS, Driver, R, a_profile

DONE, ALREADY = LsoOutcome.DONE, LsoOutcome.ALREADY
REFUSED = LsoOutcome.REFUSED
SWAP_IN = LsoSwapIn(instance_id=OURS, request_id=R)
LEASE_S = 30.0


def swap_out(rest_s: float = 9.0) -> LsoSwapOut:
    return LsoSwapOut(instance_id=OURS, request_id=R, rest_s=rest_s)


def begun() -> Driver:
    """An instance that runs a request, which has two tokens."""
    driver = Driver(a_request("r"), swap_lease_s=LEASE_S, bounds=PullBounds(window=1))
    driver.generate("r", 2)
    return driver


def rested(rest_s: float = 9.0) -> Driver:
    """The same instance after it has swapped the request out."""
    driver = begun()
    assert driver.order(swap_out(rest_s)).outcome is DONE
    return driver


def test_swapped_out_request_stays_unacknowledged_and_resumes():
    """Late outputs of the first run must not reach the second, which has another id."""
    driver = begun()
    first = driver.runs[R]
    result = driver.order(swap_out())
    assert (result.outcome, result.num_bytes) == (DONE, 6 * 16)
    assert (driver.running, driver.window, driver.departed) == (set(), set(), {})
    assert driver.status.swapped_out == 1

    assert driver.order(SWAP_IN).outcome is DONE
    assert (driver.runs[R].number, driver.status.swapped_out) == (first.number, 0)
    assert driver.runs[R].run_id != first.run_id
    driver.end("r")
    assert (driver.outcome("r"), len(driver.departed[R].tags)) == ("completed", 1)


def test_rested_request_resumes_when_there_is_room():
    driver = rested(5.0)
    driver.wait(4.9)
    assert driver.running == set()

    driver.wait(0.1)
    assert driver.running == {"r"}
    assert [each.outcome for each in driver.records(SwapIn)] == [DONE]


def test_rest_ends_although_another_event_comes_just_before_its_wake():
    """The due timer must not be replaced; with a full window, no poll comes instead."""
    driver = rested(5.0)
    driver.plan()
    driver.put(a_request("other"))
    driver.now += 5.0
    driver.look()
    driver.wait(0.0)
    assert driver.running == {"r", "other"}


def test_request_is_evicted_when_its_lease_ends():
    driver = rested(LEASE_S)
    driver.wait(LEASE_S)
    attempts = driver.requeued("r").attempts
    assert (driver.outcome("r"), attempts.hop, attempts.evictions) == ("evicted", 1, 1)
    assert driver.status.waiting == 0


@pytest.mark.parametrize(
    ("leave", "outcome"),
    [
        (lambda driver: driver.ask(LsoActivate(instance_id=OURS, model=OTHER)), "evicted"),
        (lambda driver: driver.give(ev.Draining()), "evicted"),
        (lambda driver: driver.give(ev.Draining(drain_s=0.0)), "evicted"),
        (lambda driver: driver.ask(EvictRequest(instance_id=OURS, request_id=R)), "evicted"),
        (lambda driver: driver.give(ev.Cancelled(request_id=R, user="acme")), "failed: cancelled"),
    ],
    ids=["swap", "drain", "end", "eviction", "cancel"],
)
def test_swapped_out_request_leaves_while_it_rests(leave: Callable[[Driver], None], outcome: str):
    driver = rested()
    leave(driver)
    assert driver.outcome("r") == outcome
    assert (driver.status.waiting, driver.status.swapped_out) == (0, 0)


@pytest.mark.parametrize("crashes", [False, True], ids=["cancelled", "crashed"])
def test_swap_out_that_is_interrupted_keeps_nothing(*, crashes: bool):
    driver = begun()
    driver.waiting = {do.Abort}
    driver.ask(swap_out())
    driver.die() if crashes else driver.give(ev.Cancelled(request_id=R, user="acme"))
    driver.release(do.Abort)
    assert driver.answers[0].outcome is (LsoOutcome.FAILED if crashes else ALREADY)
    assert driver.outcome("r") == (RETURNED_AT_CRASH if crashes else "failed: cancelled")


def test_second_copy_of_a_swapped_out_request_is_served_with_it():
    """After a lost connection, the broker redelivers the message of a swapped-out request."""
    driver = rested()
    driver.put(a_request("r"))
    assert (driver.running, driver.window) == (set(), set())

    driver.order(SWAP_IN)
    driver.end("r")
    assert len(driver.departed[R].tags) == 2


def test_repeated_operation_changes_nothing():
    driver = begun()
    results = [driver.order(each).outcome for each in (SWAP_IN, swap_out(), swap_out())]
    assert results == [ALREADY, DONE, ALREADY]


def test_rest_beyond_the_lease_and_swap_in_without_room_are_refused():
    """The lease would end, and evict the request, before it could resume."""
    driver = begun()
    result = driver.order(swap_out(LEASE_S + 1))
    assert (result.outcome, driver.running) == (REFUSED, {"r"})
    assert "cannot rest for 31 s: its lease ends after 30 s" in result.message

    driver.order(swap_out())
    driver.look(max_running=1)
    driver.put(a_request("another"))
    result = driver.order(SWAP_IN)
    assert (result.outcome, driver.status.swapped_out) == (REFUSED, 1)
    assert "1 of 1 requests run" in result.message


@pytest.mark.parametrize(
    ("transfer_bytes_per_s", "num_swapped"), [(1e12, 1), (1.0, 0)], ids=["fast", "slow"]
)
def test_best_effort_is_displaced_in_the_cheaper_way(transfer_bytes_per_s: float, num_swapped: int):
    driver = Driver(engine={"max_running": 1}, transfer_bytes_per_s=transfer_bytes_per_s)
    driver.profile(a_profile(linear_s=1e-3))
    driver.put(a_request("dump", slo=BEST_EFFORT))
    driver.generate("dump")
    driver.put(a_request("urgent"))
    assert (driver.running, driver.status.swapped_out) == ({"urgent"}, num_swapped)

    driver.end("urgent")
    assert driver.running == ({"dump"} if num_swapped else set())
