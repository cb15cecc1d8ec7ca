"""Online fit of the time of one forward pass (ConServe §4.2)."""

import itertools
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from shared.contracts.base import Seconds
from shared.contracts.estimates import LatencyCoefficients
from shared.contracts.telemetry import Iteration
from solver.prediction.latency.disturbances import Indices, kinds_of, trust, weighted_median
from solver.prediction.least_squares import Floats, non_negative

NUM_TERMS = 5
_REACH = 2.0
"""
Length of the buffer of iterations in multiples of the memory; older iterations would weigh under
1/8.
"""
_SWEEPS = 20
"""
Maximum number of sweeps; a sweep is a fit without the iterations that the last sweep found
disturbed.
"""
_SETTLED = 1e-3
"""Relative change of fitted times below which sweeps have converged."""
_LEAST_SHARE = 0.02
_LEAST_S = 1e-6
"""Least time of an iteration; shorter times are below the resolution of clocks."""
_JUDGED = 512
"""Number of the latest predictions whose errors are reported."""
_PRIOR_TOKENS = (1, 8, 64, 256, 512, 1024, 2048)
_PRIOR_CONTEXTS = (0, 1024, 8192)
"""Tokens and contexts of the assumed iterations by which earlier coefficients count."""
_RIDGE = (1e-13, 1e-10, 1e-9, 1e-9, 1e-9)
"""
Ridge of each term: decides between terms that the iterations do not distinguish.

Undetermined time is assigned to the constant first, then to the linear term, then to the other
terms. The first iterations of an engine often have one token each: if their time were assigned to
tokens, a full batch would be predicted to take seconds.
"""


Times = TypeVar("Times", float, Floats)


def sum_of_terms(
    coefficients: LatencyCoefficients, tokens: Times, context: Times, pairs: Times
) -> Times:
    """
    Sum of all terms of the latency model, without the lower bound `constant_s`; pairs as in
    `predict_batch_s`.
    """
    return (
        coefficients.constant_s
        + coefficients.linear_s * tokens
        + coefficients.attention_s * tokens**2
        + coefficients.cross_s * (pairs - tokens**2 / 2)
        + coefficients.context_s * context
    )


def one_prefills_pairs(tokens: Times, context: Times) -> Times:
    """Token pairs of one prefill that computes *tokens* and attends to all of *context*."""
    return tokens * context + tokens**2 / 2


def predict_s(
    coefficients: LatencyCoefficients, *, compute_tokens: Times, context_tokens: Times
) -> Times:
    """
    Predicted duration of one iteration, or float64[n] for n iterations; monotone in both arguments.
    """
    pairs = one_prefills_pairs(compute_tokens, context_tokens)
    return sum_of_terms(coefficients, compute_tokens, context_tokens, pairs)


def predict_batch_s(
    coefficients: LatencyCoefficients,
    *,
    compute_tokens: float,
    context_tokens: float,
    prefill_pairs: float,
) -> Seconds:
    """
    Like `predict_s`, for a batch whose prefills attend to their own context only.

    Equal to `predict_s` for one prefill, as `LatencyTable.from_coefficients` is. Monotone if
    attention_s is at least half of cross_s, which `OnlineLatencyFit` ensures for iterations with
    pairs. Never below constant_s.

    Args:
        compute_tokens: Tokens of prefills and decodes.
        context_tokens: Previously computed tokens that all prefills and decodes attend to.
        prefill_pairs: Sum of n·(before + n/2) over the prefills; n tokens are computed after
            *before* tokens.
    """
    total_s = sum_of_terms(coefficients, compute_tokens, context_tokens, prefill_pairs)
    return max(coefficients.constant_s, total_s)


def coefficients_of(solution: Floats) -> LatencyCoefficients:
    """
    Coefficients of a latency model from the fitted coefficients of 1, P, P², pairs and C.

    As in `LatencyTable.from_coefficients`, the pairs of one prefill are P·C plus half of P².
    """
    constant_s, linear_s, squared_s, pair_s, context_s = solution.tolist()
    return LatencyCoefficients(
        constant_s=constant_s,
        linear_s=linear_s,
        attention_s=squared_s + pair_s / 2,
        cross_s=pair_s,
        context_s=context_s,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictionErrors:
    """Relative errors of the latest predictions of iteration times."""

    median: float
    """Median of the absolute relative errors."""
    p95: float
    bias: float
    """Median of the signed relative errors; negative if predictions are too low."""
    count: int


def errors_of(errors: Sequence[float]) -> PredictionErrors | None:
    """
    Statistics of relative *errors*, predicted over actual time minus 1; None without errors.

    The predictions must have been made before the actual times were known.
    """
    if not errors:
        return None
    median, p95 = np.quantile(np.abs(errors), (0.5, 0.95))
    return PredictionErrors(
        median=float(median), p95=float(p95), bias=float(np.median(errors)), count=len(errors)
    )


class OnlineLatencyFit:
    """
    Robust non-negative least squares over the latest iterations; older iterations weigh less.

    Residuals are relative, so that short decode iterations count as much as long prefills.
    Iterations that differ from most iterations of their size have little or no weight, even if
    there are hundreds in a row. Causes are a pause, a model that loads, or a burst of another
    process. A lasting change of the engine is accepted when most of the weight supports it: after
    at most *memory* iterations.

    If iterations report pairs, the cross term counts only the context of prefills. An iteration
    without reported pairs counts as if all its context belonged to one prefill. If no iteration
    reports pairs, the cross term is P·C of all tokens and all context.

    Source: ConServe §4.2, polynomial regression.
    Differs: the model is learned while serving instead of from one offline run. P² and P·C have
    separate coefficients, since P·(P + C) is wrong for a batch of several requests.
    Decided: forgetting, and the definition of disturbed; the paper profiles an idle engine.

    Args:
        memory: Number of iterations after which an old iteration weighs 1/e; after twice this
            number it is forgotten.
    """

    def __init__(self, *, memory: float = 2000.0) -> None:
        if not memory >= 1:
            raise ValueError(f"memory must be at least 1 iteration; it is {memory:g}")
        self._memory = memory
        # float64[window, terms] and float64[window], ring buffers.
        self._terms = np.zeros((math.ceil(_REACH * memory), NUM_TERMS))
        self._durations_s = np.ones(len(self._terms))
        self._has_pairs = np.zeros(len(self._terms), dtype=bool)
        self._coefficients: LatencyCoefficients | None = None
        self._errors: deque[float] = deque(maxlen=_JUDGED)
        self._num_written = 0
        self.count = 0
        """Number of observed iterations, without the iterations generated by `believe`."""

    def believe(self, coefficients: LatencyCoefficients) -> None:
        """
        Start from earlier coefficients, as if iterations of several shapes had been observed.

        The first real iterations are mostly alike, and change only the terms that they involve.
        """
        for tokens, context in itertools.product(_PRIOR_TOKENS, _PRIOR_CONTEXTS):
            pairs = one_prefills_pairs(tokens, context)
            expected_s = predict_batch_s(
                coefficients,
                compute_tokens=tokens,
                context_tokens=context,
                prefill_pairs=pairs,
            )
            if _LEAST_S <= expected_s < math.inf:
                self._write((1.0, tokens, tokens**2, pairs, context), expected_s, has_pairs=True)

    def observe(self, iteration: Iteration, prefill_pairs: float | None = None) -> None:
        """
        Learn from one iteration; iterations without work or time are ignored.

        Args:
            prefill_pairs: As in `predict_batch_s`; None if unknown.
        """
        p, c = float(iteration.compute_tokens), float(iteration.context_tokens)
        duration_s = iteration.duration_s
        if not _LEAST_S <= duration_s < math.inf or p <= 0 or c < 0 or (prefill_pairs or 0.0) < 0:
            return
        # Pairs that are not reported are assumed to be those of one prefill.
        pairs = one_prefills_pairs(p, c) if prefill_pairs is None else prefill_pairs
        self._write((1.0, p, p * p, pairs, c), duration_s, has_pairs=prefill_pairs is not None)
        self.count += 1
        if self._coefficients is not None:
            predicted_s = predict_batch_s(
                self._coefficients, compute_tokens=p, context_tokens=c, prefill_pairs=pairs
            )
            self._errors.append(predicted_s / duration_s - 1)

    def _write(self, terms: tuple[float, ...], duration_s: Seconds, *, has_pairs: bool) -> None:
        place = self._num_written % len(self._terms)
        self._terms[place] = terms
        self._durations_s[place] = duration_s
        self._has_pairs[place] = has_pairs
        self._num_written += 1

    def fit(self) -> LatencyCoefficients | None:
        """The current coefficients; None until there are enough iterations to determine them."""
        if self._num_written < 2 * NUM_TERMS:
            return None
        size = min(self._num_written, len(self._terms))
        terms = self._terms[:size]
        if self._has_pairs[:size].any():
            solution = self._solve(terms)
        else:
            crossed = terms.copy()
            crossed[:, 3] = terms[:, 1] * terms[:, 4]
            solution = self._solve(crossed)
            # This fit's coefficient of P² includes the P²/2 pairs among a prefill's own tokens.
            solution[2] -= solution[3] / 2
        self._coefficients = coefficients_of(solution)
        return self._coefficients

    @property
    def errors(self) -> PredictionErrors | None:
        """
        Errors of predictions made before the iteration was observed, including disturbed
        iterations.
        """
        return errors_of(self._errors)

    def _solve(self, terms: Floats) -> Floats:
        """Fitted coefficients of the terms, float64[NUM_TERMS], none negative."""
        size = len(terms)
        durations_s = self._durations_s[:size]
        ages = (self._num_written - 1 - np.arange(size)) % len(self._terms)
        remembered = np.exp(-ages / self._memory)
        kinds = kinds_of(terms[:, 1])
        solution = np.zeros(NUM_TERMS)
        # Before the first fit, an iteration is compared with others of its size.
        expected_s = _medians_s(durations_s, kinds, remembered)
        for _ in range(_SWEEPS):
            trusted = trust(np.log(durations_s / expected_s), kinds, remembered)
            weighted = remembered * trusted / expected_s**2
            matrix = (terms.T * weighted) @ terms
            vector = terms.T @ (weighted * durations_s)
            solution = non_negative(matrix, vector, ridge=_RIDGE)
            before_s = expected_s
            # A term that was never observed could make the time of an iteration zero.
            expected_s = np.maximum(terms @ solution, _LEAST_SHARE * durations_s)
            if np.allclose(expected_s, before_s, rtol=_SETTLED, atol=0.0):
                break
        return solution


def _medians_s(durations_s: Floats, kinds: Indices, weights: Floats) -> Floats:
    """Median of each value's kind, float64[n]."""
    medians_s = [
        weighted_median(durations_s[kinds == kind], weights[kinds == kind])
        for kind in range(int(kinds.max()) + 1)
    ]
    of_each: Floats = np.array(medians_s)[kinds]
    return of_each
