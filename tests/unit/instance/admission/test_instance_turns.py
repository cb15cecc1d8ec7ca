"""Turns of several instances to pull from one queue."""

import math
from collections.abc import Callable

import msgspec

from shared.contracts.telemetry import Capability
from solver.instance.admission.turns import PATIENCE_S, Asking, Turns
from solver.instance.events import PullEnded, PullOutcome
from tests.queued import a_request
from tests.unit.instance.driver import Driver, a_profile

QUEUE = "lane"


class Time:
    """A clock whose calls are made when the test lets time pass."""

    def __init__(self) -> None:
        self.now = 0.0
        self._calls: list[tuple[float, Callable[[], None]]] = []

    def call_later(self, delay_s: float, call: Callable[[], None]) -> None:
        self._calls.append((self.now + delay_s, call))

    def wait(self, seconds: float) -> None:
        self.now += seconds
        due, self._calls = self._calls, []
        for at, call in due:
            if at <= self.now:
                call()
            else:
                self._calls.append((at, call))


class Askers:
    """Instances that serve different numbers of requests, and what they were answered."""

    def __init__(self, *numbers: int) -> None:
        self.time = Time()
        self.turns = Turns(lambda: self.time.now, self.time.call_later)
        self.drivers: list[Driver] = []
        self.instances = []
        self.granted: list[int] = []
        self.refused: list[tuple[int, PullEnded]] = []
        for number in numbers:
            driver = Driver(capabilities=frozenset({Capability.CALLS}))
            driver.profile(a_profile(constant_s=0.1))
            for _ in range(number):
                name = a_request()
                driver.put(name)
                driver.generate(name.request_id)
            self.drivers.append(driver)
            self.instances.append(driver.instance)
            self.turns.join(driver.instance)

    def ask(self, number: int) -> Asking:
        return self.turns.ask(
            self.instances[number],
            QUEUE,
            lambda: self.granted.append(number),
            lambda nothing: self.refused.append((number, nothing)),
        )


def nothing() -> PullEnded:
    return PullEnded(queue=QUEUE, outcome=PullOutcome.EMPTY, asked_at=0.0)


def test_best_instance_pulls_at_once():
    askers = Askers(3, 0)
    askers.ask(1)

    assert askers.granted == [1]


def test_instance_waits_a_moment_for_a_better_one():
    askers = Askers(3, 0)
    askers.ask(0)
    waits = list(askers.granted)
    askers.ask(1)

    assert (waits, askers.granted) == ([], [1, 0])


def test_instance_pulls_after_a_moment_if_no_better_one_asks():
    askers = Askers(3, 0)
    askers.ask(0)
    askers.time.wait(PATIENCE_S)

    assert askers.granted == [0]


def test_full_instance_does_not_come_first():
    askers = Askers(3, 8)
    askers.ask(0)

    assert askers.granted == [0]


def test_one_empty_answer_serves_all_that_ask():
    askers = Askers(0, 0, 0, 0)
    first, *_ = [askers.ask(number) for number in range(4)]
    askers.time.wait(PATIENCE_S)
    assert len(askers.granted) == 2
    empty = nothing()
    askers.turns.ended(first, empty)

    refused = set(range(4)) - set(askers.granted)
    assert {number for number, _ in askers.refused} == refused
    assert all(result is empty for _, result in askers.refused)


def test_request_lets_the_next_one_pull():
    askers = Askers(0, 0, 0)
    first, *_ = [askers.ask(number) for number in range(3)]
    askers.time.wait(PATIENCE_S)
    assert len(askers.granted) == 2
    askers.turns.ended(first, None)

    assert sorted(askers.granted) == [0, 1, 2]


def test_instance_that_no_longer_waits_gets_no_turn():
    askers = Askers(3, 0)
    askers.turns.withdraw(askers.ask(0))
    askers.time.wait(math.inf)

    assert askers.granted == []


def test_pulls_that_wait_for_their_turn_take_no_slot():
    """One with a slot and a short wait, which asks three times, precedes one without a slot."""
    askers = Askers(6, 8)
    askers.drivers[0].put(a_request())
    for number in (1, 0, 0, 0):
        askers.instances[number].num_pulls += 1
    for number in (1, 0, 0, 0):
        askers.ask(number)
    askers.time.wait(PATIENCE_S)

    assert askers.granted[0] == 0


def test_slots_that_another_server_has_used_are_worth_no_wait():
    """In the first seconds the slots are unknown: the server with the fewest runs comes first."""
    askers = Askers(0, 1, 4)
    for instance, most_run in zip(askers.instances, (0, 1, 6), strict=True):
        instance.engine = msgspec.structs.replace(
            instance.engine, max_running=256, most_run=most_run
        )
    for number in (2, 1, 0):
        askers.ask(number)

    assert askers.granted == [0, 1]
