"""Admission: which request runs next, and which running requests are displaced."""

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from shared.contracts.control import EvictRequest
from shared.contracts.qos import Slo
from shared.contracts.requests import ApiCall, Progress
from solver.instance import commands as do
from solver.instance.events import Draining
from solver.instance.request import SUSPECT_CRASHES
from tests.clocks import NOW
from tests.queued import (
    BATCH,
    BEST_EFFORT,
    CHAT,
    OTHER,
    a_request,
    lane_of,
    sampling,
)
from tests.unit.instance.driver import OURS, Driver, R, segment

RESUME = lane_of().resume_name
NIGHT = Slo(ttlt_s=24 * 3600.0)
PACED = Slo(ttft_s=1.0, tbt_s=0.1)
INPUTS = ApiCall(endpoint="/v1/embeddings", body=msgspec.Raw(b"{}"), pools=True)


def test_window_head_runs_first_up_to_the_engines_slots():
    driver = Driver(engine={"max_running": 1})
    driver.put(a_request("first"), a_request("later", slo=BATCH), a_request("sooner"))
    assert driver.running == {"first"}

    driver.end("first")
    assert driver.running == {"sooner"}


@pytest.mark.parametrize(("capacity", "running"), [(120, {"r0", "r1"}), (10, {"r0"})])
def test_kv_memory_limits_requests_at_their_full_length(capacity: int, running: set[str]):
    """Each has 4 + 46 tokens; one that exceeds the engine runs alone, and the engine refuses it."""
    driver = Driver(engine={"kv_capacity_tokens": capacity})
    driver.put(*(a_request(f"r{number}", sampling=sampling(46)) for number in range(3)))
    assert driver.running == running


def test_engine_that_reports_no_kv_capacity_is_limited_by_its_slots():
    """Servers of others report it only in vLLM's metrics."""
    driver = Driver(engine={"kv_capacity_tokens": 0, "max_running": 3})
    driver.put(*(a_request(f"r{number}") for number in range(4)))
    assert driver.running == {"r0", "r1", "r2"}


@pytest.mark.parametrize("age_s", [0.0, 1200.0], ids=["new", "aged"])
def test_best_effort_leaves_slots_for_urgent_arrivals(age_s: float):
    """Beside a regular request, best-effort requests get three quarters of eight slots."""
    driver = Driver()
    work = (a_request(f"f{n}", slo=BEST_EFFORT, arrived_at=NOW - age_s) for n in range(8))
    driver.put(a_request("regular"), *work)
    assert len(driver.running) == 1 + 6

    driver.put(a_request("urgent"))
    assert "urgent" in driver.running


def test_work_with_a_far_deadline_leaves_slots_and_has_no_targets_on_the_engine():
    driver = Driver()
    lines = (a_request(f"l{n}", slo=NIGHT) for n in range(8))
    driver.put(a_request("regular"), *lines)

    assert len(driver.running) == 1 + 6
    targets = {each.request.request_id: each.slo for each in driver.of(do.Submit)}
    assert (targets["l0"], targets["regular"]) == (Slo(), CHAT)


def test_work_whose_deadline_came_near_keeps_its_targets():
    driver = Driver()
    driver.put(a_request("line", slo=NIGHT, arrived_at=NOW - 23.5 * 3600.0))
    assert [each.slo for each in driver.of(do.Submit)] == [NIGHT]


def test_best_effort_fills_an_engine_without_regular_requests():
    driver = Driver(*(a_request(f"f{n}", slo=BEST_EFFORT) for n in range(10)))
    assert len(driver.running) == 8


def test_relegated_work_counts_as_best_effort():
    """Four of eight slots; relegated requests precede best-effort ones."""
    driver = Driver(best_effort_running_share=0.5, engine={"max_running": 1})
    relegated = [a_request(f"r{n}", relegated=True) for n in range(3)]
    best_effort = [a_request(f"f{n}", slo=BEST_EFFORT) for n in range(3)]
    driver.put(a_request("regular"), *best_effort, *relegated)

    driver.look(max_running=8)
    assert driver.running == {"regular", "r0", "r1", "r2", "f0"}


def test_best_effort_yields_to_work_with_a_reachable_slo():
    """The run with the least computed tokens is evicted."""
    driver = Driver(engine={"kv_capacity_tokens": 100})
    for name, num_tokens in (("f0", 3), ("f1", 1), ("f2", 2)):
        driver.put(a_request(name, slo=BEST_EFFORT))
        driver.generate(name, num_tokens)

    driver.put(a_request("urgent"))
    assert driver.running == {"f0", "f2", "urgent"}
    assert driver.outcome("f1") == "evicted"
    assert driver.requeued("f1").queue == lane_of(BEST_EFFORT).resume_name


@pytest.mark.parametrize(
    ("first", "second"), [(BATCH, CHAT), (BEST_EFFORT, BEST_EFFORT)], ids=["regular", "both yield"]
)
def test_run_does_not_yield_to_other_work(first: Slo, second: Slo):
    """A reachable SLO protects a run; best-effort work displaces nothing."""
    driver = Driver(engine={"kv_capacity_tokens": 30})
    driver.put(a_request("first", slo=first), a_request("second", slo=second))
    assert (driver.running, driver.window) == ({"first"}, {"second"})
    assert driver.of(do.Abort) == []


def test_requests_of_a_later_group_yield_to_a_new_head():
    """A request yields although its SLO is reachable, since the plan serves its group later."""
    driver = Driver(a_request("later", slo=BATCH), engine={"max_running": 1})
    driver.put(a_request("head"))
    assert (driver.running, driver.window) == ({"later"}, {"head"})

    driver.plan(segment(lane_of().queue_name), segment(lane_of(BATCH).queue_name))
    assert driver.running == {"head"}
    assert driver.requeued("later").queue == lane_of(BATCH).resume_name


def test_run_that_the_window_would_put_before_the_head_stays():
    """The plan serves its group later, but it would begin again in the room that it leaves."""
    driver = Driver(a_request("urgent"), engine={"max_running": 1})
    driver.put(a_request("head", slo=BATCH))
    assert (driver.running, driver.window) == ({"urgent"}, {"head"})

    driver.plan(segment(lane_of(BATCH).queue_name), segment(lane_of().queue_name))
    driver.wait(5.0)
    assert (driver.running, driver.of(do.Abort)) == ({"urgent"}, [])
    driver.end("urgent")
    assert driver.running == {"head"}


def test_old_best_effort_run_is_not_displaced():
    driver = Driver(a_request("old", slo=BEST_EFFORT), engine={"max_running": 1}, aging_bound_s=9.0)
    driver.wait(10.0)
    driver.put(a_request("urgent", slo=BATCH))
    assert (driver.running, driver.of(do.Abort)) == ({"old"}, [])


def test_suspected_request_waits_until_it_can_run_alone():
    """A request that ran in one crash is not suspected yet."""
    driver = Driver(a_request("r"), a_request("one", crashes=SUSPECT_CRASHES - 1))
    driver.put(a_request("s", crashes=SUSPECT_CRASHES), a_request("then"))
    assert driver.running == {"r", "one"}
    driver.end("r")
    assert driver.running == {"one"}
    driver.end("one")
    assert driver.running == {"s"}
    driver.end("s")
    assert driver.running == {"then"}


@pytest.mark.parametrize(
    "stop",
    [lambda driver: driver.plan(OTHER), lambda driver: driver.give(Draining()), Driver.die],
    ids=["swap", "drain", "death"],
)
def test_no_request_starts_while_the_instance_stops_serving(stop: Callable[[Driver], None]):
    """The window is handed back after the pulls in progress; meanwhile the engine has room."""
    driver = Driver(a_request("runs"), a_request("waits"), engine={"max_running": 1})
    driver.waiting = {do.Get}
    driver.put(a_request("coming"))

    stop(driver)
    if driver.running:
        driver.end("runs")
    assert (driver.running, driver.window) == (set(), {"waits"})
    driver.release(do.Get)
    assert driver.outcome("waits") == driver.outcome("coming") == "handed back"


def test_request_that_returns_before_its_departure_is_settled_runs_again():
    driver = Driver(a_request("r"), evict_hold_s=0.0)
    first = driver.runs[R].run_id
    driver.waiting = {do.Depart}
    driver.ask(EvictRequest(instance_id=OURS, request_id=R))

    driver.put(a_request("r", hop=1), queue=RESUME)
    driver.release(do.Depart)
    assert driver.runs[R].run_id != first
    assert driver.instance.requests.leaving == ()


def test_late_requests_leave_an_engine_in_which_requests_wait():
    """They would keep their slots; a running prefill stays, as its tokens would be lost."""
    driver = Driver(a_request("begun"), a_request("prefilling"), a_request("waits"))
    driver.generate("begun")
    driver.wait(60.0)
    driver.look(waiting=1)
    assert driver.running == {"begun", "prefilling"}
    assert driver.requeued("waits").queue == RESUME

    driver.look(waiting=0)
    driver.notice(RESUME)
    driver.wait(3.0)
    assert driver.running == {"begun", "prefilling"}
    assert driver.outcome("waits") == "relegated"


@pytest.mark.parametrize(
    ("slo", "waited_s", "expected"),
    [
        (PACED, 1.0, Slo(ttft_s=3.0, tbt_s=0.1)),
        (PACED, 60.0, Slo(ttft_s=61.0, tbt_s=0.1)),
        (Slo(ttlt_s=30.0), 20.0, Slo(ttlt_s=30.0)),
    ],
    ids=["next token", "urgent and not late", "completion"],
)
def test_resumed_run_has_the_deadline_of_its_next_token(slo: Slo, waited_s: float, expected: Slo):
    """Eq. 2: the 21st token is due after 1 s and 20 gaps of 0.1 s."""
    driver = Driver()
    driver.wait(waited_s)
    progress = Progress(token_ids=(7,) * 20, first_token_at=NOW + 0.5)
    driver.put(a_request("r", slo=slo, progress=progress))
    assert driver.runs[R].slo == expected


@pytest.mark.parametrize(
    ("fields", "slo", "checkpointed"),
    [
        ({}, CHAT, False),
        ({"relegated": True}, Slo(), True),
        ({"slo": BATCH}, BATCH, True),
        ({"slo": BEST_EFFORT}, Slo(), True),
        ({"slo": BEST_EFFORT, "prompt": None, "call": INPUTS}, Slo(), False),
    ],
    ids=["interactive", "relegated", "batch", "best effort", "inputs"],
)
def test_run_that_may_be_displaced_is_checkpointed(
    fields: dict[str, Any], slo: Slo, *, checkpointed: bool
):
    """A relegated run has no targets, so that it precedes no request that can be in time."""
    driver = Driver(a_request("r", **fields))
    assert (driver.runs[R].slo, driver.runs[R].checkpointed) == (slo, checkpointed)
