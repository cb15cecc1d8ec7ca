"""Iterations whose time rises in steps, because kernels compute in tiles."""

import numpy as np

from shared.contracts.estimates import LatencyCoefficients
from shared.contracts.telemetry import Iteration
from solver.prediction.latency.latency_model import predict_s

TRUE = LatencyCoefficients(constant_s=0.005, linear_s=4e-5, attention_s=1e-8, context_s=2e-7)
TILE = 128
"""Width in tokens of a step of the time curve."""


def exact_s(tokens: int, context: int) -> float:
    """Time of an iteration without noise."""
    return predict_s(TRUE, compute_tokens=-(-tokens // TILE) * TILE, context_tokens=context)


def iterations(count: int, *, noise: float = 0.03, seed: int = 1) -> list[Iteration]:
    """*count* iterations with random work, half of them with a chunk of a prompt."""
    random = np.random.default_rng(seed)
    sample = []
    for number in range(count):
        decodes = int(random.integers(1, 64))
        chunk = int(random.integers(1, 2048)) if number % 2 else 0
        context = int(random.integers(0, 40_000))
        duration_s = exact_s(decodes + chunk, context) * float(random.lognormal(0.0, noise))
        sample.append(
            Iteration(
                compute_tokens=decodes + chunk, context_tokens=context, num_decodes=decodes,
                duration_s=duration_s,
            )
        )  # fmt: skip
    return sample
