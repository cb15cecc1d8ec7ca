"""
Prefill times of candidates: a model, its correction by observations, and its coverage monitor.
"""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from shared.contracts.base import Seconds
from solver.prediction.calibration.buckets import bucket_of
from solver.prediction.calibration.coverage import CoverageMonitor
from solver.prediction.calibration.prefill_calibration import BucketedCalibration
from solver.prediction.prefill.features import RequestFeatures, feature_matrix
from solver.prediction.prefill.quantile_trees import Prediction
from solver.routing.admission_queue import Assignment
from solver.routing.request import Candidate, PrefillEstimate, RoutedRequest

MOST_S = 3600.0
"""
Upper bound of a prefill time. The bound replaces longer and invalid times, which would corrupt
the sums to which they are added.
"""


class PrefillModel(Protocol):
    """Model of the quantiles and the mean of prefill times: trees, or a replacement for trees."""

    @property
    def levels(self) -> tuple[float, ...]: ...

    def predict(self, features: NDArray[np.float64]) -> Prediction:
        """Prediction for each row of *features*, as made by `feature_matrix`."""
        ...

    def column_of(self, level: float) -> int:
        """
        Column of predictions that has the quantile of *level*.

        Raises:
            ValueError: No column has the quantile of *level*.
        """
        ...


class CalibratedPrefills:
    """
    QUARTZ's predictor: a fixed model with a calibration that learns (§3.2, §4.2).

    Args:
        model: A fitted model.
        level: The routed quantile, one of the model's levels.
        calibration: Corrects the model's predictions; with none, they are used unchanged.
        monitor: Watches the coverage of its level; without a monitor, predictions are always
            trusted.

    Raises:
        ValueError: The model lacks *level* or the monitor's level.
    """

    def __init__(
        self,
        model: PrefillModel,
        *,
        level: float,
        calibration: BucketedCalibration | None = None,
        monitor: CoverageMonitor | None = None,
    ) -> None:
        self._model = model
        self._column = model.column_of(level)
        self._calibration = calibration
        self.monitor = monitor
        self._watched = self._column if monitor is None else model.column_of(monitor.level)

    @property
    def is_trusted(self) -> bool:
        """True if the coverage of predictions is within its limit (§3.5)."""
        return self.monitor is None or self.monitor.trusted

    def predict(
        self, request: RoutedRequest, candidates: Sequence[Candidate]
    ) -> list[PrefillEstimate]:
        """Estimate the prefill time of each candidate, with the current corrections."""
        prediction = self.predicted(request, candidates)
        return [
            PrefillEstimate(
                quantile_s=_possible_s(quantile_s),
                mean_s=_possible_s(mean_s),
                watched_s=_possible_s(watched_s),
            )
            for quantile_s, mean_s, watched_s in zip(
                prediction.quantiles_s[:, self._column].tolist(),
                prediction.mean_s.tolist(),
                prediction.quantiles_s[:, self._watched].tolist(),
                strict=True,
            )
        ]

    def predicted(self, request: RoutedRequest, candidates: Sequence[Candidate]) -> Prediction:
        """Quantiles of all levels and means of the prefill time, with the current corrections."""
        features = request_features(request)
        raw = self._model.predict(feature_matrix(features, candidates))
        if self._calibration is None:
            return raw
        return self._calibration.correct(raw, [bucket_of(features, each) for each in candidates])

    def raw(self, request: RoutedRequest, candidates: Sequence[Candidate]) -> Prediction:
        """Quantiles of all levels and means of the prefill time, without corrections."""
        return self._model.predict(feature_matrix(request_features(request), candidates))

    def observe(self, assignment: Assignment, prefill_s: Seconds) -> None:
        """Learn that a predicted prefill took *prefill_s* from the start of its first chunk on."""
        request, candidate = assignment.request, assignment.candidate
        bucket = bucket_of(request_features(request), candidate)
        if self.monitor is not None:
            self.monitor.observe(bucket, assignment.estimate.watched_s, prefill_s)
        if self._calibration is not None:
            self._calibration.observe(bucket, self.raw(request, [candidate]), prefill_s)


def _possible_s(time_s: Seconds) -> Seconds:
    return time_s if 0 <= time_s <= MOST_S else MOST_S


def request_features(request: RoutedRequest) -> RequestFeatures:
    """Features of the request for the quantile trees."""
    return RequestFeatures(
        prompt_tokens=request.prompt_tokens,
        max_tokens=request.max_tokens,
        temperature=request.temperature,
        top_p=request.top_p,
        is_interactive=request.is_interactive,
        is_streaming=request.is_streaming,
    )
