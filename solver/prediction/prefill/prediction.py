"""Predicted prefill times, of trees or of a latency model; loads no kernels."""

from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Prediction:
    """Predicted prefill times of one request at several candidate instances."""

    quantiles_s: NDArray[np.float64]
    """Quantiles of the prefill time, float64[num_candidates, num_levels]; no row decreases."""
    mean_s: NDArray[np.float64]
    """Mean prefill times in seconds, float64[num_candidates]."""

    def of(self, candidate: int) -> Self:
        """The prediction for one candidate, as a prediction with one row."""
        rows = slice(candidate, candidate + 1)
        return type(self)(self.quantiles_s[rows], self.mean_s[rows])
