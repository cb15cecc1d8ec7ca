"""Trees fitted to prefill times equal the library's trees and are accurate."""

import numpy as np
import pytest
from numpy.typing import NDArray
from threadpoolctl import threadpool_limits

from shared.contracts.errors import TooFewSamplesError
from solver.prediction.prefill import quantile_fit
from solver.prediction.prefill.features import InstanceFeatures, RequestFeatures, feature_matrix
from solver.prediction.prefill.quantile_fit import LEAST_SAMPLES, fit_quantile_trees
from solver.prediction.prefill.quantile_trees import QuantileTrees, decode, encode
from solver.prediction.prefill.tree_walk import compile_kernels, prefill_times, scale_terms, walk
from tests.prefill_times import NOMINAL, matrix_of, requests_of, times_of

TRAINED = requests_of(NOMINAL, 3000, seed=1)
HELD_OUT = requests_of(NOMINAL, 3000, seed=2)
LEVELS = (0.5, 0.9, 0.95)


@pytest.fixture(scope="module")
def trees() -> QuantileTrees:
    return fit_quantile_trees(matrix_of(TRAINED), times_of(TRAINED))


def library_times_s(
    trees: QuantileTrees, features: NDArray[np.float64], **loss: object
) -> NDArray[np.float64]:
    """The library's predictions for *features*, as multiples of the scale."""
    known, times_s = matrix_of(TRAINED), times_of(TRAINED)
    ratios = times_s / (scale_terms(known) @ trees.scale)
    target = ratios if loss["quantile"] is None else np.log(ratios)
    with threadpool_limits(limits=1):
        model = quantile_fit._model(0, **loss)
        return model.fit(known, target).predict(features)


@pytest.mark.parametrize("level", LEVELS)
def test_flat_trees_give_the_librarys_quantiles(trees: QuantileTrees, level: float):
    features = matrix_of(HELD_OUT)
    ratios = np.exp(library_times_s(trees, features, loss="quantile", quantile=level))
    predicted = trees.predict(features).quantiles_s
    column = trees.column_of(level)
    own = predicted[:, column] > predicted[:, :column].max(axis=1, initial=0.0)
    expected = (scale_terms(features) @ trees.scale * ratios)[own]

    # In all other rows the library's quantile is below that of a lower level, and the higher value
    # is returned.
    assert np.mean(own) > 0.9
    assert predicted[own, column] == pytest.approx(expected, rel=1e-12)


def test_flat_trees_give_the_librarys_means(trees: QuantileTrees):
    features = matrix_of(HELD_OUT)
    ratios = library_times_s(trees, features, loss="squared_error", quantile=None)

    assert trees.predict(features).mean_s == pytest.approx(
        scale_terms(features) @ trees.scale * ratios, rel=1e-12
    )


def test_quantiles_cover_their_share_of_unseen_requests(trees: QuantileTrees):
    covered = times_of(HELD_OUT)[:, None] <= trees.predict(matrix_of(HELD_OUT)).quantiles_s

    assert np.mean(covered, axis=0) == pytest.approx(np.array(LEVELS), abs=0.03)


def test_means_add_up_to_the_actual_work(trees: QuantileTrees):
    """A bias of means would not average out in expected work, which is a sum of means."""
    assert trees.predict(matrix_of(HELD_OUT)).mean_s.sum() == pytest.approx(
        times_of(HELD_OUT).sum(), rel=0.03
    )


def test_a_prompt_longer_than_any_seen_takes_longer(trees: QuantileTrees):
    def predicted_s(prompt_tokens: int) -> NDArray[np.float64]:
        request = RequestFeatures(prompt_tokens=prompt_tokens, max_tokens=512)
        return trees.predict(feature_matrix(request, [InstanceFeatures()])).quantiles_s[0]

    assert max(each.request.prompt_tokens for each in TRAINED) < 50_000
    assert np.all(predicted_s(100_000) > 1.9 * predicted_s(50_000))


def test_equal_samples_and_seeds_give_equal_trees():
    features, times_s = matrix_of(TRAINED[:500]), times_of(TRAINED[:500])
    first, second = (
        fit_quantile_trees(features, times_s, seed=5).predict(features) for _ in range(2)
    )

    assert np.array_equal(first.quantiles_s, second.quantiles_s)
    assert np.array_equal(first.mean_s, second.mean_s)


def test_too_few_samples_are_rejected_with_the_minimum():
    few = TRAINED[: LEAST_SAMPLES - 1]
    with pytest.raises(TooFewSamplesError, match=r"399 samples .* at least 400") as refused:
        fit_quantile_trees(matrix_of(few), times_of(few))

    assert (refused.value.samples, refused.value.least) == (399, 400)


def test_invalid_samples_are_rejected():
    features, times_s = matrix_of(TRAINED[:400]), times_of(TRAINED[:400])
    with pytest.raises(ValueError, match="expected"):
        fit_quantile_trees(features[:, 1:], times_s)
    with pytest.raises(ValueError, match="must be finite"):
        fit_quantile_trees(features, times_s * np.inf)
    with pytest.raises(ValueError, match="must rise"):
        fit_quantile_trees(features, times_s, levels=(0.9, 0.5))


def test_equal_times_are_predicted_exactly():
    features = matrix_of(TRAINED[:400])
    trees = fit_quantile_trees(features, np.full(400, 0.25), levels=(0.9,))

    assert np.median(trees.predict(features).quantiles_s) == pytest.approx(0.25, rel=0.1)


def test_predictions_compile_no_kernel(trees: QuantileTrees):
    """The precompiled kernels match the types of fitted trees and of decoded trees."""
    compile_kernels()
    compiled = [list(kernel.signatures) for kernel in (walk, prefill_times)]
    features = feature_matrix(TRAINED[0].request, [InstanceFeatures()] * 3)
    for each in (trees, decode(encode(trees))):
        each.predict(features)

    assert [list(kernel.signatures) for kernel in (walk, prefill_times)] == compiled
    assert [len(signatures) for signatures in compiled] == [1, 1]
