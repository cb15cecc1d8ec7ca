"""Pace of one instance, without time in which it does not work."""

import pytest

from solver.routing.service_pace import ServicePace


def after(*waits_s: float) -> ServicePace:
    """Pace after requests of 0.1 s of work whose ends are *waits_s* apart."""
    pace, now = ServicePace(), 1000.0
    pace.begin(now)
    for wait_s in waits_s:
        now += wait_s
        pace.serve(0.1, now)
    return pace


def test_pace_is_expected_work_per_second_of_service() -> None:
    assert after(*[0.1] * 200).value == pytest.approx(1.0)
    assert after(*[0.2] * 200).value == pytest.approx(0.5, rel=0.1)
    assert after(*[0.05] * 200).value == pytest.approx(2.0, rel=0.1)


def test_a_stall_of_any_length_lowers_the_pace_only_slightly() -> None:
    steady = [0.1] * 100

    assert after(*steady, 8.0).value == after(*steady, 40.0).value > 0.8
    assert after(*steady, 40.0, *steady).value > 0.9
