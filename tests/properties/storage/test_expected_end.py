"""The expected end of a batch, on synthetic traces of changing load."""

from collections.abc import Callable
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from solver.storage.expected_end import ExpectedEnd, ResultPace

NUM_TRACES = 60
NUM_LINES = 600
LIMITS = {0.25: 0.20, 0.5: 0.15, 0.75: 0.10}
"""Part of the lines that have ended -> limit of the median error, as a part of what is left."""
Load = Callable[[np.random.Generator, np.ndarray], np.ndarray]


def steady(_random: np.random.Generator, times: np.ndarray) -> np.ndarray:
    """The rate does not change."""
    return np.full(len(times), 5.0)


def bursts(random: np.random.Generator, times: np.ndarray) -> np.ndarray:
    """Interactive load comes and goes: phases of 3 to 15 s with two thirds of the rate or all."""
    rate = np.empty(len(times))
    at, high = 0.0, bool(random.integers(2))
    while at < times[-1]:
        length = random.uniform(3.0, 15.0)
        rate[(times >= at) & (times <= at + length)] = 6.0 if high else 4.0
        at, high = at + length, not high
    return rate


def waves(random: np.random.Generator, times: np.ndarray) -> np.ndarray:
    """The load rises and falls every 40 s."""
    phase = random.uniform(0.0, 2 * np.pi)
    return 4.0 + 2.5 * np.sin(2 * np.pi * times / 40.0 + phase)


def wandering(random: np.random.Generator, times: np.ndarray) -> np.ndarray:
    """The logarithm of the rate is drawn back to its mean within about 20 s."""
    steps = random.normal(0.0, 0.015, len(times))
    value, values = 0.0, np.empty(len(times))
    for number, step in enumerate(steps):
        value = 0.975 * value + step
        values[number] = value
    return 4.0 * np.exp(values)


def errors_of(load: Load, random: np.random.Generator) -> dict[float, float]:
    """Error of each estimate, as a part of what is left; chance in single ends included."""
    times = np.arange(0.0, 2000.0, 0.5)
    ended = np.cumsum(random.poisson(load(random, times) * 0.5))
    end_at = float(times[np.searchsorted(ended, NUM_LINES)])
    expected = ExpectedEnd(num_lines=NUM_LINES, num_ended=0, now=0.0)
    found: dict[float, float] = {}
    for at, number in zip(times[1:], ended[1:], strict=True):
        expected.observe(int(min(number, NUM_LINES)), float(at))
        for share in LIMITS:
            if share not in found and number >= share * NUM_LINES:
                estimate = expected.expected_at()
                assert estimate is not None
                found[share] = abs(estimate - end_at) / (end_at - at)
        if len(found) == len(LIMITS):
            return found
    raise AssertionError("the trace is too short")


@pytest.mark.parametrize("load", [steady, bursts, waves, wandering])
def test_median_errors_are_small_under_changing_load(load: Load):
    random = np.random.default_rng(7)
    errors = [errors_of(load, random) for _ in range(NUM_TRACES)]
    medians = {share: float(np.median([each[share] for each in errors])) for share in LIMITS}

    assert all(medians[share] <= limit for share, limit in LIMITS.items()), medians


def test_time_before_the_first_end_does_not_count():
    expected = ExpectedEnd(num_lines=200, num_ended=0, now=0.0)
    for second in range(1, 31):
        expected.observe(0, float(second))
    for second in range(31, 41):
        expected.observe(5 * (second - 30), float(second))

    assert expected.expected_at() == pytest.approx(70.0)


def test_batch_ends_when_its_results_are_written():
    pace = ResultPace()
    for _ in range(20):
        pace.observe(num_lines=1000, elapsed_s=4.0)
    results_s = pace.expected_s(100)
    expected = ExpectedEnd(num_lines=100, num_ended=0, now=0.0, results_s=results_s)
    expected.observe(50, 10.0)

    assert results_s == pytest.approx(0.4)
    assert expected.expected_at() == pytest.approx(20.4)


@pytest.mark.parametrize(
    ("num_lines", "elapsed_s"), [(0, 4.0), (10, -3.0)], ids=["no lines", "clock set back"]
)
def test_batches_without_lines_or_time_do_not_change_the_expected_time(
    num_lines: int, elapsed_s: float
):
    pace = ResultPace()
    pace.observe(num_lines=num_lines, elapsed_s=elapsed_s)

    assert pace.expected_s(100) == ResultPace().expected_s(100)


def test_there_is_no_estimate_before_lines_have_ended():
    expected = ExpectedEnd(num_lines=10, num_ended=0, now=0.0)
    expected.observe(2, 5.0)

    assert expected.expected_at() is None
    assert expected.rate_per_s is None


def test_a_takeover_begins_with_what_has_ended_before():
    expected = ExpectedEnd(num_lines=100, num_ended=50, now=0.0)
    expected.observe(60, 10.0)

    assert expected.expected_at() == pytest.approx(50.0)


@given(st.lists(st.tuples(st.floats(0.01, 100.0), st.integers(0, 50)), min_size=1, max_size=2000))
def test_estimates_are_never_in_the_past_and_old_samples_are_thinned_out(
    steps: list[tuple[float, int]],
):
    total = sum(number for _, number in steps)
    expected = ExpectedEnd(num_lines=total, num_ended=0, now=0.0)
    now, ended = 0.0, 0
    for length, number in steps:
        now, ended = now + length, ended + number
        expected.observe(ended, now)
        at = expected.expected_at()
        assert at is None or at >= now
    times = expected._times

    assert len(times) <= 512
    assert all(before < after for before, after in pairwise(times))
