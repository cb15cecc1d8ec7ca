"""Least squares without negative coefficients, on the normal equations."""

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

_FLAT = 1e-12
_ZERO = 1e-15
"""Rounding errors of gradients, and of coefficients, for a diagonal near 1."""


def non_negative(matrix: Floats, vector: Floats) -> Floats:
    """
    The x >= 0 that minimises x·matrix·x/2 - vector·x.

    Args:
        matrix: float64[n, n], symmetric, positive definite, its diagonal near 1.
        vector: float64[n].

    Source: Lawson and Hanson's active set. A handful of n x n solutions, 0.1 ms for n = 5.
    """
    size = len(vector)
    solution = np.zeros(size)
    active = np.zeros(size, dtype=bool)
    for _ in range(3 * size):
        gradient = np.where(active, -np.inf, vector - matrix @ solution)
        entering = int(np.argmax(gradient))
        if gradient[entering] <= _FLAT:
            break
        active[entering] = True
        solution = _feasible(matrix, vector, solution, active)
    return solution


def _feasible(
    matrix: Floats, vector: Floats, solution: Floats, active: NDArray[np.bool_]
) -> Floats:
    """The best solution in the active terms; terms that would be negative leave *active*."""
    while active.any():
        best = np.zeros(len(vector))
        best[active] = np.linalg.solve(matrix[np.ix_(active, active)], vector[active])
        falling = active & (best <= 0)
        if not falling.any():
            return best
        steps = solution[falling] / (solution[falling] - best[falling])
        solution = solution + float(steps.min()) * (best - solution)
        leaving = active & (solution <= _ZERO)
        # At least one has reached 0, whatever rounding says.
        leaving[np.flatnonzero(falling)[int(np.argmin(steps))]] = True
        active &= ~leaving
        solution[~active] = 0.0
    return np.zeros(len(vector))
