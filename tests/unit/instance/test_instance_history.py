"""The history of a request says when each of its instances pulled it and ran it."""

from shared.contracts.control import EvictRequest, LsoSwapIn, LsoSwapOut
from shared.contracts.requests import HistoryEntry
from solver.instance import commands as do
from tests.clocks import NOW
from tests.queued import OTHER, a_request
from tests.unit.instance.driver import OURS, Driver, R


def history(driver: Driver, request_id: str = "r") -> tuple[HistoryEntry, ...]:
    return driver.held(request_id).request.history


def test_an_eviction_has_the_times_of_its_pull_and_its_run():
    driver = Driver(a_request("r"))
    driver.wait(2.0)
    driver.order(EvictRequest(instance_id=OURS, request_id=R))
    (entry,) = driver.departed[R].request.history

    assert (entry.what, entry.pulled_at, entry.begun_at) == ("evicted", NOW, NOW)
    assert entry.at == NOW + 2.0


def test_a_request_that_waits_in_the_window_has_no_run():
    driver = Driver(a_request("first"), a_request("r"), engine={"max_running": 1})
    driver.plan(OTHER)
    (entry,) = driver.departed[R].request.history

    assert (entry.what, entry.pulled_at, entry.begun_at) == ("handed back", NOW, None)


def test_a_swapped_out_request_keeps_the_time_of_its_pull():
    driver = Driver(a_request("r"))
    driver.wait(1.0)
    driver.order(LsoSwapOut(instance_id=OURS, request_id=R, rest_s=9.0))
    driver.wait(2.0)
    driver.order(LsoSwapIn(instance_id=OURS, request_id=R))
    out, back = history(driver)

    assert (out.what, out.at, out.pulled_at, out.begun_at) == ("swapped out", NOW + 1.0, NOW, NOW)
    assert (back.what, back.at, back.pulled_at) == ("resumed", NOW + 3.0, NOW)


def test_a_request_that_waited_for_the_activation_of_its_model_says_so():
    """A request that came after the activation has no such step."""
    driver = Driver(model=None)
    driver.waiting.add(do.Load)
    driver.plan(OTHER)
    driver.wait(4.0)
    driver.queues[a_request(base=OTHER).lane].append(a_request("r", base=OTHER))
    driver.release(do.Load)
    driver.put(a_request("later", base=OTHER, arrived_at=driver.now))
    (entry,) = history(driver)

    assert (entry.what, entry.begun_at, entry.at) == ("activated", NOW, NOW + 4.0)
    assert history(driver, "later") == ()
