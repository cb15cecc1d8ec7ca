"""Latency model that an engine learns from its own iterations while it serves."""

from dataclasses import dataclass

import numpy as np

from shared.contracts.base import Seconds
from shared.contracts.estimates import LatencyCoefficients
from solver.prediction.latency.latency_model import coefficients_of
from solver.prediction.least_squares import Floats, non_negative

_WINDOW = 512
_ANCHOR_WEIGHT = 0.05
"""Weight of the prior: the number of iterations that it counts as."""
_TRUSTED_ERRORS = 3.0
"""Multiple of the median error above which an iteration counts as disturbed and has less weight."""
_LEAST_ERROR = 0.02
_SWEEPS = 4


@dataclass(frozen=True, slots=True)
class IterationWork:
    """Amount of computation in one iteration."""

    tokens: int
    pairs: float
    """
    Sum of n·(before + n/2) over the iteration's prefills; n tokens are computed after *before*
    tokens.
    """
    context_tokens: int
    """Previously computed tokens that the requests of the iteration attend to."""


class IterationFit:
    """
    Robust least-squares fit of a latency model to an engine's latest iterations, regularised by a
    prior.

    Residuals are relative, so that short decode iterations count as much as long prefills.
    Coefficients that the iterations do not determine stay at the prior: with few kinds of batches,
    linear and quadratic time cannot be distinguished.

    Unlike `latency_model.OnlineLatencyFit`, this fit always gets the pairs of each prefill, so the
    long context of a decode is not mistaken for the context of a prefill. It also has a prior,
    because an engine must predict from its first iteration on.

    Args:
        prior: Coefficients before the first iteration; no term may be negative.
        window: Number of latest iterations that are fitted.
    """

    def __init__(self, prior: LatencyCoefficients, *, window: int = _WINDOW) -> None:
        pair_s = prior.cross_s
        # Raise terms of 0, which could never be learned: fitted coefficients are multiples of the
        # prior's.
        self._prior = np.maximum(
            [
                prior.constant_s,
                prior.linear_s,
                prior.attention_s - pair_s / 2,
                pair_s,
                prior.context_s,
            ],
            [1e-4, 1e-7, 1e-11, 1e-11, 1e-9],
        )
        self._multiples = np.ones(len(self._prior))
        # float64[window, terms] and float64[window], ring buffers.
        self._terms = np.zeros((window, len(self._prior)))
        self._durations_s = np.zeros(window)
        self.count = 0

    def observe(self, work: IterationWork, duration_s: Seconds) -> None:
        """Learn from one iteration; iterations without work or time are ignored."""
        if duration_s <= 0 or work.tokens <= 0:
            return
        place = self.count % len(self._durations_s)
        tokens = float(work.tokens)
        self._terms[place] = (1.0, tokens, tokens * tokens, work.pairs, work.context_tokens)
        self._durations_s[place] = duration_s
        self.count += 1

    def fit(self) -> LatencyCoefficients:
        """The current coefficients of the latency model, none of them negative."""
        self._multiples = self._solve()
        return coefficients_of(self._multiples * self._prior)

    def _solve(self) -> Floats:
        """
        Fitted coefficients as multiples of the prior: least squares, reweighted by Huber's rule.
        """
        size = min(self.count, len(self._durations_s))
        terms = self._terms[:size] * self._prior
        durations_s = self._durations_s[:size]
        multiples = self._multiples
        scale_s = durations_s
        for sweep in range(_SWEEPS if size else 0):
            shares = terms / scale_s[:, None]
            ratios = durations_s / scale_s
            errors = np.abs(ratios - shares @ multiples)
            # The first sweep uses the errors of the prior.
            weighted = (shares.T * _weights(errors)) if sweep else shares.T
            matrix = weighted @ shares + _ANCHOR_WEIGHT * np.eye(len(multiples))
            vector = weighted @ ratios + _ANCHOR_WEIGHT * self._multiples
            multiples = non_negative(matrix, vector)
            scale_s = np.maximum(terms @ multiples, _LEAST_ERROR * durations_s)
        return multiples


def _weights(errors: Floats) -> Floats:
    limit = _TRUSTED_ERRORS * max(_LEAST_ERROR, float(np.median(errors)))
    return np.asarray(limit / np.maximum(errors, limit), dtype=np.float64)
