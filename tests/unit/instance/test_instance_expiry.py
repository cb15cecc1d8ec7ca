"""A request ends at its end, wherever the instance holds it; one without an end is unaffected."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.contracts.control import EvictRequest, LsoSwapOut
from shared.contracts.qos import OnLate, Slo
from shared.contracts.requests import ErrorInfo, HistoryEntry, Progress
from solver.instance import commands as do
from solver.instance import events as ev
from tests.clocks import NOW
from tests.queued import BATCH, CHAT, a_request
from tests.unit.instance.driver import OURS, Driver, R

EXPIRED = "failed: deadline_expired"


def error_of(driver: Driver, request_id: str = "r") -> ErrorInfo:
    """The error of a request that has left."""
    (failure,) = driver.departed[R].publications
    assert isinstance(failure, do.Failure)
    assert driver.outcome(request_id) == EXPIRED
    return failure.error


def places(driver: Driver) -> dict[str, int]:
    return dict(driver.instance.totals.expired)


def test_request_is_not_run_if_it_is_pulled_after_its_end():
    driver = Driver()
    driver.put(a_request("r", expires_at=NOW - 1.0, grouped_at=NOW - 5.0))
    driver.wait(10.0)

    error = error_of(driver)
    assert (error.code, error.status, error.type) == ("deadline_expired", 504, "timeout_error")
    assert "it waited 5.000 s in queues until instance i1 pulled it" in error.message
    assert driver.of(do.Submit) == []
    assert places(driver) == {"pull": 1}


def test_request_ends_in_the_window():
    driver = Driver(
        a_request("first"), a_request("r", expires_at=NOW + 3.0), engine={"max_running": 1}
    )
    driver.wait(2.9)
    assert driver.window == {"r"}

    driver.wait(0.2)
    assert (
        "it waited 3.000 s on instance i1, with 0 of at most 24 tokens" in error_of(driver).message
    )
    assert (driver.running, driver.window, places(driver)) == ({"first"}, set(), {"window": 1})


def test_run_is_aborted_at_its_end():
    driver = Driver(a_request("r", expires_at=NOW + 3.0))
    driver.generate("r", 5)
    driver.wait(3.0)

    assert "it ran on instance i1, with 5 of at most 24 tokens" in error_of(driver).message
    assert driver.departed[R].run_id is not None
    assert (driver.running, places(driver)) == (set(), {"run": 1})
    assert driver.times(do.Abort) == [3.0]


def test_request_without_an_end_is_served_late():
    driver = Driver(a_request("r", slo=Slo(ttft_s=1.0)))
    driver.wait(100.0)
    driver.generate("r", 5)
    driver.end("r")

    assert driver.outcome("r") == "completed"


@pytest.mark.parametrize(
    ("slo", "begun", "end_s"), [(CHAT, False, 5.0), (BATCH, False, 100.0), (BATCH, True, 100.0)]
)
def test_late_run_is_dropped(slo: Slo, begun: object, end_s: float):
    driver = Driver(a_request("r", slo=slo, on_late=OnLate.DROP))
    if begun:
        driver.generate("r")
    driver.wait(end_s - 0.1)
    assert driver.running == {"r"}

    driver.wait(0.2)
    assert error_of(driver).param in ("slo.ttft_s", "slo.ttlt_s")


def test_first_token_that_comes_during_the_abort_is_too_late():
    driver = Driver(a_request("r", slo=CHAT, on_late=OnLate.DROP))
    driver.waiting.add(do.Abort)
    driver.wait(5.1)
    driver.generate("r", 1)
    driver.release(do.Abort)

    error = error_of(driver)
    assert error.param == "slo.ttft_s"
    assert "first-token deadline, 5.000 s after its arrival" in error.message


def test_interactive_run_that_has_begun_is_served_to_its_end():
    driver = Driver(a_request("r", slo=CHAT, on_late=OnLate.DROP, expires_at=NOW + 50.0))
    driver.generate("r", 2)
    driver.wait(49.9)
    assert driver.running == {"r"}

    driver.wait(0.2)
    assert error_of(driver).param == "expires_at"


def test_tokens_of_earlier_runs_are_a_begin():
    progress = Progress(token_ids=(1, 2), first_token_at=NOW)
    driver = Driver(a_request("r", slo=CHAT, on_late=OnLate.DROP, progress=progress))
    driver.wait(20.0)

    assert driver.running == {"r"}


def test_swapped_out_request_ends_in_its_rest():
    driver = Driver(a_request("r", expires_at=NOW + 3.0))
    driver.generate("r", 2)
    driver.order(LsoSwapOut(instance_id=OURS, request_id=R, rest_s=9.0))
    driver.wait(3.1)

    error = error_of(driver)
    assert "with 2 of at most 24 tokens" in error.message
    history: tuple[HistoryEntry, ...] = driver.departed[R].request.history
    assert [entry.what for entry in history] == ["swapped out"]


def test_run_that_is_evicted_at_its_end_is_not_requeued():
    """The engine may end the run after the end of the request."""
    driver = Driver(a_request("r", expires_at=NOW + 3.0))
    driver.generate("r", 2)
    driver.waiting.add(do.Abort)
    driver.ask(EvictRequest(instance_id=OURS, request_id=R))
    driver.wait(4.0)
    assert driver.departed == {}

    driver.release(do.Abort)
    assert error_of(driver).param == "expires_at"


def test_request_ends_if_the_engine_dies_after_its_end():
    driver = Driver(a_request("r", expires_at=NOW + 3.0))
    driver.waiting.add(do.Abort)
    driver.wait(3.5)
    driver.die()

    assert driver.outcome("r") == EXPIRED


def test_answer_that_is_complete_at_the_end_is_delivered():
    driver = Driver(a_request("r", expires_at=NOW + 3.0))
    driver.generate("r", 2)
    driver.waiting.add(do.Abort)
    driver.wait(3.0)
    driver.end("r")

    assert driver.outcome("r") == "completed"


def test_cancelled_request_is_cancelled_and_not_expired():
    driver = Driver()
    driver.give(ev.Cancelled(request_id=R, user="acme"))
    driver.put(a_request("r", expires_at=NOW - 1.0))
    driver.wait(10.0)

    assert driver.outcome("r") == "failed: cancelled"


def test_newer_copy_brings_its_own_end():
    driver = Driver(a_request("first"), engine={"max_running": 1})
    request = a_request("r", expires_at=NOW + 3.0)
    driver.put(request)
    again = msgspec.structs.replace(request.attempts, hop=1)
    driver.put(msgspec.structs.replace(request, attempts=again, expires_at=NOW + 5.0))
    driver.wait(4.0)
    assert driver.window == {"r"}

    driver.wait(1.5)
    assert driver.outcome("r") == EXPIRED


ENDS = st.lists(st.none() | st.floats(-2.0, 20.0), min_size=1, max_size=8)


@given(ENDS, st.integers(1, 3), st.lists(st.floats(0.1, 6.0), max_size=8))
def test_no_request_runs_after_its_end_and_none_without_an_end_is_dropped(
    ends: list[float | None], max_running: int, waits: list[float]
):
    driver = Driver(engine={"max_running": max_running})
    for number, end_s in enumerate(ends):
        at = None if end_s is None else NOW + end_s
        driver.put(a_request(f"r{number}", expires_at=at))
    for wait_s in waits:
        driver.wait(wait_s)
        for name in sorted(driver.running)[:1]:
            driver.end(name)
    driver.wait(30.0)

    for number, end_s in enumerate(ends):
        departed = driver.departed.get(f"r{number}")
        if end_s is None:
            assert departed is None or departed.how == "completed"
        elif departed is not None and departed.how == EXPIRED:
            assert driver.now >= NOW + end_s
        else:
            assert departed is not None or f"r{number}" not in driver.running
    begins = [(each.request.expires_at, at) for each, at in _submitted(driver)]
    assert all(end is None or NOW + at < end for end, at in begins)


def _submitted(driver: Driver) -> list[tuple[do.Submit, float]]:
    return list(zip(driver.of(do.Submit), driver.times(do.Submit), strict=True))
