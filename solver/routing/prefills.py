"""Prefill times of candidates: a model, corrected by what was observed, and whether to trust it."""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from shared.contracts.base import Seconds
from solver.prediction.buckets import Bucket, bucket_of
from solver.prediction.calibration import BucketedCalibration
from solver.prediction.coverage import CoverageMonitor
from solver.prediction.prefill_features import RequestFeatures, feature_matrix
from solver.prediction.quantile_trees import Prediction
from solver.routing.admission_queue import Assignment
from solver.routing.request import Candidate, PrefillEstimate, RoutedRequest

MOST_S = 3600.0
"""Of a prefill; what is said to take longer, or no time that there is, is taken to be this long:
sums that it became part of would never be right again."""


class PrefillModel(Protocol):
    """Quantiles and mean of prefill times: trees, or what stands in for them."""

    @property
    def levels(self) -> tuple[float, ...]: ...

    def predict(self, features: NDArray[np.float64]) -> Prediction:
        """Of each row of *features*, as `feature_matrix` makes it."""
        ...

    def column_of(self, level: float) -> int:
        """
        Where predictions have the quantile of *level*.

        Raises:
            ValueError: There is none.
        """
        ...


class CalibratedPrefills:
    """
    QUARTZ's predictor: a fixed model, of which only the calibration moves (§3.2, §4.2).

    Args:
        model: Fitted before.
        level: The quantile that is asked for, one of the model's.
        calibration: Corrects the model; none leaves it as it is.
        monitor: Watches a quantile of its own level; none trusts all of them always.

    Raises:
        ValueError: The model does not have one of these levels.
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
        """Whether coverage is as good as it is asked to be (§3.5)."""
        return self.monitor is None or self.monitor.trusted

    def predict(
        self, request: RoutedRequest, candidates: Sequence[Candidate]
    ) -> list[PrefillEstimate]:
        """One estimate for each candidate, as corrected until now."""
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
        """All levels, as corrected until now."""
        features = request_features(request)
        raw = self._model.predict(feature_matrix(features, candidates))
        if self._calibration is None:
            return raw
        return self._calibration.correct(raw, [bucket_of(features, each) for each in candidates])

    def raw(self, request: RoutedRequest, candidates: Sequence[Candidate]) -> Prediction:
        """All levels, as the model gives them."""
        return self._model.predict(feature_matrix(request_features(request), candidates))

    def observe(self, assignment: Assignment, prefill_s: Seconds) -> None:
        """A prefill that was predicted took *prefill_s*, from its first chunk on."""
        request, candidate = assignment.request, assignment.candidate
        bucket = bucket_for(request, candidate)
        if self.monitor is not None:
            self.monitor.observe(bucket, assignment.estimate.watched_s, prefill_s)
        if self._calibration is not None:
            self._calibration.observe(bucket, self.raw(request, [candidate]), prefill_s)


def bucket_for(request: RoutedRequest, candidate: Candidate) -> Bucket:
    """The regime that a prefill is calibrated and watched in."""
    return bucket_of(request_features(request), candidate)


def _possible_s(time_s: Seconds) -> Seconds:
    return time_s if 0 <= time_s <= MOST_S else MOST_S


def request_features(request: RoutedRequest) -> RequestFeatures:
    """The request's part of what trees are asked."""
    return RequestFeatures(
        prompt_tokens=request.prompt_tokens,
        max_tokens=request.max_tokens,
        temperature=request.temperature,
        top_p=request.top_p,
        is_interactive=request.is_interactive,
        is_streaming=request.is_streaming,
    )
