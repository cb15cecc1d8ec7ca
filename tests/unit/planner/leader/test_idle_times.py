"""Counters of the time for which instances are idle although work waits."""

from services.planner.leader.idle_times import IdleTimes, waiting_models
from shared.contracts.base import ModelName
from tests.queued import MODEL, OTHER
from tests.unit.planner.leader_rig import status

WAITING = frozenset({OTHER})


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
    times = IdleTimes()
    for now in (10.0, 11.0):
        times.look(statuses, frozenset({MODEL, OTHER}), frozenset(), now)

    assert times.idle_s == {}


def test_idle_time_without_waiting_work_does_not_count():
    times = IdleTimes()
    times.look([status("i")], WAITING, frozenset(), 10.0)
    times.look([status("i")], frozenset(), frozenset(), 11.0)
    times.look([status("i")], WAITING, frozenset(), 12.0)

    assert times.idle_s == {}


def test_models_of_waiting_requests_are_those_of_all_their_queues():
    waiting = {"lane.2.a.low.3.w0": 1, "relegated.b": 2, "overflow.2.c.low.3.w0": 0, "inbox.i": 4}

    assert waiting_models(waiting) == {ModelName("a"), ModelName("b")}
