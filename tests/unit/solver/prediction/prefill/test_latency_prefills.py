"""Prefill times without trees: the time of one iteration with the uncached tokens."""

import numpy as np
import pytest

from shared.contracts.estimates import LatencyCoefficients
from solver.prediction.prefill.features import InstanceFeatures, RequestFeatures, feature_matrix
from solver.prediction.prefill.latency_prefills import LatencyPrefills

LATENCY = LatencyCoefficients(constant_s=0.01, linear_s=1e-3, cross_s=1e-6, context_s=1e-5)


def predicted_s(prompt: int, cached: int = 0, running: int = 0) -> float:
    matrix = feature_matrix(
        RequestFeatures(prompt_tokens=prompt, max_tokens=10),
        [InstanceFeatures(cached_tokens=cached, running=running)],
    )
    return float(LatencyPrefills(LATENCY, (0.5, 0.9)).predict(matrix).mean_s[0])


def test_latency_prefills_match_a_worked_example():
    # 600 tokens after 400 cached tokens, beside 10 sequences, take 0.01 + 0.61 + 0.244 + 0.004 s.
    assert predicted_s(1000, cached=400, running=10) == pytest.approx(0.868)


def test_cached_tokens_save_time_and_running_sequences_cost_some():
    assert predicted_s(1000, cached=900) < predicted_s(1000) < predicted_s(1000, running=5)


def test_all_levels_equal_the_mean_until_they_are_corrected():
    matrix = feature_matrix(
        RequestFeatures(prompt_tokens=50, max_tokens=10), [InstanceFeatures()] * 3
    )
    prediction = LatencyPrefills(LATENCY, (0.5, 0.9)).predict(matrix)

    assert prediction.quantiles_s.shape == (3, 2)
    assert np.all(prediction.quantiles_s == prediction.mean_s[:, None])


def test_an_unknown_level_is_named_in_the_error():
    with pytest.raises(ValueError, match=r"0\.7"):
        LatencyPrefills(LATENCY, (0.5, 0.9)).column_of(0.7)
