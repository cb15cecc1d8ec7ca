"""Learning the time of an iteration."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.contracts.estimates import LatencyCoefficients
from shared.contracts.telemetry import Iteration
from solver.prediction.latency_model import OnlineLatencyFit, predict_s

TRUE = LatencyCoefficients(
    constant_s=0.005, linear_s=4e-5, attention_s=1e-8, cross_s=2e-9, context_s=2e-7
)
SLOWER = LatencyCoefficients(constant_s=0.02, linear_s=1e-4, context_s=1e-6)


def iterations(
    truth: LatencyCoefficients, count: int, *, noise: float = 0.05, seed: int = 7
) -> list[Iteration]:
    """Decodes of up to 64 requests, and chunks of up to 2048 tokens."""
    chance = np.random.default_rng(seed)
    sample = []
    for number in range(count):
        decodes = int(chance.integers(1, 64))
        chunk = int(chance.integers(1, 2048)) if number % 2 else 0
        context = int(chance.integers(0, 40_000))
        exact_s = predict_s(truth, compute_tokens=decodes + chunk, context_tokens=context)
        sample.append(
            Iteration(
                compute_tokens=decodes + chunk,
                context_tokens=context,
                num_decodes=decodes,
                duration_s=exact_s * float(chance.lognormal(0.0, noise)),
            )
        )
    return sample


def fitted(sample: list[Iteration], *, forgetting: float = 0.999) -> OnlineLatencyFit:
    fit = OnlineLatencyFit(forgetting=forgetting)
    for iteration in sample:
        fit.observe(iteration)
    return fit


def worst_error(found: LatencyCoefficients | None, truth: LatencyCoefficients) -> float:
    """Over the range that was seen."""
    assert found is not None
    grid = [(p, c) for p in (1, 16, 64, 512, 2048) for c in (0, 1000, 10_000, 40_000)]
    return max(
        abs(
            predict_s(found, compute_tokens=p, context_tokens=c)
            / predict_s(truth, compute_tokens=p, context_tokens=c)
            - 1
        )
        for p, c in grid
    )


@pytest.mark.parametrize("truth", [TRUE, SLOWER])
def test_predictions_of_a_noisy_engine_are_right_within_a_tenth(truth: LatencyCoefficients):
    assert worst_error(fitted(iterations(truth, 2000)).fit(), truth) < 0.10


def test_forgetting_follows_an_engine_that_changes():
    fit = fitted([*iterations(TRUE, 1000), *iterations(SLOWER, 1000)], forgetting=0.99)
    assert worst_error(fit.fit(), SLOWER) < 0.10


def test_without_forgetting_the_past_keeps_its_say():
    fit = fitted([*iterations(TRUE, 1000), *iterations(SLOWER, 1000)], forgetting=1.0)
    assert worst_error(fit.fit(), SLOWER) > 0.10


coefficients = st.floats(0, 1e-2)
sizes = st.floats(0, 1e5)


@given(
    model=st.builds(
        LatencyCoefficients,
        constant_s=coefficients,
        linear_s=coefficients,
        attention_s=coefficients,
        cross_s=coefficients,
        context_s=coefficients,
    ),
    tokens=st.tuples(sizes, sizes),
    context=st.tuples(sizes, sizes),
)
def test_more_work_never_takes_less_time(
    model: LatencyCoefficients, tokens: tuple[float, float], context: tuple[float, float]
):
    less_s = predict_s(model, compute_tokens=min(tokens), context_tokens=min(context))
    more_s = predict_s(model, compute_tokens=max(tokens), context_tokens=max(context))
    assert less_s <= more_s


@given(
    sample=st.lists(
        st.builds(
            Iteration,
            compute_tokens=st.integers(0, 4096),
            context_tokens=st.integers(0, 100_000),
            num_decodes=st.just(0),
            duration_s=st.one_of(st.floats(-1, 0), st.floats(1e-6, 10)),
        ),
        max_size=30,
    )
)
def test_whatever_was_seen_no_term_is_negative(sample: list[Iteration]):
    found = fitted(sample).fit()
    assert (
        found is None
        or min(found.constant_s, found.linear_s, found.attention_s, found.cross_s, found.context_s)
        >= 0
    )


def test_nothing_is_predicted_from_a_handful_of_iterations():
    assert fitted(iterations(TRUE, 9)).fit() is None
    assert fitted(iterations(TRUE, 10)).fit() is not None


def test_iterations_without_work_or_time_teach_nothing():
    idle = Iteration(compute_tokens=0, context_tokens=0, num_decodes=0, duration_s=0.1)
    timeless = Iteration(compute_tokens=9, context_tokens=0, num_decodes=0, duration_s=0.0)
    assert fitted([idle, timeless]).count == 0


def test_the_error_is_that_of_predictions_made_before_they_were_known():
    fit = fitted(iterations(TRUE, 1000, noise=0.0))
    assert fit.relative_error is None
    fit.fit()
    for iteration in iterations(TRUE, 100, noise=0.0, seed=8):
        fit.observe(iteration)
    assert fit.relative_error == pytest.approx(0.0, abs=0.01)
    for iteration in iterations(TRUE, 100, noise=0.3, seed=9):
        fit.observe(iteration)
    assert fit.relative_error is not None
    assert fit.relative_error > 0.05
