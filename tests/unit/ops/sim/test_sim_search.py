"""Searches try the rate that they return, and a slightly higher rate that fails."""

from collections.abc import Callable
from math import exp

import pytest

from ops.sim.search import highest_rate

ALLOWED = 0.01
TOLERANCE_RPS = 0.05


def smooth(rate_rps: float) -> float:
    return 1 / (1 + exp(12 * (4 - rate_rps)))


def step(rate_rps: float) -> float:
    return float(rate_rps > 4)


def late_rise(rate_rps: float) -> float:
    return max(0.0, 0.05 * (1 - 3.7 / rate_rps))


def searched(
    violations: Callable[[float], float], start_rps: float | None
) -> tuple[float, dict[float, float]]:
    """Search from 0 to 20; return the result and the share of violations of every tried rate."""
    tried: dict[float, float] = {}

    def reported(rate_rps: float) -> float:
        return tried.setdefault(rate_rps, violations(rate_rps))

    found = highest_rate(
        reported,
        allowed=ALLOWED,
        low_rps=0.0,
        high_rps=20.0,
        tolerance_rps=TOLERANCE_RPS,
        start_rps=start_rps,
    )
    return found, tried


@pytest.mark.parametrize("violations", [smooth, step, late_rise])
@pytest.mark.parametrize("start_rps", [None, 0.5, 3.0, 4.0, 4.5, 19.0, 30.0])
def test_the_goodput_and_a_failing_rate_just_above_were_tried(
    violations: Callable[[float], float], start_rps: float | None
) -> None:
    found, tried = searched(violations, start_rps)
    too_high = min(rate for rate, share in tried.items() if share > ALLOWED)

    assert tried[found] <= ALLOWED
    assert found < too_high <= found + TOLERANCE_RPS * 1.0001


@pytest.mark.parametrize("start_rps", [None, 4.0])
def test_if_every_rate_fails_the_goodput_is_the_lower_end(
    start_rps: float | None,
) -> None:
    found, tried = searched(lambda _rate: 1.0, start_rps)

    assert found == 0.0
    assert min(tried) <= TOLERANCE_RPS


@pytest.mark.parametrize("start_rps", [None, 4.0, 30.0])
def test_if_no_rate_fails_the_upper_end_was_tried(start_rps: float | None) -> None:
    found, tried = searched(lambda _rate: 0.0, start_rps)

    assert found == 20.0
    assert 20.0 in tried


@pytest.mark.parametrize("start_rps", [3.4, 3.55, 3.6, 3.65, 3.8])
def test_a_search_from_a_good_guess_takes_fewer_tries_than_halving(start_rps: float) -> None:
    _, tried = searched(smooth, start_rps)

    # Halving from 0 to 20 requests/s takes 9 tries, since log2(20 / 0.05) is 8.6.
    assert len(tried) <= 6


def test_an_allowance_of_zero_means_no_violation_at_all() -> None:
    found = highest_rate(
        lambda rate: 1e-9 if rate > 2 else 0.0,
        allowed=0.0,
        low_rps=0.0,
        high_rps=8.0,
        tolerance_rps=0.01,
        start_rps=3.0,
    )

    assert found == pytest.approx(2.0, abs=0.01)
