"""Comparison of predictions with their outcomes; old outcomes lose weight."""

from collections.abc import Sequence

from shared.contracts.base import UnixTime
from shared.contracts.estimates import Calibration
from solver.prediction.calibration.moments import RunningMoments

LEAST_JUDGED = 20
"""Least number of outcomes from which a coverage is meaningful."""


class RunningCalibration:
    """
    Bias and spread of residuals, and the share of outcomes within predicted quantiles.

    Args:
        memory: Number of outcomes after which an old outcome weighs 1/e.
        levels: Levels of the judged quantiles, rising.
    """

    def __init__(self, *, memory: float, levels: Sequence[float] = ()) -> None:
        self._residuals = RunningMoments(memory=memory)
        self._covered = {level: RunningMoments(memory=memory) for level in levels}
        self._at = 0.0

    def observe(self, residual: float, *, at: UnixTime) -> None:
        """Add an outcome at time *at*; *residual* is the predicted value minus the actual value."""
        self._residuals.observe(residual)
        self._at = max(self._at, at)

    def covered(self, level: float, share: float) -> None:
        """
        Add one outcome to the coverage of *level*; *share* is 1 if the quantile covered the
        outcome, else 0.
        """
        self._covered[level].observe(share)

    def value(self) -> Calibration | None:
        """Current bias, spread and coverage, or None before the first outcome."""
        residuals = self._residuals.value()
        if residuals is None:
            return None
        shares = ((level, moments.value()) for level, moments in self._covered.items())
        return Calibration(
            count=residuals.count,
            bias=round(residuals.mean, 4),
            spread=round(residuals.sd, 4),
            at=round(self._at, 3),
            coverage=tuple(
                (level, round(share.mean, 4))
                for level, share in shares
                if share is not None and share.count >= LEAST_JUDGED
            ),
        )
