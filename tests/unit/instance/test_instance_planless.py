"""Instances without a plan: which models they activate, and when."""

from collections.abc import Callable
from itertools import pairwise

import pytest

from shared.contracts.control import LsoActivate
from solver.instance import commands as do
from solver.instance import events as ev
from solver.instance.planless import LEAST_WAIT_S, WAIT_SPREAD_S
from tests.queued import MODEL, OTHER, a_request, lane_of
from tests.unit.instance.driver import OURS, Driver

PATIENCE_S = 10.0
MOST_WAIT_S = LEAST_WAIT_S + WAIT_SPREAD_S
LANE, OTHERS = lane_of().queue_name, lane_of(model=OTHER).queue_name


def with_work(*, plan: bool = False) -> Driver:
    """An instance without own work, beside work of another model."""
    driver = Driver(patience_s=PATIENCE_S)
    if plan:
        driver.plan(MODEL)
    driver.put(a_request("waits", base=OTHER))
    return driver


def test_instance_without_a_model_follows_notices_at_once():
    driver = Driver(a_request(base=OTHER), model=None)
    assert (driver.status.model, driver.status.totals.swaps) == (OTHER, 0)


@pytest.mark.parametrize("plan", [False, True], ids=["no plan", "stale plan"])
def test_work_of_another_model_is_served_after_the_patience(*, plan: bool):
    driver = with_work(plan=plan)
    driver.wait(PATIENCE_S + MOST_WAIT_S + 1.0)
    (loaded_at,) = driver.times(do.Load)[1:]
    assert PATIENCE_S + LEAST_WAIT_S <= loaded_at <= PATIENCE_S + MOST_WAIT_S + 0.5
    assert driver.status.model == OTHER
    assert [each.model for each in driver.of(do.Unclaim)] == [OTHER]


@pytest.mark.parametrize("ends", [False, True])
def test_patience_begins_after_the_last_work(*, ends: bool):
    driver = with_work()
    driver.wait(PATIENCE_S - 0.1)
    driver.put(a_request("r", arrived_at=driver.now))
    if ends:
        driver.end("r")
    driver.wait(PATIENCE_S - 0.1)
    assert driver.of(do.Count) == []

    driver.wait(MOST_WAIT_S + 1.0)
    assert driver.loads == ([OTHER] if ends else [])


def test_plan_does_not_age_while_the_process_is_stalled():
    """The repeated plan came after its stall, so it is not younger than now."""
    driver = with_work(plan=True)
    driver.wait(1.0)
    for missed_s, age_s in ((14.0, 1.0), (3.0, 0.0)):
        driver.now += missed_s
        if age_s == 0.0:
            driver.plan(MODEL, epoch=1)
        driver.give(ev.Stalled(missed_s=missed_s))
        driver.wait(PATIENCE_S - age_s - 0.1)
        assert driver.of(do.Count) == []
    driver.wait(MOST_WAIT_S + 1.0)
    assert driver.loads == [OTHER]


@pytest.mark.parametrize("away_s", [0.0, 30.0])
def test_patience_begins_again_with_a_new_connection(away_s: float):
    """The leader may have lost its connection also."""
    driver = with_work(plan=True)
    driver.wait(PATIENCE_S - 0.5)
    driver.connect(is_connected=False)
    driver.wait(away_s)
    driver.connect(is_connected=True)
    driver.wait(PATIENCE_S - 0.5)
    assert driver.loads == []

    driver.wait(MOST_WAIT_S + 1.5)
    assert driver.loads == [OTHER]


def test_swap_is_followed_by_the_full_patience():
    """Work of two models waits throughout the test, and cannot be pulled."""
    driver = Driver()
    driver.absent = {LANE, OTHERS}
    driver.put(a_request(), a_request(base=OTHER))
    for second in range(40):
        driver.notice((LANE, OTHERS)[second % 2])
        driver.wait(1.0)
    swapped_at = driver.times(do.Load)[1:]
    assert 2 <= len(swapped_at) <= 4
    assert all(after - before >= PATIENCE_S for before, after in pairwise(swapped_at))


def test_count_that_finds_nothing_restarts_the_wait():
    """Another instance serves the work; a wrong count of a slow broker only delays a swap."""
    driver = with_work()
    driver.wait(PATIENCE_S + LEAST_WAIT_S - 0.1)
    waiting = driver.queues.pop(OTHERS)
    driver.wait(MOST_WAIT_S)
    driver.queues[OTHERS] = waiting
    driver.wait(LEAST_WAIT_S)
    assert driver.of(do.Claim) == []

    driver.wait(MOST_WAIT_S)
    assert driver.loads == [OTHER]


def test_instance_without_the_claim_looks_again_later():
    driver = with_work()
    driver.granted = False
    driver.wait(PATIENCE_S + 3 * MOST_WAIT_S)
    first, second, *_ = driver.times(do.Claim)
    assert second - first >= LEAST_WAIT_S
    assert (driver.loads, driver.of(do.Unclaim)) == ([], [])

    driver.granted = True
    driver.wait(MOST_WAIT_S + 1.0)
    assert driver.loads == [OTHER]


@pytest.mark.parametrize(
    "arrive",
    [lambda driver: driver.plan(MODEL), lambda driver: driver.put(a_request("r"))],
    ids=["plan", "work"],
)
def test_claim_is_given_back_if_a_plan_or_work_arrives_first(arrive: Callable[[Driver], None]):
    driver = with_work()
    driver.waiting = {do.Claim}
    driver.wait(PATIENCE_S + MOST_WAIT_S + 1.0)
    arrive(driver)
    driver.release(do.Claim)
    assert [each.model for each in driver.of(do.Unclaim)] == [OTHER]
    assert driver.loads == []


@pytest.mark.parametrize(
    "prepare",
    [
        lambda driver: driver.order(LsoActivate(instance_id=OURS, model=MODEL)),
        lambda driver: driver.waiting.add(do.Load),
        lambda driver: driver.give(ev.Draining()),
    ],
    ids=["ordered", "activating", "draining"],
)
def test_instance_that_may_not_adopt_a_model_sleeps(prepare: Callable[[Driver], object]):
    """The driver refuses endless wakes."""
    driver = with_work()
    prepare(driver)
    driver.wait(2 * PATIENCE_S)
    counted = len(driver.of(do.Count))
    driver.wait(60.0)
    assert len(driver.of(do.Count)) == counted
