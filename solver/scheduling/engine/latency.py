"""Iteration times for the scheduler: a table by token count, and the inverse of the table."""

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Protocol, runtime_checkable

import numpy as np

from shared.contracts.base import Seconds
from shared.contracts.estimates import LatencyCoefficients
from solver.prediction.latency.iteration_fit import IterationFit, IterationWork

STEP_TOKENS = 8
"""
Largest distance of two measured points between which the time is a step instead of a ramp, because
kernels compute whole tiles.
"""


@dataclass(frozen=True, slots=True)
class LatencyTable:
    """
    Time of one iteration: a table over tokens, plus attention.

    duration_s = tokens_s[tokens] + pair_s·pairs + context_s·context, where *pairs* is the sum over
    prefills of n·(before + n/2) for n tokens computed after *before* other tokens, and *context*
    counts the tokens that all requests attend to.

    Args:
        tokens_s: Seconds by token count from 0; never falling.
        pair_s: Seconds per pair of a prefill token and a token that it attends to.
        context_s: Seconds per token of context that is read.
    """

    tokens_s: tuple[Seconds, ...]
    pair_s: Seconds = 0.0
    context_s: Seconds = 0.0

    @property
    def max_tokens(self) -> int:
        """Largest number of tokens that the table covers."""
        return len(self.tokens_s) - 1

    def predict_s(self, tokens: int, pairs: float, context_tokens: float) -> Seconds:
        """
        Predicted duration of an iteration; above the table's range, extrapolated by its mean time
        per token.
        """
        attention_s = self.pair_s * pairs + self.context_s * context_tokens
        if tokens < len(self.tokens_s):
            return self.tokens_s[tokens] + attention_s
        return self.tokens_s[-1] * tokens / self.max_tokens + attention_s

    def tokens_within(self, limit_s: Seconds) -> int:
        """
        Largest number of tokens whose table time is at most *limit_s*; -1 if even zero tokens take
        longer.
        """
        return bisect_right(self.tokens_s, limit_s) - 1

    @classmethod
    def from_points(
        cls,
        points: Mapping[int, Seconds],
        *,
        max_tokens: int,
        overhead_s: Seconds = 0.0,
        pair_s: Seconds = 0.0,
        context_s: Seconds = 0.0,
    ) -> "LatencyTable":
        """
        A latency table through measured *points*, at least two, extrapolated in proportion at its
        ends.

        Where measured times fall with more tokens, the table is constant: a time is never below
        that of fewer tokens.
        """
        known = sorted(points.items())
        dense = [known[0][1]] * (known[0][0] + 1)
        for (low, low_s), (high, high_s) in pairwise(known):
            width = high - low
            for n in range(low + 1, high + 1):
                ramp = 1.0 if width <= STEP_TOKENS else (n - low) / width
                dense.append(low_s + (high_s - low_s) * ramp)
        last, last_s = known[-1]
        dense.extend(last_s * n / last for n in range(last + 1, max_tokens + 1))
        rising = accumulate(dense[: max_tokens + 1], max)
        return cls(tuple(overhead_s + time_s for time_s in rising), pair_s, context_s)

    @classmethod
    def from_coefficients(
        cls, coefficients: LatencyCoefficients, *, max_tokens: int
    ) -> "LatencyTable":
        """
        The latency table of a fitted latency model.

        The table equals the model for one prefill. For a mixed batch the table differs from the
        model: the context of a decode only costs the time to read it, not a share of the prefills'
        attention.
        """
        squared_s = coefficients.attention_s - coefficients.cross_s / 2
        # Vectorised, because engine cores make a new table while they serve.
        n = np.arange(max_tokens + 1, dtype=np.float64)
        table = coefficients.constant_s + coefficients.linear_s * n + squared_s * n * n
        rising = np.maximum.accumulate(table).tolist()
        return cls(tuple(rising), coefficients.cross_s, coefficients.context_s)


_FIRST_FIT = 16
"""Number of iterations before the latency model is fitted for the first time."""
_FIT_PERIOD = 64
"""
Number of iterations between two fits of the latency model; each fit builds a table of all token
counts.
"""


@runtime_checkable
class FollowsLatency(Protocol):
    """A policy that plans with iteration times, and takes newer ones while the engine runs."""

    def set_latency(self, latency: LatencyTable) -> None:
        """Use *latency* for decisions from now on."""
        ...


class OnlineLatencyModel:
    """
    A latency table that is fitted to the engine's iterations.

    Args:
        prior: Coefficients until the first fit.
        max_tokens: Largest token count of the table.
    """

    def __init__(self, prior: LatencyCoefficients, *, max_tokens: int) -> None:
        self._fit = IterationFit(prior)
        self._max_tokens = max_tokens
        self._next_fit = _FIRST_FIT
        self.coefficients = prior
        """Latency coefficients of the current table."""
        self.table = LatencyTable.from_coefficients(prior, max_tokens=max_tokens)

    def observe(self, work: IterationWork, duration_s: Seconds) -> LatencyTable | None:
        """Learn from an iteration; return a new latency table after each fit, else None."""
        self._fit.observe(work, duration_s)
        if self._fit.count < self._next_fit:
            return None
        # Fits after 16, 32 and 64 iterations, then every 64.
        self._next_fit = self._fit.count + min(self._fit.count, _FIT_PERIOD)
        self.coefficients = self._fit.fit()
        self.table = LatencyTable.from_coefficients(self.coefficients, max_tokens=self._max_tokens)
        return self.table

    def predict_s(self, work: IterationWork) -> Seconds:
        """Predicted duration of an iteration."""
        return self.table.predict_s(work.tokens, work.pairs, work.context_tokens)
