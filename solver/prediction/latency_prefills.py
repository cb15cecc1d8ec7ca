"""Prefill times as a latency model has them, for routers without fitted trees."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from shared.contracts.estimates import LatencyCoefficients
from solver.prediction.prefill_features import CACHED_COLUMN, PROMPT_COLUMN, RUNNING_COLUMN
from solver.prediction.quantile_trees import Prediction

PRIOR = LatencyCoefficients(constant_s=0.01, linear_s=1e-4)
"""Of an engine that nothing is known of; corrections set its scale within some 60 requests."""


class LatencyPrefills:
    """
    One iteration that computes what is not cached, beside the sequences that run.

    All levels are the mean: how far they are from it is left to the calibration, which has seen
    enough within some 60 requests. Until then coverage says not to trust them.

    Args:
        latency: Of the engine.
        levels: To answer for, rising.
    """

    def __init__(self, latency: LatencyCoefficients, levels: Sequence[float]) -> None:
        self._latency = latency
        self.levels = tuple(levels)

    def predict(self, features: NDArray[np.float64]) -> Prediction:
        """Of each row of *features*, as `feature_matrix` makes it."""
        latency = self._latency
        cached = features[:, CACHED_COLUMN]
        tokens = np.maximum(1.0, features[:, PROMPT_COLUMN] - cached) + features[:, RUNNING_COLUMN]
        mean_s = (
            latency.constant_s
            + latency.linear_s * tokens
            + latency.attention_s * tokens**2
            + latency.cross_s * tokens * cached
            + latency.context_s * cached
        )
        return Prediction(np.repeat(mean_s[:, None], len(self.levels), axis=1), mean_s)

    def column_of(self, level: float) -> int:
        """
        Where predictions have the quantile of *level*.

        Raises:
            ValueError: It is not one of the levels.
        """
        if level not in self.levels:
            raise ValueError(f"no prefill times for level {level}; there are {self.levels}")
        return self.levels.index(level)
