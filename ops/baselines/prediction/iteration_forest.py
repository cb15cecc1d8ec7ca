"""Iteration time from a random forest, and the largest chunk within a time (QoServe §3.6)."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from shared.contracts.base import Seconds
from shared.contracts.estimates import LatencyCoefficients
from shared.contracts.telemetry import Iteration
from solver.prediction.latency.latency_model import predict_s
from solver.prediction.prefill.tree_walk import Floats, Forest, walk

FEATURES = ("compute_tokens", "context_tokens", "num_decodes")
CHUNK_STEP_TOKENS = 8
"""Step of chunk sizes above eight tokens, because kernels compute in tiles."""
_LEAST_S = 1e-6


class Decodes(NamedTuple):
    """Work of an iteration to which a chunk is added, and the context of the chunk."""

    num_decodes: int
    context_tokens: int
    """Number of previously computed tokens that all requests of the iteration attend to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class IterationForest:
    """
    A fitted forest as flat arrays: made by `iteration_forest_fit`, evaluated by compiled kernels.

    Each tree predicts log(iteration time / time by a latency model).

    Source: QoServe §3.6.1: a random forest of a batch's time, tuned to err towards small chunks.
    Differs: trees predict ratios instead of seconds. Served iterations have few chunk sizes, and
        trees of seconds predict the same time for all sizes between two of them.
    Decided: the paper does not describe the safety margin. Here it is a high quantile over the
        trees, and no chunk may make an iteration larger than the largest training iteration.
    """

    base: LatencyCoefficients
    forest: Forest
    """All trees of the forest, concatenated; each tree has one output."""
    level: float
    """Quantile level over the trees by which chunks are chosen, 0..1."""
    most_tokens: int
    """Largest number of tokens computed in an iteration from which the forest learned."""

    def predict_s(self, iterations: Floats) -> Floats:
        """
        Expected times of *iterations*: float64[n], positive.

        Args:
            iterations: float64[n, 3], columns as in `FEATURES`.
        """
        multiples: Floats = np.exp(self._logarithms(iterations).mean(axis=1))
        return self._base_s(iterations) * multiples

    def cautious_s(self, iterations: Floats) -> Floats:
        """Quantile `level` of the trees' times; arguments and shape are those of `predict_s`."""
        multiples: Floats = np.exp(np.quantile(self._logarithms(iterations), self.level, axis=1))
        return self._base_s(iterations) * multiples

    def largest_chunk(self, budget_s: Seconds, beside: Decodes, *, most_tokens: int) -> int:
        """
        Largest prefill chunk for which an iteration with *beside* takes at most *budget_s*.

        A larger budget never gives fewer tokens, and every smaller chunk is also within the budget.

        Args:
            budget_s: Time of the whole iteration.
            beside: The other work of the iteration.
            most_tokens: Upper limit of the chunk.

        Returns:
            0 when even one token takes too long.
        """
        most_tokens = min(most_tokens, self.most_tokens - beside.num_decodes)
        step = CHUNK_STEP_TOKENS
        chunks = np.r_[1:step, step : most_tokens + 1 : step]
        chunks = chunks[chunks <= most_tokens]
        iterations = np.empty((len(chunks), len(FEATURES)))
        iterations[:, 0] = chunks + beside.num_decodes
        iterations[:, 1:] = beside.context_tokens, beside.num_decodes
        fits = self.cautious_s(iterations) <= budget_s
        # Stop at the first chunk that does not fit, even if the trees predict that a larger chunk
        # fits.
        num_fitting = len(fits) if fits.all() else int(np.argmin(fits))
        return int(chunks[num_fitting - 1]) if num_fitting else 0

    def _base_s(self, iterations: Floats) -> Floats:
        return base_s(self.base, iterations)

    def _logarithms(self, iterations: Floats) -> Floats:
        """Logarithm of each tree's prediction for each row, float64[n, num_trees]."""
        return walk(np.ascontiguousarray(iterations, dtype=np.float64), self.forest)


def iteration_matrix(iterations: Sequence[Iteration]) -> Floats:
    """Matrix of iterations for the forest, float64[n, 3], columns as in `FEATURES`."""
    rows = [(each.compute_tokens, each.context_tokens, each.num_decodes) for each in iterations]
    return np.array(rows, dtype=np.float64).reshape(-1, len(FEATURES))


def base_s(base: LatencyCoefficients, iterations: Floats) -> Floats:
    """
    Prediction of the latency model *base* for each row, float64[n], at least the resolution of a
    clock.
    """
    tokens, contexts = iterations[:, 0], iterations[:, 1]
    predicted_s = predict_s(base, compute_tokens=tokens, context_tokens=contexts)
    return np.maximum(predicted_s, _LEAST_S)
