"""Time of one forward pass (ConServe §4.2), fitted online."""

import numpy as np
from numpy.typing import NDArray

from shared.contracts.base import Seconds
from shared.contracts.estimates import LatencyCoefficients
from shared.contracts.telemetry import Iteration
from solver.prediction.least_squares import non_negative

NUM_TERMS = 5


def predict_s(
    coefficients: LatencyCoefficients, *, compute_tokens: float, context_tokens: float
) -> Seconds:
    """Predicted duration of an iteration; monotone in both arguments."""
    return (
        coefficients.constant_s
        + coefficients.linear_s * compute_tokens
        + coefficients.attention_s * compute_tokens**2
        + coefficients.cross_s * compute_tokens * context_tokens
        + coefficients.context_s * context_tokens
    )


class OnlineLatencyFit:
    """
    Weighted least squares with forgetting, terms kept non-negative.

    Residuals are relative, so that short decode iterations count as much as long prefills.

    Args:
        forgetting: Weight that the past keeps at each iteration.
    """

    def __init__(self, *, forgetting: float = 0.999) -> None:
        self._forgetting = forgetting
        self._normal = np.zeros((NUM_TERMS, NUM_TERMS))
        self._target = np.zeros(NUM_TERMS)
        self._error = 0.0
        self._error_weight = 0.0
        self._coefficients: LatencyCoefficients | None = None
        self.count = 0

    def observe(self, iteration: Iteration) -> None:
        """Learn from one iteration; ones without work or time are ignored."""
        if iteration.duration_s <= 0 or iteration.compute_tokens <= 0:
            return
        terms = _terms(iteration) / iteration.duration_s
        self._normal = self._forgetting * self._normal + np.outer(terms, terms)
        self._target = self._forgetting * self._target + terms
        self.count += 1
        if self._coefficients is not None:
            predicted_s = predict_s(
                self._coefficients,
                compute_tokens=iteration.compute_tokens,
                context_tokens=iteration.context_tokens,
            )
            error = abs(predicted_s / iteration.duration_s - 1)
            self._error = self._forgetting * self._error + error
            self._error_weight = self._forgetting * self._error_weight + 1

    def fit(self) -> LatencyCoefficients | None:
        """The coefficients now, or None before enough iterations to tell the terms apart."""
        if self.count < 2 * NUM_TERMS:
            return None
        solution = _non_negative(self._normal, self._target)
        self._coefficients = LatencyCoefficients(
            constant_s=float(solution[0]),
            linear_s=float(solution[1]),
            attention_s=float(solution[2]),
            cross_s=float(solution[3]),
            context_s=float(solution[4]),
        )
        return self._coefficients

    @property
    def relative_error(self) -> float | None:
        """Mean absolute relative error of predictions made before their iteration was seen."""
        return self._error / self._error_weight if self._error_weight > 0 else None


def _terms(iteration: Iteration) -> NDArray[np.float64]:
    p, c = float(iteration.compute_tokens), float(iteration.context_tokens)
    return np.array([1.0, p, p * p, p * c, c])


def _non_negative(normal: NDArray[np.float64], target: NDArray[np.float64]) -> NDArray[np.float64]:
    """The coefficients, scaled so that all count alike; terms that stay unseen are 0."""
    scale = np.sqrt(np.diag(normal))
    seen = scale > 0
    scale[~seen] = 1.0
    matrix = normal / np.outer(scale, scale) + 1e-9 * np.eye(NUM_TERMS)
    vector = target / scale
    return np.asarray(non_negative(matrix, vector) / scale, dtype=np.float64)
