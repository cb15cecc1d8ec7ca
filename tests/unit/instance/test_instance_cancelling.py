"""No tenant cancels or stops a request of another one."""

from shared.contracts.base import RequestId, RunId, TenantId
from solver.instance import events as ev
from tests.queued import a_request
from tests.unit.instance.driver import Driver

R = RequestId("r")


def test_a_request_without_a_reply_queue_is_cancelled_by_its_tenant():
    driver = Driver(a_request("r", tenant=TenantId("acme")))
    driver.give(ev.Cancelled(request_id=R, user="acme"))

    assert driver.departed[R].how == "failed: cancelled"


def test_a_request_without_a_reply_queue_is_not_cancelled_by_others():
    driver = Driver(a_request("r", tenant=TenantId("acme")))
    driver.give(
        ev.Cancelled(request_id=R, user="other"),
        ev.Cancelled(request_id=R),
        ev.Cancelled(request_id=R, reply_to="a.queue", user="other"),
    )

    assert R in driver.runs


def test_a_request_with_a_reply_queue_is_cancelled_only_with_the_queues_name():
    driver = Driver(a_request("r", tenant=TenantId("acme"), reply_to="secret"))
    driver.give(
        ev.Cancelled(request_id=R, user="acme"), ev.Cancelled(request_id=R, reply_to="guess")
    )
    assert R in driver.runs
    driver.give(ev.Cancelled(request_id=R, reply_to="secret"))

    assert driver.departed[R].how == "failed: cancelled"


def test_a_cancellation_by_others_does_not_wait_for_a_request():
    driver = Driver()
    driver.give(ev.Cancelled(request_id=R, user="other"), ev.Cancelled(request_id=R))
    driver.put(a_request("r", tenant=TenantId("acme")))

    assert R in driver.runs


def test_ids_of_runs_cannot_be_guessed_from_others():
    driver = Driver(a_request("r"), a_request("s"), run_secret="secret")
    first, second = (driver.runs[RequestId(name)].run_id for name in "rs")
    other = Driver(a_request("r"), a_request("s"), run_secret="another")

    assert not first.startswith("inc-")
    assert first != second
    assert {first, second}.isdisjoint(run.run_id for run in other.runs.values())
    driver.give(ev.RunStopped(request_id=R, run_id=RunId("inc-1")))
    assert R in driver.runs
