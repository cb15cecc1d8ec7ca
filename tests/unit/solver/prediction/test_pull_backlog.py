"""Quantiles of the time that waiting work takes."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.contracts.base import ModelName
from shared.contracts.estimates import Calibration, OutputTokens, Profile
from solver.prediction import backlog
from solver.prediction.backlog import sum_quantile
from tests.queued import a_request, sampling

SCORE = 1.2815515655446004
"""The 0.9 quantile of the standard normal distribution."""
PROFILE = Profile(
    model=ModelName("m"),
    engine="e",
    device="d",
    version=1,
    at=0.0,
    latency_calibration=Calibration(count=50, bias=0.0, spread=0.2, at=0.0),
    output_tokens={"*": OutputTokens(mean=60.0, sd=30.0, count=9)},
)
parts = st.lists(st.tuples(st.floats(0, 100), st.floats(0, 100)), max_size=20)
levels = st.floats(0.01, 0.99)


def test_the_spread_of_a_sum_is_less_than_the_sum_of_spreads():
    assert sum_quantile([(1.0, 0.3)] * 9, 0.9) == pytest.approx(9 + SCORE * 0.3 * 3)
    assert sum_quantile([], 0.9) == 0.0


@given(parts=parts)
def test_the_median_is_the_sum_of_the_means(parts: list[tuple[float, float]]):
    assert sum_quantile(parts, 0.5) == pytest.approx(sum(mean for mean, _ in parts))


@given(parts=parts, low=levels, high=levels)
def test_a_higher_level_never_gives_less(parts: list[tuple[float, float]], low: float, high: float):
    low, high = sorted((low, high))

    assert 0.0 <= sum_quantile(parts, low) <= sum_quantile(parts, high)


@given(parts=parts, more=st.tuples(st.floats(0, 100), st.floats(0, 100)), level=levels)
def test_from_the_median_up_one_more_part_never_gives_less(
    parts: list[tuple[float, float]], more: tuple[float, float], level: float
):
    level = max(0.5, level)

    assert sum_quantile([*parts, more], level) >= sum_quantile(parts, level) - 1e-9


def test_prefills_have_the_spread_of_iterations():
    expected = 0.4 + SCORE * 0.2 * (4 * 0.1**2) ** 0.5

    assert backlog.prefills_s([0.1] * 4, PROFILE, level=0.9) == pytest.approx(expected)


@pytest.mark.parametrize(
    "profile", [None, msgspec.structs.replace(PROFILE, latency_calibration=None)]
)
def test_without_known_errors_predictions_are_not_corrected(profile: Profile | None):
    assert backlog.prefills_s([0.1, 0.2], profile, level=0.9) == pytest.approx(0.3)


def test_answers_have_their_applications_lengths():
    requests = [
        a_request(prompt_tokens=10, sampling=sampling(4000, ignore_eos=False)) for _ in range(4)
    ]
    expected = 4 * 70 + SCORE * 30 * 2

    assert backlog.tokens(requests, PROFILE, level=0.9) == pytest.approx(expected)


def test_answers_respect_their_limits():
    short = [a_request(prompt_tokens=10, sampling=sampling(61, ignore_eos=False))]
    of_its_limit = [a_request(prompt_tokens=10, sampling=sampling(4000))]

    assert backlog.tokens(short, PROFILE, level=0.99) == 71
    assert backlog.tokens(of_its_limit, PROFILE, level=0.9) == 4010
    assert backlog.tokens(of_its_limit, None, level=0.9) == 4010
