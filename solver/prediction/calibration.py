"""Corrections of predicted prefill times by what came of earlier ones (QUARTZ §3.2, §4.2)."""

import math
from collections import deque
from collections.abc import Sequence

import numpy as np

from shared.contracts.base import Seconds
from shared.contracts.errors import ContractError, SchemaMismatchError
from shared.contracts.routing import CalibrationSnapshot, Residual
from solver.prediction.buckets import Bucket
from solver.prediction.pace import Pace
from solver.prediction.quantile_trees import Prediction
from solver.prediction.residuals import Residuals

SNAPSHOT_VERSION = 1
"""Raised when buckets or scores change their meaning."""
_WINDOW = 512
"""Requests: a change is forgotten within so many, and 25 of them are above the 0.95 quantile."""
_LEAST = 60
"""Requests of a bucket: three times what the 0.95 quantile takes; ranks of fewer are too coarse."""
_LEAST_S = 1e-6
_MOST_S = 1e6
"""Bounds of times, so that whatever a clock said a factor is finite."""
_MOST_SCORE = 2.01 * math.log(_MOST_S / _LEAST_S)
"""A ratio of such times, relative to another; and rounding."""


class BucketedCalibration:
    """
    Conformal correction per bucket, at the pace of the latest requests of all buckets.

    A bucket of which the window has few requests is corrected as its prompt size and locality
    are, then as its prompt size, then as all; before there are enough, nothing is corrected.
    What all requests have in common, such as engines that become slower, is followed apart from
    the buckets, and sooner (`Pace`). `observe` takes O(log window).

    Source: QUARTZ §3.2 and §4.2, conformalized quantile regression (Romano et al. 2019).
    Differs: a window over all buckets instead of one for each, so that what a rare bucket saw
    before a change is not believed long after it; and relative to a pace, since errors of requests
    that follow one another are alike, and a window alone is always late.

    Args:
        levels: Of the trees whose predictions are corrected.
        model_version: Of these trees; residuals of others are not adopted.
        origin: This router's run; no other has the same, nor it after a restart.
        window: Requests that count.
        least: Of these, how many a bucket needs to be corrected by its own.
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
        """*prediction* with each candidate corrected as its bucket is; quantiles stay in order."""
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
            bucket: Its, when it was predicted.
            predicted: For the instance that served it, as the trees gave it: not corrected.
            actual_s: What the trees predict, as realised; ignored unless finite and positive.
        """
        if not (math.isfinite(actual_s) and actual_s > 0):
            return
        actual_s, pace = _bounded_s(actual_s), self._pace.value
        quantiles_s = predicted.quantiles_s[0].tolist()
        scores = [math.log(actual_s / _bounded_s(each_s)) for each_s in quantiles_s]
        self._pace.observe(scores[0])
        if pace is None:  # The first ones say no more than where it is.
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
        """What was observed here and is in the window; nothing that was adopted."""
        return CalibrationSnapshot(
            snapshot_version=SNAPSHOT_VERSION,
            model_version=self._model_version,
            levels=self._levels,
            origin=self._origin,
            residuals=tuple(each for origin, each in self._window if origin == self._origin),
        )

    def adopt(self, snapshot: CalibrationSnapshot) -> None:
        """
        Learn what another router observed; what is known of it already is left out.

        Snapshots may come late, twice or in any order. The window is then of all routers'
        requests, in the order in which they became known here.

        Raises:
            SchemaMismatchError: It is of other trees or other levels; says which field differs.
            ContractError: A residual is not one that `observe` makes; nothing is adopted.
        """
        for field, expected in (
            ("snapshot_version", SNAPSHOT_VERSION),
            ("model_version", self._model_version),
            ("levels", self._levels),
        ):
            found = getattr(snapshot, field)
            if found != expected:
                raise SchemaMismatchError(field, expected=expected, found=found)
        if not all(map(self._is_sound, snapshot.residuals)):
            raise ContractError(f"no calibration residuals: those of {snapshot.origin} are broken")
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
        """The finest one with enough residuals; that of all when none has."""
        for prefix in _prefixes(bucket):
            cell = self._cells.get(prefix)
            if cell is not None and cell.count >= self._least:
                return cell
        return self._all


def _prefixes(bucket: tuple[int, int, int]) -> tuple[tuple[int, ...], ...]:
    """The bucket and what it falls back to, finest first."""
    return (bucket[:3], bucket[:2], bucket[:1], ())


def _bounded_s(time_s: Seconds) -> Seconds:
    return min(max(time_s, _LEAST_S), _MOST_S)


def _is_score(value: float) -> bool:
    return abs(value) <= _MOST_SCORE
