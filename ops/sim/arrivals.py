"""Arrival processes, whose times are in seconds from 0."""

from collections.abc import Callable

import numpy as np

from shared.contracts.base import Seconds


def poisson(random: np.random.Generator, *, rate_rps: float, duration_s: Seconds) -> list[float]:
    """Independent arrivals at a constant rate (Poisson process)."""
    return gamma(random, rate_rps=rate_rps, duration_s=duration_s, variation=1.0)


def gamma(
    random: np.random.Generator, *, rate_rps: float, duration_s: Seconds, variation: float
) -> list[float]:
    """
    Arrivals whose gaps have the coefficient of variation *variation*; 1 is Poisson, more is bursty.
    """
    shape = 1.0 / variation**2
    count = int(rate_rps * duration_s + 10 * (rate_rps * duration_s) ** 0.5 * variation + 100)
    times = np.cumsum(random.gamma(shape, 1.0 / (shape * rate_rps), count))
    return [float(time) for time in times[times < duration_s]]


def varying(
    random: np.random.Generator,
    *,
    rate_at: Callable[[float], float],
    peak_rps: float,
    duration_s: Seconds,
) -> list[float]:
    """Poisson arrivals with a rate that changes, by thinning; *peak_rps* bounds the rate."""
    candidates = poisson(random, rate_rps=peak_rps, duration_s=duration_s)
    keep = random.random(len(candidates)) * peak_rps
    return [at for at, level in zip(candidates, keep, strict=True) if level < rate_at(at)]


def square_wave(
    random: np.random.Generator,
    *,
    low_rps: float,
    high_rps: float,
    half_period_s: Seconds,
    duration_s: Seconds,
) -> list[float]:
    """Poisson arrivals that alternate between a low and a high rate, low first (QoServe §4.3)."""

    def rate_at(at: float) -> float:
        return high_rps if int(at // half_period_s) % 2 else low_rps

    return varying(random, rate_at=rate_at, peak_rps=high_rps, duration_s=duration_s)
