"""Detection of stalls of this process."""

import logging
from collections.abc import Iterator

import pytest

from shared.runtime.stall_detector import STALL_S, START_S, StallDetector


class Stalling:
    """Clock of a process that stalls."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_only_stalls_are_missed_time_and_each_is_returned_once():
    clock = Stalling()
    asked = StallDetector(clock)
    clock.now += STALL_S
    assert asked.missed_s() == 0.0
    clock.now += 3.5
    assert asked.missed_s() == 3.5
    assert asked.missed_s() == 0.0
    clock.now -= 60.0
    assert asked.missed_s() == 0.0


class Kept(logging.Handler):
    """Keeps the durations of logged stalls."""

    def __init__(self) -> None:
        super().__init__()
        self.durations_s: list[float] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.durations_s.append(vars(record)["fields"]["duration_s"])


@pytest.fixture
def kept() -> Iterator[Kept]:
    """What the module of the detector logs."""
    handler, logger = Kept(), logging.getLogger(StallDetector.__module__)
    logger.addHandler(handler)
    logger.setLevel(logging.WARNING)
    yield handler
    logger.setLevel(logging.NOTSET)
    logger.removeHandler(handler)


@pytest.mark.parametrize(("since_start_s", "logged"), [(START_S - 0.5, []), (START_S, [3.5])])
def test_stalls_are_logged_unless_the_process_is_starting(
    since_start_s: float, logged: list[float], kept: Kept
):
    clock = Stalling()
    asked = StallDetector(clock)
    while clock.now < 100.0 + since_start_s:
        clock.now += 0.5
        asked.missed_s()
    clock.now += 3.5

    assert asked.missed_s() == 3.5
    assert kept.durations_s == logged
