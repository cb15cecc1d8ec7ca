"""Time of one forward pass (ConServe §4.2), fitted online."""

import math
from typing import TypeVar

import numpy as np

from shared.contracts.base import Seconds
from shared.contracts.estimates import LatencyCoefficients
from shared.contracts.telemetry import Iteration
from solver.prediction.disturbances import Indices, kinds_of, trust, weighted_median
from solver.prediction.least_squares import Floats, non_negative
from solver.prediction.prediction_errors import ErrorWindow, PredictionErrors

NUM_TERMS = 5
_REACH = 2.0
"""Of the memory: what is older weighs an eighth, and is left out."""
_SWEEPS = 6
"""Fits, each of which leaves out what was disturbed by the one before; more change nothing."""
_LEAST_SHARE = 0.02
_LEAST_S = 1e-6
"""Shorter times are a clock's resolution."""


Times = TypeVar("Times", float, Floats)


def _sum_of_terms(coefficients: LatencyCoefficients, tokens: Times, context: Times) -> Times:
    return (
        coefficients.constant_s
        + coefficients.linear_s * tokens
        + coefficients.attention_s * tokens**2
        + coefficients.cross_s * tokens * context
        + coefficients.context_s * context
    )


def predict_s(
    coefficients: LatencyCoefficients, *, compute_tokens: float, context_tokens: float
) -> Seconds:
    """Predicted duration of an iteration; monotone in both arguments."""
    return _sum_of_terms(coefficients, compute_tokens, context_tokens)


def predict_each_s(
    coefficients: LatencyCoefficients, *, compute_tokens: Floats, context_tokens: Floats
) -> Floats:
    """As `predict_s`, of many iterations: float64[n] each."""
    return _sum_of_terms(coefficients, compute_tokens, context_tokens)


class OnlineLatencyFit:
    """
    Robust least squares over the latest iterations, older ones weighing less, no term negative.

    Residuals are relative, so that short decode iterations count as much as long prefills.
    Iterations unlike most others of their size (a pause, a model that loads, a neighbour's
    burst) count for little or nothing, be they hundreds on end. An engine that has become
    another is believed once clearly most of the weight says so: after *memory* iterations at most.

    Source: ConServe §4.2, polynomial regression.
    Differs: learnt while serving instead of from one offline run; P² and P·C have coefficients
        of their own, since for a batch of several requests P·(P + C) is neither.
    Decided: forgetting and what counts as disturbed; the paper profiles an idle engine.

    Args:
        memory: Iterations after which an old one weighs 1/e; after twice as many it is forgotten.
    """

    def __init__(self, *, memory: float = 2000.0) -> None:
        if not memory >= 1:
            raise ValueError(f"memory has to be at least 1 iteration; it is {memory:g}")
        self._memory = memory
        # float64[window, terms] and float64[window], written round and round.
        self._terms = np.zeros((math.ceil(_REACH * memory), NUM_TERMS))
        self._durations_s = np.ones(len(self._terms))
        self._coefficients: LatencyCoefficients | None = None
        self._errors = ErrorWindow()
        self.count = 0

    def observe(self, iteration: Iteration) -> None:
        """Learn from one iteration; ones without work or time are ignored."""
        p, c = float(iteration.compute_tokens), float(iteration.context_tokens)
        duration_s = iteration.duration_s
        if not _LEAST_S <= duration_s < math.inf or p <= 0 or c < 0:
            return
        place = self.count % len(self._terms)
        self._terms[place] = (1.0, p, p * p, p * c, c)
        self._durations_s[place] = duration_s
        self.count += 1
        if self._coefficients is not None:
            predicted_s = predict_s(self._coefficients, compute_tokens=p, context_tokens=c)
            self._errors.observe(predicted_s=predicted_s, actual_s=duration_s)

    def fit(self) -> LatencyCoefficients | None:
        """The coefficients now, or None before enough iterations to tell the terms apart."""
        if self.count < 2 * NUM_TERMS:
            return None
        solution = self._solve()
        self._coefficients = LatencyCoefficients(
            constant_s=float(solution[0]),
            linear_s=float(solution[1]),
            attention_s=float(solution[2]),
            cross_s=float(solution[3]),
            context_s=float(solution[4]),
        )
        return self._coefficients

    @property
    def errors(self) -> PredictionErrors | None:
        """Of predictions made before their iteration was seen, disturbed ones included."""
        return self._errors.errors()

    def _solve(self) -> Floats:
        size = min(self.count, len(self._terms))
        terms, durations_s = self._terms[:size], self._durations_s[:size]
        ages = (self.count - 1 - np.arange(size)) % len(self._terms)
        remembered = np.exp(-ages / self._memory)
        kinds = kinds_of(terms[:, 1])
        solution = np.zeros(NUM_TERMS)
        # Nothing is known at first, so an iteration is held against others of its size.
        expected_s = _medians_s(durations_s, kinds, remembered)
        for _ in range(_SWEEPS):
            trusted = trust(np.log(durations_s / expected_s), kinds, remembered)
            weighted = remembered * trusted / expected_s**2
            matrix = (terms.T * weighted) @ terms
            solution = _non_negative(matrix, terms.T @ (weighted * durations_s))
            # A term that was never seen would leave iterations that take no time.
            expected_s = np.maximum(terms @ solution, _LEAST_SHARE * durations_s)
        return solution


def _medians_s(durations_s: Floats, kinds: Indices, weights: Floats) -> Floats:
    """float64[n]: the median of each one's kind."""
    medians_s = [
        weighted_median(durations_s[kinds == kind], weights[kinds == kind])
        for kind in range(int(kinds.max()) + 1)
    ]
    of_each: Floats = np.array(medians_s)[kinds]
    return of_each


def _non_negative(matrix: Floats, vector: Floats) -> Floats:
    """The coefficients, scaled so that all count alike; terms that stay unseen are 0."""
    scale = np.sqrt(np.diag(matrix))
    scale[scale <= 0] = 1.0
    scaled = matrix / np.outer(scale, scale) + 1e-9 * np.eye(NUM_TERMS)
    solution: Floats = non_negative(scaled, vector / scale) / scale
    return solution
