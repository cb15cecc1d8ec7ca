"""Running mean and standard deviation in which old samples lose weight."""

import math

from shared.contracts.estimates import Moments

_DEVIATIONS = 2


def over_approximation(moments: Moments) -> float:
    """
    A value that most samples stay below: the mean plus two standard deviations.

    At least four in five samples stay below it, whatever their distribution (Cantelli's
    inequality).

    Source: QoServe §3.4, "over-approximate it by two standard deviations".
    """
    return moments.mean + _DEVIATIONS * moments.sd


class RunningMoments:
    """
    Exponentially weighted mean and standard deviation.

    Args:
        memory: Number of samples after which an old sample weighs 1/e.
    """

    def __init__(self, *, memory: float = 500.0) -> None:
        self._keep = math.exp(-1 / memory)
        self._weight = 0.0
        self._mean = 0.0
        self._squares = 0.0
        self.count = 0

    def observe(self, value: float) -> None:
        """Add one sample."""
        self.count += 1
        self._weight = self._keep * self._weight + 1
        step = value - self._mean
        self._mean += step / self._weight
        self._squares = self._keep * self._squares + step * (value - self._mean)

    def value(self) -> Moments | None:
        """The mean and standard deviation, or None before the first sample."""
        if self.count == 0:
            return None
        variance = max(0.0, self._squares / self._weight)
        return Moments(mean=self._mean, sd=math.sqrt(variance), count=self.count)
