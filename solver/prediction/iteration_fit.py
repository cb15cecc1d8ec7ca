"""The latency model that an engine learns of itself while it serves."""

from dataclasses import dataclass

import numpy as np

from shared.contracts.base import Seconds
from shared.contracts.estimates import LatencyCoefficients
from solver.prediction.least_squares import Floats, non_negative

_WINDOW = 512
_ANCHOR_WEIGHT = 0.05
"""Of what was believed before, in iterations that it would have predicted exactly."""
_TRUSTED_ERRORS = 3.0
"""Multiple of the median error beyond which an iteration counts less: it was disturbed."""
_LEAST_ERROR = 0.02
_SWEEPS = 4


@dataclass(frozen=True, slots=True)
class IterationWork:
    """What one iteration computes."""

    tokens: int
    pairs: float
    """Sum over its prefills of n·(before + n/2), for n tokens after *before* others."""
    context_tokens: int
    """Tokens that all its requests attend to, computed before."""


class IterationFit:
    """
    Robust least squares on an engine's latest iterations, held by what was believed before.

    Residuals are relative, so that short decode iterations count as much as long prefills. What
    the iterations do not tell apart stays as it was: with few kinds of batches linear and
    quadratic time look the same.

    Differs from `latency_model.OnlineLatencyFit`: always knows which prefill attends to what, so
    that a decode's long context does not look like a prefill's; and is held by what was believed
    before, since an engine has to predict from its first iteration on.

    Args:
        prior: Believed until the engine shows otherwise; no term may be negative.
        window: Iterations that it learns from.
    """

    def __init__(self, prior: LatencyCoefficients, *, window: int = _WINDOW) -> None:
        pair_s = prior.cross_s
        # A term of 0 could never be learnt: coefficients are found as multiples of the prior's.
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
        # float64[window, terms] and float64[window], written round and round.
        self._terms = np.zeros((window, len(self._prior)))
        self._durations_s = np.zeros(window)
        self.count = 0

    def observe(self, work: IterationWork, duration_s: Seconds) -> None:
        """Learn from one iteration; ones without work or time are ignored."""
        if duration_s <= 0 or work.tokens <= 0:
            return
        place = self.count % len(self._durations_s)
        tokens = float(work.tokens)
        self._terms[place] = (1.0, tokens, tokens * tokens, work.pairs, work.context_tokens)
        self._durations_s[place] = duration_s
        self.count += 1

    def fit(self) -> LatencyCoefficients:
        """
        The coefficients now, none of them negative.

        As in `LatencyTable.from_coefficients`: exact for an iteration with one prefill.
        """
        self._multiples = self._solve()
        constant_s, linear_s, squared_s, pair_s, context_s = (
            float(value) for value in self._multiples * self._prior
        )
        return LatencyCoefficients(
            constant_s=constant_s,
            linear_s=linear_s,
            attention_s=squared_s + pair_s / 2,
            cross_s=pair_s,
            context_s=context_s,
        )

    def _solve(self) -> Floats:
        """Multiples of the prior's terms: least squares, reweighted by Huber's rule."""
        size = min(self.count, len(self._durations_s))
        terms = self._terms[:size] * self._prior
        durations_s = self._durations_s[:size]
        multiples = self._multiples
        scale_s = durations_s
        for sweep in range(_SWEEPS if size else 0):
            shares = terms / scale_s[:, None]
            ratios = durations_s / scale_s
            errors = np.abs(ratios - shares @ multiples)
            # The first sweep's errors are those of what was believed before.
            weighted = (shares.T * _weights(errors)) if sweep else shares.T
            matrix = weighted @ shares + _ANCHOR_WEIGHT * np.eye(len(multiples))
            vector = weighted @ ratios + _ANCHOR_WEIGHT * self._multiples
            diagonal = np.sqrt(np.diag(matrix))
            scaled = non_negative(matrix / np.outer(diagonal, diagonal), vector / diagonal)
            multiples = scaled / diagonal
            scale_s = np.maximum(terms @ multiples, _LEAST_ERROR * durations_s)
        return multiples


def _weights(errors: Floats) -> Floats:
    limit = _TRUSTED_ERRORS * max(_LEAST_ERROR, float(np.median(errors)))
    return np.asarray(limit / np.maximum(errors, limit), dtype=np.float64)
