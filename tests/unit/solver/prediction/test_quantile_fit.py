"""Trees that are learnt of prefill times: as the library has them, and good enough."""

import numpy as np
import pytest
from numpy.typing import NDArray
from threadpoolctl import threadpool_limits

from shared.contracts.errors import TooFewSamplesError
from solver.prediction import quantile_fit
from solver.prediction.prefill_features import InstanceFeatures, RequestFeatures, feature_matrix
from solver.prediction.quantile_fit import LEAST_SAMPLES, FitOptions, fit_quantile_trees
from solver.prediction.quantile_trees import QuantileTrees, decode, encode
from solver.prediction.tree_walk import compile_kernels, prefill_times, scale_terms, walk
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
    """What the library predicts of *features* itself, as multiples of the scale."""
    known, times_s = matrix_of(TRAINED), times_of(TRAINED)
    ratios = times_s / (scale_terms(known) @ trees.scale)
    target = ratios if loss["quantile"] is None else np.log(ratios)
    with threadpool_limits(limits=1):
        model = quantile_fit._model(FitOptions(), 0, **loss)
        return model.fit(known, target).predict(features)


@pytest.mark.parametrize("level", LEVELS)
def test_flat_trees_give_the_librarys_quantiles(trees: QuantileTrees, level: float):
    features = matrix_of(HELD_OUT)
    ratios = np.exp(library_times_s(trees, features, loss="quantile", quantile=level))
    predicted = trees.predict(features).quantiles_s
    column = trees.column_of(level)
    own = predicted[:, column] > predicted[:, :column].max(axis=1, initial=0.0)
    expected = (scale_terms(features) @ trees.scale * ratios)[own]

    # Elsewhere the library's quantile is below that of a lower level, which is given instead.
    assert np.mean(own) > 0.9
    assert predicted[own, column] == pytest.approx(expected, rel=1e-12)


def test_flat_trees_give_the_librarys_means(trees: QuantileTrees):
    features = matrix_of(HELD_OUT)
    ratios = library_times_s(trees, features, loss="squared_error", quantile=None)

    assert trees.predict(features).mean_s == pytest.approx(
        scale_terms(features) @ trees.scale * ratios, rel=1e-12
    )


def test_quantiles_cover_what_they_should_of_requests_never_seen(trees: QuantileTrees):
    covered = times_of(HELD_OUT)[:, None] <= trees.predict(matrix_of(HELD_OUT)).quantiles_s

    assert np.mean(covered, axis=0) == pytest.approx(np.array(LEVELS), abs=0.03)


def test_means_add_up_to_the_work_there_is(trees: QuantileTrees):
    """Expected work is a sum of means, so a bias would not average out."""
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


def test_too_few_samples_are_refused_with_the_number_it_takes():
    few = TRAINED[: LEAST_SAMPLES - 1]
    with pytest.raises(TooFewSamplesError, match=r"399 samples .* at least 400") as refused:
        fit_quantile_trees(matrix_of(few), times_of(few))

    assert (refused.value.samples, refused.value.least) == (399, 400)


def test_what_cannot_be_fitted_is_refused():
    features, times_s = matrix_of(TRAINED[:400]), times_of(TRAINED[:400])
    with pytest.raises(ValueError, match="were expected"):
        fit_quantile_trees(features[:, 1:], times_s)
    with pytest.raises(ValueError, match="have to be finite"):
        fit_quantile_trees(features, times_s * np.inf)
    with pytest.raises(ValueError, match="have to rise"):
        fit_quantile_trees(features, times_s, levels=(0.9, 0.5))


def test_times_that_are_all_equal_are_predicted_so():
    features = matrix_of(TRAINED[:400])
    trees = fit_quantile_trees(features, np.full(400, 0.25), levels=(0.9,))

    assert np.median(trees.predict(features).quantiles_s) == pytest.approx(0.25, rel=0.1)


def test_nothing_is_compiled_when_routers_predict(trees: QuantileTrees):
    """What was compiled ahead is for these types: of trees from here, or out of a message."""
    compile_kernels()
    compiled = [list(kernel.signatures) for kernel in (walk, prefill_times)]
    features = feature_matrix(TRAINED[0].request, [InstanceFeatures()] * 3)
    for each in (trees, decode(encode(trees))):
        each.predict(features)

    assert [list(kernel.signatures) for kernel in (walk, prefill_times)] == compiled
    assert [len(signatures) for signatures in compiled] == [1, 1]
