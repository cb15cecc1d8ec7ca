"""Random numbers whose state is an array, so that a search can stop and resume."""

import numpy as np
from numpy.typing import NDArray

from solver.jit import inlined

Chance = NDArray[np.uint64]
"""State of a random number generator, uint64[1], not 0."""

_FACTOR = np.uint64(2685821657736338717)
_A, _B, _C, _HALF, _TOP = (np.uint64(bits) for bits in (12, 25, 27, 32, 11))
_UNIT = 1.0 / (1 << 53)


def chance_of(seed: int) -> Chance:
    """State of a random number generator for *seed*; equal seeds give equal numbers."""
    return np.random.SeedSequence(seed).generate_state(1, np.uint64) | np.uint64(1)


@inlined
def draw(chance: Chance) -> np.uint64:
    """Return 64 random bits. Source: Vigna's xorshift64*."""
    x = chance[0]
    x ^= x >> _A
    x ^= x << _B
    x ^= x >> _C
    chance[0] = x
    return np.uint64(x * _FACTOR)


@inlined
def below(chance: Chance, bound: int) -> int:
    """Random integer from 0 to *bound* - 1; *bound* is at least 1 and below 2**31."""
    return int(np.int64(((draw(chance) >> _HALF) * np.uint64(bound)) >> _HALF))


@inlined
def unit(chance: Chance) -> float:
    """Random number from 0 (inclusive) to 1 (exclusive)."""
    return float(draw(chance) >> _TOP) * _UNIT
