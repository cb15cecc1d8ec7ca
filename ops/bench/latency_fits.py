"""The latency model's terms and QoServe's forest, fitted to the same iterations."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ops.baselines.prediction.iteration_forest import Decodes, IterationForest, iteration_matrix
from ops.baselines.prediction.iteration_forest_fit import fit_iteration_forest
from shared.contracts.base import Seconds
from shared.contracts.estimates import LatencyCoefficients
from shared.contracts.telemetry import EngineIteration
from solver.prediction.latency.latency_model import OnlineLatencyFit, sum_of_terms

LARGEST_CHUNK = 2048

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Fits:
    """The terms of the latency model and QoServe's forest, fitted to the same iterations."""

    terms: LatencyCoefficients
    forest: IterationForest

    @classmethod
    def of(cls, known: Sequence[EngineIteration], seed: int) -> "Fits":
        fit = OnlineLatencyFit()
        for each in known:
            fit.observe(each, each.prefill_pairs)
        terms = fit.fit()
        if terms is None:
            raise RuntimeError(f"{len(known)} iterations are too few to learn from")
        return cls(terms, fit_iteration_forest(known, seed=seed))

    def predicted_s(self, iterations: list[EngineIteration]) -> dict[str, Floats]:
        """Predicted times of *iterations* in seconds by each model, float64[n]."""
        rows = iteration_matrix(iterations)
        pairs = np.array([each.prefill_pairs for each in iterations])
        return {
            "terms": self._terms_s(rows[:, 0], rows[:, 1], pairs),
            "forest": self.forest.predict_s(rows),
        }

    def chunks(self, budget_s: Seconds, beside: Decodes, before: float) -> dict[str, int]:
        """
        Largest chunk by each model that takes at most *budget_s*, after *before* computed tokens of
        the prompt.
        """
        most_tokens = max(0, min(LARGEST_CHUNK, self.forest.most_tokens - beside.num_decodes))
        chunks: Floats = np.arange(1, most_tokens + 1, dtype=np.float64)
        context_tokens = np.full(most_tokens, float(beside.context_tokens))
        times_s = self._terms_s(
            chunks + beside.num_decodes, context_tokens, chunks * (before + chunks / 2)
        )
        return {
            "terms": int(np.searchsorted(times_s, budget_s, side="right")),
            "forest": self.forest.largest_chunk(budget_s, beside, most_tokens=LARGEST_CHUNK),
        }

    def _terms_s(self, tokens: Floats, context_tokens: Floats, pairs: Floats) -> Floats:
        total_s = sum_of_terms(self.terms, tokens, context_tokens, pairs)
        return np.maximum(self.terms.constant_s, total_s)
