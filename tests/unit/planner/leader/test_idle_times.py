"""Counters of the time for which instances are idle although work waits."""

from services.planner.leader.idle_times import IdleTimes
from solver.planning.problem.queue_counts import Passage
from tests.queued import MODEL, OTHER
from tests.unit.planner.leader_rig import status

LANE = f"lane.2.{OTHER}.low.3.w0"
WAITING = {LANE: Passage(left=4, last=6)}


def test_time_between_two_idle_looks_counts():
    times = IdleTimes()
    for now in (10.0, 11.0, 13.0):
        times.look([status("i")], WAITING, frozenset(), now)

    assert (times.idle_s, times.kept_s) == ({"i": 3.0}, {})


def test_time_of_an_instance_that_is_kept_for_express_requests_has_its_own_counter():
    times = IdleTimes()
    for now in (10.0, 11.0):
        times.look([status("i")], WAITING, {"i"}, now)

    assert (times.idle_s, times.kept_s) == ({}, {"i": 1.0})


def test_instances_that_work_swap_or_have_no_other_model_are_not_idle():
    statuses = [
        status("runs", running=1),
        status("holds", waiting=1),
        status("rests", swapped_out=1),
        status("swaps", activating=OTHER),
        status("has one model", models=status("i").models[:1]),
    ]
    waiting = {LANE: Passage(0, 1), f"relegated.{MODEL}": Passage(0, 1)}
    times = IdleTimes()
    for now in (10.0, 11.0):
        times.look(statuses, waiting, frozenset(), now)

    assert times.idle_s == {}


def test_idle_time_without_waiting_work_does_not_count():
    times = IdleTimes()
    times.look([status("i")], WAITING, frozenset(), 10.0)
    times.look([status("i")], {LANE: Passage(left=6, last=6)}, frozenset(), 11.0)
    times.look([status("i")], {LANE: Passage(left=6, last=7)}, frozenset(), 12.0)

    assert times.idle_s == {}


def test_requests_that_are_pulled_before_the_next_look_are_not_waiting_work():
    times = IdleTimes()
    for now, passage in ((10.0, Passage(4, 6)), (11.0, Passage(6, 8)), (12.0, Passage(7, 9))):
        times.look([status("i")], {LANE: passage}, frozenset(), now)

    assert times.idle_s == {"i": 1.0}, "the second of the requests of 11.0 waits at 12.0 too"


def test_requests_in_inboxes_of_other_instances_are_not_work_of_the_mesh():
    times = IdleTimes()
    for now in (10.0, 11.0):
        times.look([status("i")], {"inbox.j": Passage(0, 4)}, frozenset(), now)

    assert times.idle_s == {}
