"""Search for the request rate at which a share of targets is missed."""

from dataclasses import dataclass, field

_LEAST_PART = 0.2
"""Least part of a bracket by which a trial comes closer to its other end."""


@dataclass(slots=True, kw_only=True)
class RateSearch:
    """
    Request rates that were tried, and the next one for a share.

    Args:
        first_rps: Rate of the first trial.
        step: Ratio of a rate to the one before, while all trials are on one side of the share.
    """

    first_rps: float
    step: float = 1.25
    missed: dict[float, float] = field(default_factory=dict)
    """Rate of each trial -> share of missed targets, which grows with the rate but for noise."""

    def next_rps(self, share: float) -> float:
        """
        The rate of the next trial for *share*.

        Returns:
            The linear interpolation between the nearest rates on both sides of *share*; a step
            beyond the rates that were tried, if all are on one side.
        """
        if not self.missed:
            return self.first_rps
        below = [rate for rate, missed in self.missed.items() if missed < share]
        above = [rate for rate, missed in self.missed.items() if missed >= share]
        if not above:
            return max(below) * self.step
        if not below:
            return min(above) / self.step
        low, high = max(below), min(above)
        if low > high:  # the trials contradict each other: noise
            return (low + high) / 2
        part = (share - self.missed[low]) / (self.missed[high] - self.missed[low])
        return low + min(1.0 - _LEAST_PART, max(_LEAST_PART, part)) * (high - low)

    def nearest_rps(self, share: float) -> float:
        """
        The rate whose trial missed the share nearest to *share*.

        Raises:
            ValueError: No rate was tried.
        """
        return min(self.missed, key=lambda rate: abs(self.missed[rate] - share))
