"""The latency model that an engine learns from its own iterations."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.contracts.estimates import LatencyCoefficients
from solver.prediction.latency.iteration_fit import IterationFit, IterationWork
from solver.prediction.least_squares import non_negative
from solver.scheduling.engine.latency import LatencyTable

PRIOR = LatencyCoefficients(
    constant_s=0.01, linear_s=1e-4, attention_s=1e-8, cross_s=2e-8, context_s=5e-7
)
FAST = LatencyCoefficients(
    constant_s=0.004, linear_s=2e-5, attention_s=2e-9, cross_s=3e-9, context_s=4e-8
)
SLOW = LatencyCoefficients(
    constant_s=0.009, linear_s=2e-4, attention_s=5e-8, cross_s=7e-8, context_s=4e-6
)
ENGINES = pytest.mark.parametrize("truth", [FAST, SLOW], ids=["fast", "slow"])


def exact_s(truth: LatencyCoefficients, work: IterationWork) -> float:
    table = LatencyTable.from_coefficients(truth, max_tokens=2048)
    return table.predict_s(work.tokens, work.pairs, work.context_tokens)


def serve(
    fit: IterationFit,
    truth: LatencyCoefficients,
    count: int,
    *,
    noise: float = 0.05,
    outliers: float = 0.0,
    decodes_only: bool = False,
) -> None:
    """
    Pass *count* iterations to *fit*. An iteration has some decodes and usually one chunk; a share
    *outliers* of the iterations takes 8 times as long.
    """
    chance = np.random.default_rng(3)
    for _ in range(count):
        decodes = int(chance.integers(1, 32))
        chunk = 0 if decodes_only or chance.random() < 0.3 else int(chance.integers(8, 1500))
        before = int(chance.integers(0, 4000)) if chunk else 0
        work = IterationWork(
            tokens=decodes + chunk,
            pairs=chunk * (before + chunk / 2),
            context_tokens=before + decodes * int(chance.integers(100, 2000)),
        )
        factor = 8.0 if chance.random() < outliers else float(chance.lognormal(0.0, noise))
        fit.observe(work, exact_s(truth, work) * factor)


def worst_error(found: LatencyCoefficients, truth: LatencyCoefficients) -> float:
    grid = [
        IterationWork(tokens, tokens * (before + tokens / 2), before + context)
        for tokens in (1, 16, 256, 1024)
        for before in (0, 1000, 3000)
        for context in (0, 10_000)
    ]
    return max(abs(exact_s(found, work) / exact_s(truth, work) - 1) for work in grid)


@ENGINES
def test_predictions_of_a_noisy_engine_are_right_within_a_tenth(truth: LatencyCoefficients):
    fit = IterationFit(PRIOR)
    serve(fit, truth, 600)

    assert worst_error(fit.fit(), truth) < 0.10


@ENGINES
def test_disturbed_iterations_do_little_harm(truth: LatencyCoefficients):
    fit = IterationFit(PRIOR)
    for _ in range(6):
        serve(fit, truth, 100, outliers=0.08)
        found = fit.fit()

    assert worst_error(found, truth) < 0.2


def test_sixteen_iterations_are_enough_to_leave_a_wrong_prior():
    fit = IterationFit(PRIOR)
    serve(fit, FAST, 16)

    assert worst_error(PRIOR, FAST) > 1.5
    assert worst_error(fit.fit(), FAST) < 0.6


def test_without_iterations_the_prior_holds():
    assert worst_error(IterationFit(PRIOR).fit(), PRIOR) < 1e-3


def test_unseen_terms_keep_the_prior():
    fit = IterationFit(PRIOR)
    serve(fit, FAST, 300, decodes_only=True)
    found = fit.fit()

    assert found.cross_s == pytest.approx(PRIOR.cross_s, rel=1e-6)
    assert found.constant_s == pytest.approx(FAST.constant_s, rel=0.1)


def test_a_slower_engine_is_followed():
    fit = IterationFit(PRIOR)
    for truth in (FAST, SLOW):
        for _ in range(8):
            serve(fit, truth, 64)
            fit.fit()

    assert worst_error(fit.fit(), SLOW) < 0.15


def test_iterations_without_work_or_time_are_ignored():
    fit = IterationFit(PRIOR)
    fit.observe(IterationWork(0, 0.0, 0), 0.1)
    fit.observe(IterationWork(9, 40.5, 0), 0.0)

    assert fit.count == 0


iterations = st.lists(
    st.tuples(
        st.integers(1, 4096), st.integers(0, 8192), st.integers(0, 100_000), st.floats(1e-6, 100)
    ),
    max_size=30,
)


@given(seen=iterations)
def test_the_table_never_falls_and_no_term_is_negative(
    seen: list[tuple[int, int, int, float]],
):
    fit = IterationFit(PRIOR)
    for tokens, before, context, duration_s in seen:
        fit.observe(IterationWork(tokens, tokens * (before + tokens / 2), context), duration_s)
    found = fit.fit()
    table = LatencyTable.from_coefficients(found, max_tokens=512)

    assert min(found.constant_s, found.linear_s, found.cross_s, found.context_s) >= 0
    assert list(table.tokens_s) == sorted(table.tokens_s)


@given(
    rows=st.lists(st.lists(st.floats(-1, 1), min_size=4, max_size=4), min_size=4, max_size=12),
    vector=st.lists(st.floats(-1, 1), min_size=4, max_size=4),
)
def test_no_small_step_improves_the_least_squares(rows: list[list[float]], vector: list[float]):
    design = np.array(rows)
    matrix = design.T @ design / len(rows) + 0.1 * np.eye(4)
    target = np.array(vector)
    found = non_negative(matrix, target)

    def cost(x: np.ndarray) -> float:
        return float(x @ matrix @ x / 2 - target @ x)

    assert (found >= 0).all()
    for step in (*np.eye(4), *-np.eye(4)):
        assert cost(np.maximum(0.0, found + 1e-3 * step)) >= cost(found) - 1e-9
