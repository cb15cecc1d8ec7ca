"""How wrong predictions were, judged by what came after them."""

from dataclasses import dataclass

import numpy as np

from shared.contracts.base import Seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictionErrors:
    """Of the latest predictions, relative to what they predicted."""

    median: float
    """Of the absolute errors."""
    p95: float
    bias: float
    """Median of the signed errors: negative predicts too little."""
    count: int


class ErrorWindow:
    """
    Errors of the latest predictions that were made before their outcome was known.

    Args:
        window: How many.
    """

    def __init__(self, *, window: int = 512) -> None:
        self._errors = np.zeros(window)
        self._count = 0

    def observe(self, *, predicted_s: Seconds, actual_s: Seconds) -> None:
        """One prediction came to be judged; *actual_s* is positive."""
        self._errors[self._count % len(self._errors)] = predicted_s / actual_s - 1
        self._count += 1

    def errors(self) -> PredictionErrors | None:
        """Over the window; None before the first."""
        known = self._errors[: self._count]
        if not len(known):
            return None
        median, p95 = np.quantile(np.abs(known), (0.5, 0.95))
        return PredictionErrors(
            median=float(median), p95=float(p95), bias=float(np.median(known)), count=len(known)
        )
