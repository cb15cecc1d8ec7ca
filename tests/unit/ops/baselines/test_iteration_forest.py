"""The forest compared with the latency model: accuracy, and chunks that are rather too small."""

import msgspec
import numpy as np
import pytest
from sklearn.ensemble import RandomForestRegressor

from ops.baselines.prediction import iteration_forest_fit
from ops.baselines.prediction.iteration_forest import Decodes, IterationForest, iteration_matrix
from ops.baselines.prediction.iteration_forest_fit import (
    LEAST_SAMPLES,
    ForestOptions,
    fit_iteration_forest,
)
from shared.contracts.errors import TooFewSamplesError
from shared.contracts.estimates import LatencyCoefficients
from shared.contracts.telemetry import Iteration
from solver.prediction.latency.latency_model import predict_s
from tests.unit.ops.baselines.tiled_iterations import TILE, exact_s, iterations

KNOWN = iterations(2000)


@pytest.fixture(scope="module")
def forest() -> IterationForest:
    return fit_iteration_forest(KNOWN)


def errors(forest: IterationForest, sample: list[Iteration]) -> np.ndarray:
    exact = [exact_s(each.compute_tokens, each.context_tokens) for each in sample]
    return np.abs(forest.predict_s(iteration_matrix(sample)) / exact - 1)


def true_chunk(budget_s: float, beside: Decodes) -> int:
    fitting = [
        chunk
        for chunk in range(1, 2049)
        if exact_s(chunk + beside.num_decodes, beside.context_tokens) <= budget_s
    ]
    return max(fitting, default=0)


def test_flat_trees_give_the_librarys_predictions():
    features = iteration_matrix(KNOWN)
    targets = np.log([each.duration_s for each in KNOWN])
    model = RandomForestRegressor(7, min_samples_leaf=15, random_state=3).fit(features, targets)
    flat = IterationForest(
        base=LatencyCoefficients(constant_s=1.0, linear_s=0.0),
        forest=iteration_forest_fit._forest_of([each.tree_ for each in model.estimators_]),
        level=0.8,
        most_tokens=3000,
    )
    unseen = iteration_matrix(iterations(500, seed=2))
    assert flat.predict_s(unseen) == pytest.approx(np.exp(model.predict(unseen)), rel=1e-12)


def test_the_forest_learns_steps_that_a_sum_of_terms_cannot(forest: IterationForest):
    unseen = iterations(1000, seed=2)
    terms = np.array(
        [
            predict_s(
                forest.base, compute_tokens=each.compute_tokens, context_tokens=each.context_tokens
            )
            / exact_s(each.compute_tokens, each.context_tokens)
            for each in unseen
        ]
    )
    assert np.median(errors(forest, unseen)) < 0.02 < np.median(np.abs(terms - 1))


def test_chunks_are_too_small_rather_than_too_large_by_less_than_a_tenth(forest: IterationForest):
    random = np.random.default_rng(4)
    wrong = []
    for _ in range(100):
        beside = Decodes(int(random.integers(1, 64)), int(random.integers(0, 40_000)))
        full_s = exact_s(1800 + beside.num_decodes, beside.context_tokens)
        budget_s = float(random.uniform(0.3, 1.0)) * full_s
        if (best := true_chunk(budget_s, beside)) >= 2 * TILE:
            wrong.append(forest.largest_chunk(budget_s, beside, most_tokens=2048) / best - 1)
    assert len(wrong) > 60
    assert -0.1 < np.median(wrong) <= 0
    assert np.mean(np.array(wrong) > 0.02) < 0.2


def test_a_higher_level_gives_smaller_chunks():
    beside = Decodes(32, 8000)
    bold, cautious = (
        fit_iteration_forest(KNOWN, options=ForestOptions(level=level)) for level in (0.1, 1.0)
    )
    budgets_s = np.linspace(0.02, 0.09, 15)
    chunks = [
        [each.largest_chunk(float(b), beside, most_tokens=2048) for b in budgets_s]
        for each in (bold, cautious)
    ]
    assert np.all(np.array(chunks[0]) >= chunks[1])
    assert chunks[0] != chunks[1]


def test_no_chunk_makes_an_iteration_larger_than_any_seen(forest: IterationForest):
    largest = max(each.compute_tokens for each in KNOWN)
    assert forest.most_tokens == largest
    assert forest.largest_chunk(1e9, Decodes(10, 0), most_tokens=9999) in range(
        largest - 17, largest - 9
    )
    assert forest.largest_chunk(1e9, Decodes(largest, 0), most_tokens=9999) == 0


def test_the_chunk_respects_its_limit(forest: IterationForest):
    chunks = [forest.largest_chunk(1e9, Decodes(1, 0), most_tokens=most) for most in (0, 5, 23)]
    assert chunks == [0, 5, 16]


def test_without_a_time_budget_the_chunk_is_zero(forest: IterationForest):
    assert forest.largest_chunk(1e-4, Decodes(16, 1000), most_tokens=2048) == 0


def test_disturbed_iterations_are_ignored(forest: IterationForest):
    random = np.random.default_rng(5)
    disturbed = [
        msgspec.structs.replace(each, duration_s=4 * each.duration_s)
        if random.random() < 0.15
        else each
        for each in KNOWN
    ]
    unseen = iterations(1000, seed=2)
    assert np.median(errors(fit_iteration_forest(disturbed), unseen)) < 0.02


def test_equal_seeds_give_equal_forests():
    some = iteration_matrix(iterations(50, seed=2))
    first, again, other = (fit_iteration_forest(KNOWN[:300], seed=seed) for seed in (1, 1, 2))
    assert np.array_equal(first.predict_s(some), again.predict_s(some))
    assert not np.array_equal(first.predict_s(some), other.predict_s(some))


def test_too_few_iterations_are_rejected():
    idle = Iteration(compute_tokens=0, context_tokens=0, num_decodes=0, duration_s=0.1)
    with pytest.raises(TooFewSamplesError, match=f"99 samples .* at least {LEAST_SAMPLES}"):
        fit_iteration_forest([*KNOWN[:99], idle])


@pytest.mark.parametrize(
    ("options", "reported"),
    [
        (ForestOptions(num_trees=0), "num_trees must be at least 1; it is 0"),
        (ForestOptions(samples_per_leaf=0), "samples_per_leaf must be at least 1; it is 0"),
        (ForestOptions(level=1.5), "level must be within 0..1; it is 1.5"),
    ],
)
def test_invalid_options_are_rejected(options: ForestOptions, reported: str):
    with pytest.raises(ValueError, match=reported):
        fit_iteration_forest(KNOWN, options=options)
