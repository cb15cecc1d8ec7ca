"""Admission at servers that compute work in the order of its arrival, or by one number."""

from typing import Any

import msgspec
import pytest

from shared.contracts.lanes import inbox_name
from shared.contracts.qos import Importance, Slo
from shared.contracts.requests import ApiCall, Progress
from shared.contracts.telemetry import Capability
from solver.instance import commands as do
from solver.instance.admission.urgent import Urgent
from solver.planning.lanes import lane_for
from tests.queued import BATCH, BEST_EFFORT, LAYOUT, MODEL, a_request, sampling
from tests.unit.instance.driver import OURS, Driver, a_profile, segment

URGENT = Slo(ttft_s=1.0, tbt_s=0.5)
HOUR = Slo(ttlt_s=3000.0)


def server(**fields: Any) -> Driver:
    """A server with eight slots; each prefill takes 0.2 s."""
    driver = Driver(capabilities=frozenset({Capability.CALLS}), **fields)
    driver.profile(a_profile(constant_s=0.2))
    return driver


def answering(driver: Driver, *names: str) -> None:
    """Serve chats, whose first tokens have come."""
    for name in names:
        driver.put(a_request(name, slo=URGENT, sampling=sampling(1000)))
        driver.generate(name, 5)


def test_urgent_requests_begin_at_once_while_the_server_has_slots():
    driver = server()
    driver.put(*(a_request(f"r{n}", slo=URGENT) for n in range(3)))
    driver.wait(0.1)

    assert driver.running == {"r0", "r1", "r2"}


def test_requests_stay_in_their_lanes_while_the_server_has_much_to_prefill():
    """Four prefills of 0.2 s are four fifths of the target of 1 s."""
    driver = server()
    driver.put(*(a_request(f"r{n}", slo=URGENT) for n in range(6)))
    driver.wait(0.1)
    assert len(driver.running) == 5

    driver.generate("r0")
    assert len(driver.running) == 6


def test_server_whose_iterations_exceed_the_pace_gets_less_prefill():
    driver = server(engine={"longest_gap_s": 0.6})
    answering(driver, "chat")
    driver.put(*(a_request(f"r{n}", slo=URGENT) for n in range(6)))
    driver.wait(0.1)

    assert len(driver.running) == 3


def test_requests_for_one_instance_alone_are_pulled_although_its_server_has_much_to_prefill():
    driver = server()
    driver.profile(a_profile(constant_s=0.9))
    driver.put(a_request("long", slo=URGENT))
    driver.put(a_request("lane", slo=URGENT))
    driver.put(a_request("own", slo=URGENT), queue=inbox_name(OURS))
    driver.wait(0.05)

    assert (driver.running, driver.window) == ({"long"}, {"own"})


@pytest.mark.parametrize(("chats", "batches"), [(0, 8), (1, 6), (4, 3), (5, 1)], ids=str)
def test_work_that_can_wait_leaves_slots_for_urgent_arrivals(chats: int, batches: int):
    """Half the square root of the number of urgent runs, rounded up."""
    driver = server()
    answering(driver, *(f"c{n}" for n in range(chats)))
    for number in range(9):
        driver.put(a_request(f"b{number}", slo=HOUR))
        if f"b{number}" in driver.running:
            driver.generate(f"b{number}")

    assert len(driver.running) == chats + batches


def test_full_server_gets_nothing_more():
    driver = server(engine={"max_running": 2})
    answering(driver, "c0", "c1")
    driver.put(a_request("urgent", slo=URGENT), a_request("batch", slo=HOUR))
    driver.wait(0.1)

    assert (driver.running, driver.window) == ({"c0", "c1"}, set())


def test_full_server_is_tried_with_work_that_can_wait():
    driver = server(engine={"max_running": 2, "spare_running": 1})
    answering(driver, "c0", "c1")
    driver.put(a_request("urgent", slo=URGENT))
    driver.put(a_request("batch", slo=HOUR))

    assert driver.running == {"c0", "c1", "batch"}


def test_work_that_can_wait_begins_after_the_prefills_before_it():
    driver = server()
    answering(driver, "chat")
    driver.put(a_request("urgent", slo=URGENT))
    driver.put(a_request("batch", slo=HOUR))
    assert driver.running == {"chat", "urgent"}

    driver.generate("urgent")
    assert driver.running == {"chat", "urgent", "batch"}


def test_work_that_can_wait_becomes_urgent_before_its_deadline():
    driver = server()
    answering(driver, "chat")
    driver.put(a_request("long", slo=URGENT, prompt_tokens=4))
    driver.put(a_request("batch", slo=Slo(ttlt_s=20.0)))
    driver.wait(9.0)
    driver.look()
    assert driver.running == {"chat", "long"}

    driver.wait(1.5)
    driver.look()
    assert driver.running == {"chat", "long", "batch"}


def test_late_request_that_waits_in_a_server_stays_there():
    """The server may have begun it, and would compute it again."""
    driver = server()
    driver.put(a_request("late", slo=URGENT))
    driver.wait(5.0)
    driver.look(waiting=1)

    assert driver.of(do.Abort) == []


def test_no_run_is_evicted_from_a_server_that_cannot_continue_it():
    driver = server(engine={"max_running": 1})
    driver.put(a_request("free", slo=BEST_EFFORT))
    driver.put(a_request("urgent", slo=URGENT))
    driver.wait(1.0)

    assert driver.of(do.Abort) == []


def test_unimportant_request_waits_after_a_server_had_much_to_prefill():
    driver = server(engine={"longest_gap_s": 0.6})
    driver.profile(a_profile(constant_s=0.4))
    driver.put(a_request("long", slo=URGENT))
    low = lane_for(
        model=MODEL, importance=Importance.LOW, time_left_s=50.0, work_tokens=32, layout=LAYOUT
    )
    driver.put(
        a_request("low", slo=Slo(ttlt_s=50.0), importance=Importance.LOW), queue=low.queue_name
    )
    driver.put(a_request("high", slo=Slo(ttlt_s=90.0)))
    driver.wait(0.1)
    assert driver.running == {"long"}

    driver.generate("long")
    assert driver.running == {"long", "high"}


LONG = 100
"""Tokens of a prompt whose prefill takes 1 s at `server_with_long_prefills`."""


def server_with_long_prefills() -> Driver:
    """A server that does not order prefills; a chat answers on it, and its next token is due."""
    driver = Driver(capabilities=frozenset({Capability.RESUME}), aging_bound_s=60.0)
    driver.profile(a_profile(constant_s=0.0, linear_s=0.01))
    driver.put(a_request("chat", slo=Slo(ttft_s=0.5, tbt_s=0.1), sampling=sampling(1000)))
    driver.generate("chat")
    return driver


@pytest.mark.parametrize(
    ("long", "short"),
    [({"slo": BATCH}, {}), ({"relegated": True}, {}), ({}, {"relegated": True})],
    ids=["batch", "relegated", "best effort"],
)
def test_long_prefill_waits_until_interactive_answers_are_ahead_of_their_deadlines(
    long: dict[str, Any], short: dict[str, Any]
):
    driver = server_with_long_prefills()
    driver.put(a_request("long", prompt_tokens=LONG, **({"slo": BEST_EFFORT} | long)))
    driver.put(a_request("short", **({"slo": BEST_EFFORT} | short)))
    driver.wait(0.2)
    assert driver.running == {"chat", "short"}  # a short prefill delays the answer by 0.04 s

    driver.generate("short")
    driver.generate("chat", 9)  # the next token is due in 1.4 s
    assert driver.running == {"chat", "short", "long"}


def test_interactive_request_begins_even_if_its_prefill_delays_answers():
    driver = server_with_long_prefills()
    driver.put(a_request("urgent", prompt_tokens=LONG))
    assert driver.running == {"chat", "urgent"}


def server_with_two_answers() -> Driver:
    """A server with long prefills and two chats, whose next tokens are due within 0.5 s."""
    driver = server_with_long_prefills()
    driver.put(a_request("second", slo=Slo(ttft_s=0.5, tbt_s=0.1), sampling=sampling(1000)))
    driver.generate("second")
    return driver


def test_interactive_request_waits_while_its_prefill_makes_two_answers_late():
    driver = server_with_two_answers()
    driver.put(a_request("urgent", prompt_tokens=LONG, slo=Slo(ttft_s=9.0, tbt_s=0.1)))
    assert driver.running == {"chat", "second"}

    driver.generate("second", 9)  # one answer is ahead of its deadline by more than the prefill
    driver.wait(0.1)
    assert driver.running == {"chat", "second", "urgent"}


def test_interactive_request_that_waits_for_answers_too_long_is_relegated():
    driver = server_with_two_answers()
    driver.put(a_request("urgent", prompt_tokens=LONG, slo=Slo(ttft_s=1.2, tbt_s=0.1)))
    for number in range(2, 9):
        driver.wait(0.1)
        driver.generate("chat", number)
        driver.generate("second", number)
    assert driver.status.totals.relegated == 1
    assert driver.running == {"chat", "second"}


def test_answer_that_is_late_already_makes_no_prefill_wait():
    driver = server_with_long_prefills()
    driver.wait(5.0)
    driver.put(a_request("long", prompt_tokens=LONG, slo=BEST_EFFORT))
    assert driver.running == {"chat", "long"}


WHOLE = ApiCall(endpoint="/v1/chat/completions", body=msgspec.Raw(b"{}"))


def test_prompts_of_answers_that_come_as_a_whole_count_for_their_predicted_time_only():
    driver = server()
    driver.put(*(a_request(f"w{n}", slo=URGENT, call=WHOLE) for n in range(6)))
    driver.wait(0.1)
    assert len(driver.running) == 5

    driver.wait(1.2)
    driver.look()
    driver.put(a_request("next", slo=URGENT, arrived_at=driver.now))
    assert "next" in driver.running


def test_answers_that_come_as_a_whole_teach_no_time_of_prefills():
    driver = server()
    for number in range(30):
        driver.put(a_request(f"w{number}", slo=URGENT, call=WHOLE, arrived_at=driver.now))
        driver.wait(20.0)
        driver.generate(f"w{number}")
        driver.end(f"w{number}")

    assert driver.instance.room.prefill_pace.ratio == 1.0


def test_work_that_takes_longer_than_usual_is_urgent_earlier():
    """The usual stay is 2 s; its 10 tokens take 10 s at this server."""
    driver = server()
    driver.profile(a_profile(constant_s=1.0))
    driver.instance.urgent.ended(2.0)
    answering(driver, "chat")
    driver.put(a_request("slow", slo=Slo(ttlt_s=18.0), prompt_tokens=4, sampling=sampling(10)))
    driver.put(a_request("urgent", slo=URGENT, arrived_at=driver.now))

    assert "slow" in driver.running


def test_interactive_request_begins_although_work_that_can_wait_precedes_it():
    driver = server()
    driver.instance.urgent.ended(4.0)
    answering(driver, *(f"c{n}" for n in range(7)))
    driver.put(a_request("can wait", slo=Slo(ttlt_s=8.0)), queue=inbox_name(OURS))
    driver.put(a_request("urgent", slo=Slo(ttft_s=9.0)), queue=inbox_name(OURS))

    assert driver.window == {"can wait"}
    assert "urgent" in driver.running


def test_resumed_answer_does_not_change_the_usual_target():
    driver = server()
    answering(driver, "chat")
    progress = Progress(token_ids=(1,) * 600, first_token_at=driver.now - 299.0)
    resumed = a_request("old", slo=URGENT, arrived_at=driver.now - 300.0, progress=progress)
    driver.put(resumed, queue=inbox_name(OURS))

    assert "old" in driver.running
    assert driver.instance.urgent.target_s(driver.now) == 1.0


def test_clock_that_is_set_back_changes_no_mean():
    urgent = Urgent()
    for now in (1000.0, 1030.0):
        urgent.mean_running(now, 1)

    assert 0.0 < urgent.mean_running(430.0, 0) < 1.0


def test_server_with_one_slot_serves_work_that_can_wait():
    driver = server(engine={"max_running": 1})
    answering(driver, "chat")
    driver.end("chat")
    driver.put(a_request("batch", slo=HOUR))

    assert driver.running == {"batch"}


def test_best_effort_begins_at_a_server_that_always_has_urgent_work_once_it_is_old():
    driver = server(engine={"max_running": 2})
    answering(driver, "chat")
    free = a_request("free", slo=BEST_EFFORT)
    driver.put(free)
    for number in range(59):
        driver.put(a_request(f"r{number}", slo=URGENT, arrived_at=driver.now))
        driver.end(f"r{number}")
        driver.wait(10.0)
        driver.plan(segment(free.lane))
        assert driver.running == {"chat"}

    driver.wait(11.0)
    driver.plan(segment(free.lane))
    assert driver.running == {"chat", "free"}


def test_all_slots_serve_work_that_can_wait_once_urgent_traffic_has_ended():
    """Ten times the usual pause between urgent requests has passed."""
    driver = server(engine={"max_running": 4})
    for number in range(60):
        driver.put(a_request(f"r{number}", slo=URGENT, arrived_at=driver.now))
        driver.generate(f"r{number}", 5)
        driver.end(f"r{number}")
        driver.wait(0.2)
    for number in range(6):
        driver.put(a_request(f"batch{number}", slo=Slo(ttlt_s=600.0)))
    driver.look()
    assert len(driver.running) < 4

    driver.wait(6.0)
    driver.look()
    for name in tuple(driver.running):
        driver.generate(name, 5)
    driver.look()
    assert len(driver.running) == 4
