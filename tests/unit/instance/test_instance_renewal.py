"""A request that is held for long is published again, and never lost, doubled or run again."""

from collections import Counter
from itertools import pairwise
from typing import Any

from shared.contracts.control import LsoOutcome, LsoSwapOut
from solver.instance import commands as do
from solver.instance import events as ev
from solver.instance.renewal.renewals import FIRST_SHARE, LAST_SHARE, MOST_AT_ONCE, RETRY_SHARE
from solver.instance.request import Phase
from solver.scheduling.pull_room import PullBounds
from tests.queued import a_request
from tests.unit.instance.driver import OURS, Driver, R

TIMEOUT_S = 1000.0
LATEST_S = LAST_SHARE * TIMEOUT_S
ONE, MANY = PullBounds(window=1), PullBounds(window=2000, max_backlog_s=1e9)
LARGE = {"max_running": 2000, "kv_capacity_tokens": 1 << 30}


def held(*names: str, **settings: Any) -> Driver:
    """An instance that has pulled requests, which generate one token each."""
    requests = [a_request(name) for name in names or ("r",)]
    driver = Driver(*requests, consumer_timeout_s=TIMEOUT_S, **settings)
    for name in driver.running:
        driver.generate(name)
    return driver


def test_request_is_held_by_the_delivery_of_its_copy_while_its_run_continues():
    driver = held()
    (first,) = driver.held("r").tags
    before = driver.held("r").request
    driver.wait(LATEST_S)

    (renewal,) = driver.of(do.Renew)
    (second,) = driver.held("r").tags
    assert (renewal.request.attempts, renewal.request.history) == (before.attempts, ())
    assert [each.tags for each in driver.of(do.Discard)] == [(first,)]
    assert (second.queue, driver.running) == (driver.instance.inbox, {"r"})
    driver.end("r")
    assert (driver.outcome("r"), driver.departed[R].tags) == ("completed", (second,))


def test_each_renewal_is_followed_by_another_in_time():
    driver = held()
    driver.wait(5 * TIMEOUT_S)
    times = [0.0, *driver.times(do.Renew)]
    gaps = [later - earlier for earlier, later in pairwise(times)]
    assert all(FIRST_SHARE * TIMEOUT_S <= gap <= LATEST_S for gap in gaps)
    assert len(gaps) >= 10


def test_delivery_is_kept_until_the_copy_has_come():
    driver = held()
    driver.waiting = {do.Renew, do.Get}
    driver.wait(LATEST_S)
    assert len(driver.of(do.Renew)) == 1
    driver.release(do.Renew)
    assert driver.of(do.Discard) == []
    driver.release(do.Get)
    assert len(driver.of(do.Discard)) == 1


def test_copies_are_pulled_without_room_for_other_requests():
    driver = held("r", "s", bounds=ONE, engine={"max_running": 1})
    assert driver.window == {"s"}
    driver.wait(LATEST_S)
    inbox = driver.instance.inbox
    assert [tag.queue for name in ("r", "s") for tag in driver.held(name).tags] == [inbox] * 2
    assert (driver.running, driver.window) == ({"r"}, {"s"})


def test_requests_that_were_pulled_together_are_renewed_one_after_the_other():
    names = [f"r{number}" for number in range(1000)]
    driver = held(*names, bounds=MANY, engine=LARGE)
    driver.wait(LATEST_S)
    per_second = Counter(int(at) for at in driver.times(do.Renew))
    assert sum(per_second.values()) == len(names)
    assert max(per_second.values()) <= 2 * len(names) / (LATEST_S - FIRST_SHARE * TIMEOUT_S)


def test_few_copies_are_published_at_a_time():
    names = [f"r{number}" for number in range(50)]
    driver = held(*names, bounds=MANY, engine=LARGE)
    driver.waiting = {do.Renew}
    driver.wait(LATEST_S)
    assert len(driver.of(do.Renew)) == MOST_AT_ONCE
    driver.release(do.Renew)
    assert {each.request.request_id for each in driver.of(do.Renew)} == set(names)


def test_failed_renewal_is_repeated():
    driver = held()
    driver.connected = False
    driver.wait(LATEST_S)
    failed = len(driver.of(do.Renew))
    assert failed >= 1
    driver.connected = True
    driver.wait(2 * RETRY_SHARE * TIMEOUT_S)
    assert len(driver.of(do.Renew)) == failed + 1
    assert driver.held("r").tags[0].queue == driver.instance.inbox


def test_copy_that_a_leader_has_taken_from_the_inbox_is_published_again():
    driver = held()
    driver.waiting = {do.Get}
    driver.wait(LATEST_S)
    driver.queues[driver.instance.inbox].clear()
    driver.release(do.Get)
    assert driver.of(do.Discard) == []
    driver.wait(2 * RETRY_SHARE * TIMEOUT_S)
    assert len(driver.of(do.Renew)) == 2
    assert driver.held("r").tags[0].queue == driver.instance.inbox


def test_copy_that_comes_after_the_outcome_is_acknowledged_and_not_run():
    driver = held()
    driver.waiting = {do.Get}
    driver.wait(LATEST_S)
    driver.end("r")
    assert driver.outcome("r") == "completed"
    driver.release(do.Get)
    (discarded,) = driver.of(do.Discard)
    assert discarded.tags[0].queue == driver.instance.inbox
    assert driver.instance.requests.is_empty


def test_second_copy_of_a_repeated_publish_is_acknowledged_too():
    driver = held()
    driver.wait(LATEST_S)
    (renewal,) = driver.of(do.Renew)
    driver.end("r")
    driver.queues[driver.instance.inbox].append(renewal)
    driver.wait(10.0)
    assert len(driver.of(do.Submit)) == 1
    assert not driver.queues[driver.instance.inbox]


def test_request_whose_delivery_is_void_is_renewed_after_its_redelivery():
    """The broker has the message again: a copy would double the request."""
    driver = held()
    request = driver.held("r").request
    driver.connect(is_connected=False)
    driver.connect(is_connected=True)
    driver.wait(2 * TIMEOUT_S)
    assert driver.of(do.Renew) == []
    driver.put(request)
    assert len(driver.held("r").tags) == 1
    driver.wait(LATEST_S)
    assert len(driver.of(do.Renew)) == 1


def test_drained_instance_leaves_no_copy_in_its_inbox():
    driver = held()
    driver.waiting = {do.Get}
    driver.wait(LATEST_S)
    driver.give(ev.Draining(drain_s=1.0))
    driver.end("r")
    assert driver.of(do.Drained) == []
    driver.release(do.Get)
    driver.wait(1.0)
    assert len(driver.of(do.Drained)) == 1
    assert not driver.queues[driver.instance.inbox]


def test_swapped_out_request_is_renewed():
    driver = held(swap_lease_s=2 * TIMEOUT_S)
    order = LsoSwapOut(instance_id=OURS, request_id=R, rest_s=TIMEOUT_S)
    assert driver.order(order).outcome is LsoOutcome.DONE
    driver.wait(LATEST_S)
    assert [tag.queue for tag in driver.held("r").tags] == [driver.instance.inbox]
    assert driver.held("r").phase is Phase.RESTING
