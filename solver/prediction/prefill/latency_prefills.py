"""Prefill times from a latency model, for routers without fitted trees."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from shared.contracts.estimates import LatencyCoefficients
from solver.prediction.latency.latency_model import predict_s
from solver.prediction.prefill.features import CACHED_COLUMN, PROMPT_COLUMN, RUNNING_COLUMN
from solver.prediction.prefill.quantile_trees import Prediction

PRIOR = LatencyCoefficients(constant_s=0.01, linear_s=1e-4)
"""
Latency model of an unknown engine; corrections set the scale of times within some 60 requests.
"""


class LatencyPrefills:
    """
    Predicts a prefill as one iteration with the uncached tokens and the running sequences.

    The quantiles of all levels equal the mean. The calibration corrects them after some 60
    requests; until then their coverage is too low, so predictions are not trusted.

    Args:
        levels: Levels to predict, rising.
    """

    def __init__(self, latency: LatencyCoefficients, levels: Sequence[float]) -> None:
        self._latency = latency
        self.levels = tuple(levels)

    def predict(self, features: NDArray[np.float64]) -> Prediction:
        """Prediction for each row of *features*, as made by `feature_matrix`."""
        cached = features[:, CACHED_COLUMN]
        tokens = np.maximum(1.0, features[:, PROMPT_COLUMN] - cached) + features[:, RUNNING_COLUMN]
        mean_s = predict_s(self._latency, compute_tokens=tokens, context_tokens=cached)
        return Prediction(np.repeat(mean_s[:, None], len(self.levels), axis=1), mean_s)

    def column_of(self, level: float) -> int:
        """
        Column of predictions that has the quantile of *level*.

        Raises:
            ValueError: *level* is not one of the levels.
        """
        if level not in self.levels:
            raise ValueError(f"no prefill times for level {level}; predicted levels: {self.levels}")
        return self.levels.index(level)
