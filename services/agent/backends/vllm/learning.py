"""The engine core's own latency model, learnt while it serves."""

from shared.contracts.base import Seconds
from shared.contracts.estimates import LatencyCoefficients
from solver.prediction.iteration_fit import IterationFit, IterationWork
from solver.scheduling.latency import LatencyTable

_FIRST_FIT = 16
"""Iterations before the prior is corrected for the first time."""
_FIT_PERIOD = 64
"""Iterations between fits; each makes a table of all token counts."""


class LatencyLearner:
    """
    A table that follows the engine.

    Args:
        prior: Believed at first.
        max_tokens: The table's size.
    """

    def __init__(self, prior: LatencyCoefficients, *, max_tokens: int) -> None:
        self._fit = IterationFit(prior)
        self._max_tokens = max_tokens
        self._next_fit = _FIRST_FIT
        self.coefficients = prior
        """As of the table."""
        self.table = LatencyTable.from_coefficients(prior, max_tokens=max_tokens)

    def observe(self, work: IterationWork, duration_s: Seconds) -> LatencyTable | None:
        """Learn from an iteration; gives a new table now and then."""
        self._fit.observe(work, duration_s)
        if self._fit.count < self._next_fit:
            return None
        # At 16, 32 and 64, then every 64.
        self._next_fit = self._fit.count + min(self._fit.count, _FIT_PERIOD)
        self.coefficients = self._fit.fit()
        self.table = LatencyTable.from_coefficients(self.coefficients, max_tokens=self._max_tokens)
        return self.table

    def predict_s(self, work: IterationWork) -> Seconds:
        """Duration of an iteration, as believed now."""
        return self.table.predict_s(work.tokens, work.pairs, work.context_tokens)
