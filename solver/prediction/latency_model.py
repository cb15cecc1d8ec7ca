"""Time of one forward pass (ConServe §4.2), fitted online."""

import itertools
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
_SWEEPS = 20
"""Fits at most, each of which leaves out what was disturbed by the one before."""
_SETTLED = 1e-3
"""Of every time that the fit explains: when one sweep changes less, more change nothing."""
_LEAST_SHARE = 0.02
_LEAST_S = 1e-6
"""Shorter times are a clock's resolution."""
_BELIEVED_TOKENS = (1, 8, 64, 256, 512, 1024, 2048)
_BELIEVED_CONTEXTS = (0, 1024, 8192)
_RIDGE = (1e-13, 1e-10, 1e-9, 1e-9, 1e-9)
"""Of the terms in their order: what decides between terms that look the same."""


Times = TypeVar("Times", float, Floats)


def _sum_of_terms(coefficients: LatencyCoefficients, tokens: Times, context: Times) -> Times:
    return (
        coefficients.constant_s
        + coefficients.linear_s * tokens
        + coefficients.attention_s * tokens**2
        + coefficients.cross_s * tokens * context
        + coefficients.context_s * context
    )


def _sum_of_pairs(
    coefficients: LatencyCoefficients, tokens: Times, context: Times, pairs: Times
) -> Times:
    return (
        coefficients.constant_s
        + coefficients.linear_s * tokens
        + coefficients.attention_s * tokens**2
        + coefficients.cross_s * (pairs - tokens**2 / 2)
        + coefficients.context_s * context
    )


def predict_s(
    coefficients: LatencyCoefficients, *, compute_tokens: float, context_tokens: float
) -> Seconds:
    """Predicted duration of an iteration; monotone in both arguments."""
    return _sum_of_terms(coefficients, compute_tokens, context_tokens)


def predict_batch_s(
    coefficients: LatencyCoefficients,
    *,
    compute_tokens: float,
    context_tokens: float,
    prefill_pairs: float,
) -> Seconds:
    """
    As `predict_s`, of a batch whose prefills attend to their own context alone.

    Equal to it for one prefill, as `LatencyTable.from_coefficients` is. Monotone where
    attention_s is at least half of cross_s, as in whatever `OnlineLatencyFit` learns of such
    batches; never below constant_s.

    Args:
        coefficients: Of an iteration.
        compute_tokens: Of prefills and decodes.
        context_tokens: That all of them attend to, computed before.
        prefill_pairs: Sum over prefills of n·(before + n/2), for n tokens after *before* others.
    """
    total_s = _sum_of_pairs(coefficients, compute_tokens, context_tokens, prefill_pairs)
    return max(coefficients.constant_s, total_s)


def predict_each_batch_s(
    coefficients: LatencyCoefficients,
    *,
    compute_tokens: Floats,
    context_tokens: Floats,
    prefill_pairs: Floats,
) -> Floats:
    """As `predict_batch_s`, of many iterations: float64[n] each."""
    total_s = _sum_of_pairs(coefficients, compute_tokens, context_tokens, prefill_pairs)
    return np.maximum(coefficients.constant_s, total_s)


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

    Where iterations tell which prefill attends to what, tokens times context are those of prefills
    alone; iterations that do not tell count as if all of their context were one prefill's. Where
    none tells, P·C is of all tokens and all context.

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
        self._tells_pairs = np.zeros(len(self._terms), dtype=bool)
        self._coefficients: LatencyCoefficients | None = None
        self._errors = ErrorWindow()
        self._num_written = 0
        self.count = 0
        """Iterations observed; what is only believed does not count."""

    def believe(self, coefficients: LatencyCoefficients) -> None:
        """
        Begin with what was learnt before, as if from one iteration of each of some shapes.

        So the first iterations, most of them alike, decide only what they tell of.
        """
        for tokens, context in itertools.product(_BELIEVED_TOKENS, _BELIEVED_CONTEXTS):
            pairs = tokens * context + tokens**2 / 2
            expected_s = predict_batch_s(
                coefficients,
                compute_tokens=tokens,
                context_tokens=context,
                prefill_pairs=pairs,
            )
            if _LEAST_S <= expected_s < math.inf:
                self._write((1.0, tokens, tokens**2, pairs, context), expected_s, tells=True)

    def observe(self, iteration: Iteration, prefill_pairs: float | None = None) -> None:
        """
        Learn from one iteration; ones without work or time are ignored.

        Args:
            iteration: What it computed, and its time.
            prefill_pairs: As in `predict_batch_s`; None if that is not known.
        """
        p, c = float(iteration.compute_tokens), float(iteration.context_tokens)
        duration_s = iteration.duration_s
        if not _LEAST_S <= duration_s < math.inf or p <= 0 or c < 0 or (prefill_pairs or 0.0) < 0:
            return
        # As if it were one prefill's, where that is not told.
        one_prefills = p * c + p * p / 2
        pairs = one_prefills if prefill_pairs is None else prefill_pairs
        self._write((1.0, p, p * p, pairs, c), duration_s, tells=prefill_pairs is not None)
        self.count += 1
        if self._coefficients is not None:
            predicted_s = predict_batch_s(
                self._coefficients, compute_tokens=p, context_tokens=c, prefill_pairs=pairs
            )
            self._errors.observe(predicted_s=predicted_s, actual_s=duration_s)

    def _write(self, terms: tuple[float, ...], duration_s: Seconds, *, tells: bool) -> None:
        place = self._num_written % len(self._terms)
        self._terms[place] = terms
        self._durations_s[place] = duration_s
        self._tells_pairs[place] = tells
        self._num_written += 1

    def fit(self) -> LatencyCoefficients | None:
        """The coefficients now, or None before enough iterations to tell the terms apart."""
        if self._num_written < 2 * NUM_TERMS:
            return None
        size = min(self._num_written, len(self._terms))
        terms = self._terms[:size]
        if self._tells_pairs[:size].any():
            constant_s, linear_s, squared_s, cross_s, context_s = self._solve(terms).tolist()
            # A pair is P·C and half of P² for one prefill.
            attention_s = squared_s + cross_s / 2
        else:
            crossed = terms.copy()
            crossed[:, 3] = terms[:, 1] * terms[:, 4]
            constant_s, linear_s, attention_s, cross_s, context_s = self._solve(crossed).tolist()
        self._coefficients = LatencyCoefficients(
            constant_s=constant_s,
            linear_s=linear_s,
            attention_s=attention_s,
            cross_s=cross_s,
            context_s=context_s,
        )
        return self._coefficients

    @property
    def errors(self) -> PredictionErrors | None:
        """Of predictions made before their iteration was seen, disturbed ones included."""
        return self._errors.errors()

    def _solve(self, terms: Floats) -> Floats:
        """float64[terms]: none negative."""
        size = len(terms)
        durations_s = self._durations_s[:size]
        ages = (self._num_written - 1 - np.arange(size)) % len(self._terms)
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
            before_s = expected_s
            # A term that was never seen would leave iterations that take no time.
            expected_s = np.maximum(terms @ solution, _LEAST_SHARE * durations_s)
            if np.allclose(expected_s, before_s, rtol=_SETTLED, atol=0.0):
                break
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
    """
    The coefficients, scaled so that all count alike; terms that stay unseen are 0.

    What the iterations do not tell apart is constant rather than linear, and that rather than
    anything else: an engine's first ones are often of one token each, and with a part of their
    time for each token a full batch would take seconds.
    """
    scale = np.sqrt(np.diag(matrix))
    scale[scale <= 0] = 1.0
    scaled = matrix / np.outer(scale, scale) + np.diag(_RIDGE)
    solution: Floats = non_negative(scaled, vector / scale) / scale
    return solution
