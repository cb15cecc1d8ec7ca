"""Predictors of prefill times for a simulated router: trees of a training trace, or an oracle."""

from collections.abc import Sequence
from functools import cache

import numpy as np

from ops.sim.profiles import load
from ops.sim.routing.cluster import RoutingCluster, RoutingOutcome, simulate_routing
from ops.sim.routing.engine import CHUNK_TOKENS
from ops.sim.routing.fronts import Learner, RouterSeat
from ops.sim.routing.workload import MIXES, RoutedTraffic
from shared.contracts.base import InstanceId, Seconds
from solver.prediction.calibration.coverage import CoverageMonitor, CoverageOptions
from solver.prediction.calibration.prefill_calibration import BucketedCalibration
from solver.prediction.prefill.features import feature_matrix
from solver.prediction.prefill.quantile_fit import fit_quantile_trees
from solver.prediction.prefill.quantile_trees import QuantileTrees
from solver.routing.admission_queue import Assignment
from solver.routing.options import VARIANTS, Prediction, RoutingOptions
from solver.routing.prefills import CalibratedPrefills, request_features
from solver.routing.request import Candidate, PrefillEstimate, RoutedRequest
from solver.scheduling.engine.latency import LatencyTable

PROFILE = "28"
TRAINING_SEED = 1_000
TRAINING_REQUESTS = 6_000
TRAINING_RATES_RPS = (8.0, 9.5, 11.0)
"""Request rates of the training traces for a model of scale 1, from light load to near overload."""
LEVELS = (0.5, 0.9, 0.95)


class OraclePrefills:
    """
    Predicts the exact time of each prefill alone on an idle engine, without noise.

    Decided: the paper's oracle uses "observed prefill costs". An observed cost depends on placement
    and concurrent work, so it does not exist before the decision.
    """

    def __init__(self, latency: LatencyTable, scale: float) -> None:
        self._latency = latency
        self._scale = scale

    def predict(
        self, request: RoutedRequest, candidates: Sequence[Candidate]
    ) -> list[PrefillEstimate]:
        """Estimate the prefill time of each candidate; quantile and mean are equal."""
        times_s = [self._alone_s(request.prompt_tokens, each.cached_tokens) for each in candidates]
        return [
            PrefillEstimate(quantile_s=time_s, mean_s=time_s, watched_s=time_s)
            for time_s in times_s
        ]

    def uncached_s(self, request: RoutedRequest) -> Seconds:
        """Time of a prefill without cached tokens, independent of the placement."""
        return self.predict(request, [Candidate(instance_id=InstanceId(""))])[0].mean_s

    def _alone_s(self, prompt_tokens: int, cached_tokens: int) -> Seconds:
        total_s = 0.0
        for before in range(cached_tokens, prompt_tokens, CHUNK_TOKENS):
            tokens = min(CHUNK_TOKENS, prompt_tokens - before)
            pairs = tokens * (before + tokens / 2)
            total_s += self._latency.predict_s(tokens, pairs, before)
        return self._scale * total_s


class SimulatedPrefills:
    """
    Trees as used by a router; records the predictions of every observed prefill.

    Args:
        prefills: Predictor that learns from observed prefills.
        calibration: The calibration of *prefills*, shared with other routers.
    """

    def __init__(
        self, prefills: CalibratedPrefills, calibration: BucketedCalibration | None
    ) -> None:
        self._prefills = prefills
        self.calibration = calibration
        self.raw_s: list[tuple[Seconds, ...]] = []
        """Quantiles predicted by the trees for each observed prefill, in the order of `LEVELS`."""
        self.corrected_s: list[tuple[Seconds, ...]] = []
        """Quantiles as in `raw_s`, corrected by the calibration at the time of the observation."""
        self.actual_s: list[Seconds] = []

    @property
    def is_trusted(self) -> bool:
        return self._prefills.is_trusted

    def predict(
        self, request: RoutedRequest, candidates: Sequence[Candidate]
    ) -> list[PrefillEstimate]:
        """Estimate the prefill time of each candidate, for a router."""
        return self._prefills.predict(request, candidates)

    def observe(self, assignment: Assignment, prefill_s: Seconds) -> None:
        """Record the predictions for a prefill, then learn from its time."""
        asked = (assignment.request, [assignment.candidate])
        self.raw_s.append(tuple(self._prefills.raw(*asked).quantiles_s[0].tolist()))
        self.corrected_s.append(tuple(self._prefills.predicted(*asked).quantiles_s[0].tolist()))
        self.actual_s.append(prefill_s)
        self._prefills.observe(assignment, prefill_s)

    def adopt(self, others: Sequence[Learner]) -> None:
        """Learn observations of *others*; observations that are already known have no effect."""
        if self.calibration is None:
            return
        for other in others:
            if isinstance(other, SimulatedPrefills) and other.calibration is not None:
                self.calibration.adopt(other.calibration.snapshot())


def prefills_for(
    options: RoutingOptions, scale: float, *, origin: str = "router"
) -> SimulatedPrefills:
    """
    Trees fitted to a nominal trace, with the calibration and the monitor that *options* require.
    """
    is_raw = options.prediction is Prediction.RAW
    calibration = BucketedCalibration(LEVELS, model_version="simulated", origin=origin)
    watched = CoverageOptions(under_coverage=options.fallback_delta)
    prefills = CalibratedPrefills(
        trained(scale),
        level=options.quantile_level,
        calibration=None if is_raw else calibration,
        monitor=CoverageMonitor(watched) if options.falls_back else None,
    )
    return SimulatedPrefills(prefills, None if is_raw else calibration)


def seat_of(prefills: SimulatedPrefills) -> RouterSeat:
    """A router seat with *prefills* as predictor and learner, which shares observations."""
    return RouterSeat(predictor=prefills, learner=prefills, share=prefills.adopt)


@cache
def trained(scale: float) -> QuantileTrees:
    """
    Quantile trees trained on nominal traces with separate seeds, routed first come, first served.
    """
    features, times = [], []
    count = TRAINING_REQUESTS // len(TRAINING_RATES_RPS)
    for number, rate_rps in enumerate(TRAINING_RATES_RPS):
        seed = TRAINING_SEED + number
        traffic = RoutedTraffic(
            mix=MIXES["mixed"], rate_rps=rate_rps / scale, num_requests=count, seed=seed
        )
        latency = load(PROFILE).latency
        outcome = simulate_routing(
            traffic.arrivals(),
            RoutingCluster(latency=latency, scale=scale, seed=seed),
            VARIANTS["fifo-ll"],
            OraclePrefills(latency, scale),
        )
        for row, prefill_s in _samples(outcome):
            features.append(row)
            times.append(prefill_s)
    return fit_quantile_trees(np.array(features), np.array(times), levels=LEVELS, seed=0)


def _samples(outcome: RoutingOutcome) -> list[tuple[np.ndarray, Seconds]]:
    """Features at the assignment of each request, and its prefill time without disturbance."""
    samples = []
    for request in outcome.requests:
        if request.num_preempted or request.scheduled_at is None or request.first_token_at is None:
            continue
        assignment = outcome.assignments[request.request_id]
        row = feature_matrix(request_features(assignment.request), [assignment.candidate])[0]
        samples.append((row, request.first_token_at - request.scheduled_at))
    return samples
