"""Corrections of predicted prefill times by earlier outcomes (QUARTZ §3.2, §4.2)."""

import math
from collections import deque
from collections.abc import Sequence

import numpy as np

from shared.contracts.base import Seconds
from shared.contracts.errors import ContractError, SchemaMismatchError
from shared.contracts.routing import CalibrationSnapshot, Residual
from solver.prediction.calibration.buckets import Bucket
from solver.prediction.calibration.pace import Pace
from solver.prediction.calibration.residuals import Residuals
from solver.prediction.prefill.quantile_trees import Prediction

SNAPSHOT_VERSION = 1
"""Version of snapshots, increased when the meaning of buckets or scores changes."""
_WINDOW = 512
"""
Number of requests in the window: old residuals are forgotten after this many requests, and 25
requests are above the 0.95 quantile.
"""
_LEAST = 60
"""
Least number of requests of a bucket that has its own correction: three times the minimum for a 0.95
quantile, so that ranks are fine enough.
"""
_LEAST_S = 1e-6
_MOST_S = 1e6
"""Upper bound of times, with which the correction factor of every measured time is finite."""
_MOST_SCORE = 2.01 * math.log(_MOST_S / _LEAST_S)
"""Bound of the difference of two scores, with a margin for rounding errors."""


class BucketedCalibration:
    """
    Conformal correction per bucket, relative to the pace of the latest requests of all buckets.

    A bucket with few requests in the window uses the correction of its prompt size and locality,
    else of its prompt size, else of all requests. With too few requests in total nothing is
    corrected. A common trend of all requests, such as slower engines, is followed separately and
    faster (`Pace`). `observe` takes O(log window).

    Source: QUARTZ §3.2 and §4.2, conformalized quantile regression (Romano et al. 2019).
    Differs: there is one window over all buckets instead of one for each bucket, so that a rare
    bucket does not keep residuals from long before a change. Residuals are relative to a pace,
    because errors of consecutive requests are alike and a window alone always lags.

    Args:
        levels: Levels of the trees whose predictions are corrected.
        model_version: Version of the trees; residuals of other versions are not adopted.
        origin: Identifies this run of the router; unique, also across restarts.
        window: Requests in the window.
        least: Number of requests of a bucket in the window from which its own correction is used.
    """

    def __init__(
        self,
        levels: Sequence[float],
        *,
        model_version: str,
        origin: str,
        window: int = _WINDOW,
        least: int = _LEAST,
    ) -> None:
        self._levels = tuple(levels)
        self._model_version = model_version
        self._origin = origin
        self._window: deque[tuple[str, Residual]] = deque()
        self._size = window
        self._least = least
        self._pace = Pace()
        self._all = Residuals(self._levels)
        self._cells: dict[tuple[int, ...], Residuals] = {(): self._all}
        self._seen: dict[str, int] = {}

    def correct(self, prediction: Prediction, buckets: Sequence[Bucket]) -> Prediction:
        """
        Return *prediction* with each candidate corrected by its bucket; quantiles remain in order.
        """
        pace = self._pace.value
        if pace is None or self._all.count < self._least or not buckets:
            return prediction
        factors = np.array([self._cell_of(bucket).factors() for bucket in buckets])
        factors *= math.exp(pace)
        quantiles_s = prediction.quantiles_s * factors[:, :-1]
        return Prediction(
            np.maximum.accumulate(quantiles_s, axis=1), prediction.mean_s * factors[:, -1]
        )

    def observe(self, bucket: Bucket, predicted: Prediction, actual_s: Seconds) -> None:
        """
        Learn from a request that got its first token.

        Args:
            bucket: The request's bucket at the time of the prediction.
            predicted: Uncorrected prediction of the trees for the instance that served the request.
            actual_s: Measured time; ignored unless finite and positive.
        """
        if not (math.isfinite(actual_s) and actual_s > 0):
            return
        actual_s, pace = _bounded_s(actual_s), self._pace.value
        quantiles_s = predicted.quantiles_s[0].tolist()
        scores = [math.log(actual_s / _bounded_s(each_s)) for each_s in quantiles_s]
        self._pace.observe(scores[0])
        if pace is None:  # the first scores only determine the pace
            return
        residual = Residual(
            number=self._seen.get(self._origin, 0) + 1,
            bucket=(int(bucket.prompt), int(bucket.locality), int(bucket.load)),
            pace=pace,
            scores=tuple(score - pace for score in scores),
            mean_s=_bounded_s(float(predicted.mean_s[0]) * math.exp(pace)),
            actual_s=actual_s,
        )
        self._add(self._origin, residual)

    def snapshot(self) -> CalibrationSnapshot:
        """Residuals in the window that this router observed, without adopted residuals."""
        return CalibrationSnapshot(
            snapshot_version=SNAPSHOT_VERSION,
            model_version=self._model_version,
            levels=self._levels,
            origin=self._origin,
            residuals=tuple(each for origin, each in self._window if origin == self._origin),
        )

    def adopt(self, snapshot: CalibrationSnapshot) -> None:
        """
        Adopt the residuals of another router that are not yet known here.

        Snapshots may come late, twice or in any order. The window then holds the requests of all
        routers, in the order in which they became known here.

        Raises:
            SchemaMismatchError: The snapshot has other trees or levels; names the field that
                differs.
            ContractError: A residual is invalid: `observe` cannot have made it. Nothing is adopted.
        """
        SchemaMismatchError.check(
            snapshot_version=(SNAPSHOT_VERSION, snapshot.snapshot_version),
            model_version=(self._model_version, snapshot.model_version),
            levels=(self._levels, snapshot.levels),
        )
        if not all(map(self._is_sound, snapshot.residuals)):
            raise ContractError(
                f"not valid calibration residuals: a residual of {snapshot.origin} is invalid"
            )
        for residual in snapshot.residuals:
            if residual.number > self._seen.get(snapshot.origin, 0):
                self._add(snapshot.origin, residual)
                self._pace.start_at(residual.pace)

    def _is_sound(self, residual: Residual) -> bool:
        return (
            len(residual.scores) == len(self._levels)
            and all(map(_is_score, (residual.pace, *residual.scores)))
            and all(_LEAST_S <= each <= _MOST_S for each in (residual.mean_s, residual.actual_s))
        )

    def _add(self, origin: str, residual: Residual) -> None:
        self._seen[origin] = residual.number
        self._window.append((origin, residual))
        for prefix in _prefixes(residual.bucket):
            self._cells.setdefault(prefix, Residuals(self._levels)).add(residual)
        if len(self._window) > self._size:
            self._forget(self._window.popleft()[1])

    def _forget(self, residual: Residual) -> None:
        for prefix in _prefixes(residual.bucket):
            self._cells[prefix].remove(residual)

    def _cell_of(self, bucket: Bucket) -> Residuals:
        """
        The finest regime with enough residuals; the regime of all requests if no regime has enough.
        """
        for prefix in _prefixes(bucket):
            cell = self._cells.get(prefix)
            if cell is not None and cell.count >= self._least:
                return cell
        return self._all


def _prefixes(bucket: tuple[int, int, int]) -> tuple[tuple[int, ...], ...]:
    """The regimes that contain *bucket*, from the finest to the coarsest."""
    return (bucket[:3], bucket[:2], bucket[:1], ())


def _bounded_s(time_s: Seconds) -> Seconds:
    return min(max(time_s, _LEAST_S), _MOST_S)


def _is_score(value: float) -> bool:
    return abs(value) <= _MOST_SCORE
