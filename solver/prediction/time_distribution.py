"""An uncertain time, given by its mean and variance."""

import math
from dataclasses import dataclass
from statistics import NormalDist
from typing import Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]
_MOST_VARIATION = 1e6
"""
Largest ratio of standard deviation to mean, with which logarithms of all measurements are finite.
"""
_ERFC = np.frompyfunc(math.erfc, 1, 1)
_INVERSE = np.frompyfunc(NormalDist().inv_cdf, 1, 1)


@dataclass(frozen=True, slots=True)
class TimeDistribution:
    """
    Lognormal distributions of times with given moments; arrays of one shape.

    A sum of many independent times tends to the normal distribution. A lognormal distribution also
    tends to it when its spread becomes small relative to its mean. For few terms, the lognormal
    distribution stays above 0 and has a long right tail, as the lengths of answers have (Fenton
    1960, sums of lognormal variables).

    Args:
        mean_s: Seconds, finite, 0 or more.
        variance: Square seconds, finite, 0 or more; 0 means that the time is certain.

    Raises:
        ValueError: A moment is negative or not finite.

    Source: QLM §6, equation 3.
    Differs: distributions are lognormal instead of normal, because a time is not negative. With few
    requests ahead, a normal distribution would predict that a request may begin in the past.
    """

    mean_s: Floats
    variance: Floats

    def __post_init__(self) -> None:
        for name, value in (("mean_s", self.mean_s), ("variance", self.variance)):
            if not (np.all(np.isfinite(value)) and np.all(np.asarray(value) >= 0)):
                raise ValueError(f"{name} of a time must be finite and 0 or more")

    @classmethod
    def of(cls, mean_s: ArrayLike, variance: ArrayLike = 0.0) -> Self:
        """Create a time distribution from numbers or arrays of matching shapes."""
        mean, var = np.broadcast_arrays(*(np.asarray(v, np.float64) for v in (mean_s, variance)))
        return cls(mean, var)

    def __getitem__(self, index: int) -> Self:
        """The time distribution at one index of the arrays."""
        return type(self)(self.mean_s[index], self.variance[index])

    @property
    def sd_s(self) -> Floats:
        return np.sqrt(self.variance)

    @property
    def log_median(self) -> Floats:
        """Logarithm of the median time in seconds; minus infinity for a mean of 0."""
        with np.errstate(divide="ignore"):
            return np.asarray(np.log(self.mean_s) - self.log_sd**2 / 2)

    @property
    def log_sd(self) -> Floats:
        """Standard deviation of the logarithm of the time; 0 if the time is certain."""
        positive = self.mean_s > 0
        with np.errstate(over="ignore"):
            variation = np.where(positive, self.sd_s, 0.0) / np.where(positive, self.mean_s, 1.0)
        return np.asarray(np.sqrt(np.log1p(np.minimum(variation, _MOST_VARIATION) ** 2)))

    def cdf(self, time_s: ArrayLike) -> Floats:
        """Probability that the time is at most *time_s*."""
        return normal_cdf(self.score(time_s))

    def score(self, time_s: ArrayLike) -> Floats:
        """
        Distance of *time_s* from the median, in standard deviations of the logarithm.

        The distance is infinite for *time_s* of 0 or less, and if the time is certain.
        """
        time = np.asarray(time_s, np.float64)
        with np.errstate(divide="ignore", invalid="ignore"):
            away = np.log(np.maximum(time, 0.0)) - self.log_median
            scaled = away / self.log_sd
        certain = np.where(time >= self.mean_s, np.inf, -np.inf)
        return np.asarray(np.where((self.log_sd > 0) & (time > 0), scaled, certain))

    def quantile(self, level: ArrayLike) -> Floats:
        """
        Quantile in seconds: the time is below the quantile with probability *level*.

        Raises:
            ValueError: A level is not above 0 and below 1.
        """
        with np.errstate(over="ignore"):
            found = np.exp(self.log_median + self.log_sd * normal_quantile(level))
        return np.asarray(np.where(self.log_sd > 0, found, self.mean_s))

    def interval(self, level: float) -> tuple[Floats, Floats]:
        """Lower and upper end of the interval that contains the time with probability *level*."""
        return self.quantile((1 - level) / 2), self.quantile((1 + level) / 2)

    def plus(self, other: "TimeDistribution") -> "TimeDistribution":
        """
        Distribution of the sum of this time and an independent time: means and variances add up.
        """
        return TimeDistribution.of(self.mean_s + other.mean_s, self.variance + other.variance)


def normal_cdf(value: ArrayLike) -> Floats:
    """Distribution function of the standard normal distribution."""
    scaled = -np.asarray(value, np.float64) / math.sqrt(2)
    return np.asarray(0.5 * np.asarray(_ERFC(scaled), np.float64))


def normal_quantile(level: ArrayLike) -> Floats:
    """
    Quantile of the standard normal distribution.

    Raises:
        ValueError: A level is not above 0 and below 1.
    """
    levels = np.asarray(level, np.float64)
    if not np.all((levels > 0) & (levels < 1)):
        raise ValueError(f"a quantile's level must be above 0 and below 1, not {levels}")
    return np.asarray(_INVERSE(levels), np.float64)
