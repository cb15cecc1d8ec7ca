"""Detection of stalls of this process."""

from shared.runtime.stall_detector import STALL_S, StallDetector


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
