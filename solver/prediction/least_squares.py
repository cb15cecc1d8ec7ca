"""Non-negative least squares, solved by the normal equations."""

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]

_FLAT = 1e-12
_ZERO = 1e-15
"""
Largest absolute value of gradients and coefficients that counts as 0, for a matrix whose diagonal
is near 1.
"""


def non_negative(matrix: Floats, vector: Floats, *, ridge: ArrayLike = 0.0) -> Floats:
    """
    The x >= 0 that minimises x·matrix·x/2 - vector·x, solved for terms scaled to equal size.

    Args:
        matrix: float64[n, n], symmetric and positive definite, except that rows may be 0 for terms
            that were never observed; x is 0 for these terms.
        vector: float64[n].
        ridge: Added to the diagonal after scaling; its values decide between terms that the data do
            not distinguish.

    Source: Lawson and Hanson's active set. It solves a few n x n systems, in 0.1 ms for n = 5.
    """
    size = np.sqrt(np.diag(matrix))
    size[size <= 0] = 1.0
    scaled = matrix / np.outer(size, size) + np.diag(np.broadcast_to(ridge, size.shape))
    solution: Floats = _solved(scaled, vector / size) / size
    return solution


def _solved(matrix: Floats, vector: Floats) -> Floats:
    """The x >= 0 that minimises x·matrix·x/2 - vector·x, for a matrix whose diagonal is near 1."""
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
    """
    The best solution in the active terms; terms that would be negative are removed from *active*.
    """
    while active.any():
        best = np.zeros(len(vector))
        best[active] = np.linalg.solve(matrix[np.ix_(active, active)], vector[active])
        falling = active & (best <= 0)
        if not falling.any():
            return best
        steps = solution[falling] / (solution[falling] - best[falling])
        solution = solution + float(steps.min()) * (best - solution)
        leaving = active & (solution <= _ZERO)
        # The term with the shortest step has reached 0, whatever the rounding error.
        leaving[np.flatnonzero(falling)[int(np.argmin(steps))]] = True
        active &= ~leaving
        solution[~active] = 0.0
    return np.zeros(len(vector))
