"""Runs whose connection to a server of others breaks, although the server answers."""

import msgspec
import pytest

from shared.contracts.requests import Attempts, ErrorInfo
from solver.instance import commands as do
from solver.instance import events as ev
from solver.instance.end import MAX_BREAKS
from tests.queued import a_request
from tests.unit.instance.driver import Driver

ERROR = ErrorInfo(message="the connection broke", code="server_error", status=502)


def cut_off(driver: Driver, *, num_tokens: int = 0) -> None:
    run = driver.runs.pop(driver.held("r").request.request_id)
    driver.give(
        ev.Ended(run_id=run.run_id, how=ev.RunEnd.CUT_OFF, num_tokens=num_tokens, error=ERROR)
    )


def driver_with(breaks: int) -> Driver:
    attempts = Attempts(breaks=breaks)
    return Driver(msgspec.structs.replace(a_request("r"), attempts=attempts))


@pytest.mark.parametrize("breaks", range(MAX_BREAKS - 1))
def test_a_broken_connection_is_tried_again_and_counted(breaks: int):
    driver = driver_with(breaks)
    cut_off(driver)
    again = driver.requeued("r")
    assert again.attempts.breaks == breaks + 1
    assert again.attempts.crashes == 0


def test_the_third_in_a_row_without_a_token_fails_the_request_with_the_reason():
    driver = driver_with(MAX_BREAKS - 1)
    cut_off(driver)
    failure, copy = driver.departed[a_request("r").request_id].publications
    assert isinstance(failure, do.Failure)
    assert isinstance(copy, do.DeadLetter)
    assert failure.error.status == 502
    assert "the connection broke; 3 tries in a row" in failure.error.message


def test_new_tokens_end_the_row():
    driver = driver_with(MAX_BREAKS - 1)
    cut_off(driver, num_tokens=5)
    assert driver.requeued("r").attempts.breaks == 0


def test_a_cancelled_request_ends_as_cancelled():
    driver = driver_with(MAX_BREAKS - 1)
    driver.waiting = {do.Abort}
    driver.give(ev.Cancelled(request_id=a_request("r").request_id, user="acme"))
    cut_off(driver)
    (failure,) = driver.departed[a_request("r").request_id].publications
    assert failure.error.code == "cancelled"
