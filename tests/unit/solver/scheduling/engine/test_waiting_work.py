"""Waiting requests by rank, importance and load."""

from dataclasses import replace

import pytest

from shared.contracts.base import RequestId
from shared.contracts.qos import Importance, Slo
from solver.scheduling.engine.decision import RequestView
from solver.scheduling.engine.entry import Entry
from solver.scheduling.engine.options import DEFAULT
from solver.scheduling.engine.waiting import WaitingWork

TOKEN_S = 1e-3


def entry_of(
    name: str,
    place: int,
    *,
    prompt: int = 100,
    ttlt_s: float | None = 600,
    importance: Importance = Importance.HIGH,
    arrived_at: float = 0.0,
) -> Entry:
    view = RequestView(
        request_id=RequestId(name),
        arrived_at=arrived_at,
        prompt_tokens=prompt,
        max_tokens=1,
        slo=Slo(ttlt_s=ttlt_s),
        importance=importance,
    )
    return Entry(view, place)


def drained(waiting: WaitingWork) -> list[str]:
    names = []
    while (item := waiting.first()) is not None:
        names.append(item[2].view.request_id)
        waiting.discard(item[2])
    return names


def test_regular_work_goes_before_relegated_work_before_best_effort() -> None:
    waiting = WaitingWork(DEFAULT)
    late = entry_of("late", 2, ttlt_s=1)
    for entry in (entry_of("dump", 1, ttlt_s=None), late, entry_of("regular", 3)):
        waiting.push(entry)
    waiting.relegate(late)

    assert drained(waiting) == ["regular", "late", "dump"]


def test_a_high_load_makes_work_weigh_more() -> None:
    waiting = WaitingWork(replace(DEFAULT, overload_mode=False))
    long_urgent = entry_of("long, urgent", 1, prompt=10_000, ttlt_s=600)
    short_patient = entry_of("short, patient", 2, prompt=10, ttlt_s=650)
    waiting.push(long_urgent)
    waiting.push(short_patient)
    waiting.observe(1e-6)
    calm = waiting.first()
    waiting.observe(TOKEN_S)
    busy = waiting.first()

    assert calm is not None
    assert busy is not None
    assert (calm[2], busy[2]) == (long_urgent, short_patient)


def overloaded() -> WaitingWork:
    """20 s of work of each importance; work of low importance is due first."""
    waiting = WaitingWork(DEFAULT)
    waiting.push(entry_of("low", 1, prompt=20_000, ttlt_s=600, importance=Importance.LOW))
    waiting.push(entry_of("high", 2, prompt=20_000, ttlt_s=1000))
    waiting.observe(TOKEN_S)
    return waiting


def test_unimportant_work_yields_in_an_overload() -> None:
    waiting = overloaded()

    assert waiting.overloaded
    assert drained(waiting) == ["high", "low"]


def test_important_work_with_enough_time_lets_unimportant_work_go_first() -> None:
    waiting = overloaded()
    waiting.push(entry_of("patient", 3, prompt=20_000, ttlt_s=1800))

    assert drained(waiting) == ["high", "low", "patient"]


def test_without_overload_importance_does_not_matter() -> None:
    waiting = WaitingWork(DEFAULT)
    waiting.push(entry_of("low", 1, ttlt_s=600, importance=Importance.LOW))
    waiting.push(entry_of("high", 2, ttlt_s=1000))
    waiting.observe(TOKEN_S)

    assert not waiting.overloaded
    assert drained(waiting) == ["low", "high"]


def test_the_overload_ends_when_little_work_is_left() -> None:
    waiting = overloaded()
    first = waiting.first()
    assert first is not None
    waiting.discard(first[2])
    waiting.observe(TOKEN_S)
    assert waiting.overloaded
    second = waiting.first()
    assert second is not None
    waiting.discard(second[2])
    waiting.observe(TOKEN_S)

    assert not waiting.overloaded


def test_old_relegated_work_is_found() -> None:
    waiting = WaitingWork(DEFAULT)
    late = entry_of("late", 1)
    waiting.push(late)
    waiting.relegate(late)

    assert waiting.aged(DEFAULT.aging_bound_s - 1) is None
    assert waiting.aged(DEFAULT.aging_bound_s) is late


@pytest.mark.parametrize("older", ["relegated", "dump"])
def test_oldest_of_relegated_and_best_effort_work_is_found(older: str) -> None:
    waiting = WaitingWork(DEFAULT)
    late = entry_of("relegated", 1, arrived_at=float(older != "relegated"))
    waiting.push(late)
    waiting.relegate(late)
    waiting.push(entry_of("dump", 2, ttlt_s=None, arrived_at=float(older != "dump")))

    found = waiting.aged(DEFAULT.aging_bound_s + 2)
    assert found is not None
    assert found.view.request_id == older


def test_many_moves_neither_lose_nor_duplicate_requests() -> None:
    waiting = WaitingWork(DEFAULT)
    entries = [entry_of(str(n), n, ttlt_s=600 + n) for n in range(50)]
    for entry in entries:
        waiting.push(entry)
    for _ in range(40):
        for entry in entries:
            waiting.discard(entry)
            waiting.push(entry)

    assert len(waiting) == 50
    assert drained(waiting) == [str(n) for n in range(50)]
