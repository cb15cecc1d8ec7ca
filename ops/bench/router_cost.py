"""Cost of predicting, scoring and enqueueing a request, in units of a fixed CPU loop."""

import statistics
import time

import numpy as np
from cachetools import FIFOCache

from ops.bench.result import Line, Result
from ops.bench.scheduler_cost import LOOP_S, loop_s
from services.planner.lane_totals import LaneCounter
from services.planner.state import GrouperState
from shared.contracts.base import InstanceId, RequestId, TenantId
from shared.contracts.plans import LaneForecast, LanesForecast
from shared.contracts.qos import Slo
from shared.contracts.routing import InstanceLoad
from solver.prediction.calibration.coverage import CoverageMonitor
from solver.prediction.calibration.prefill_calibration import BucketedCalibration
from solver.prediction.prefill.features import FEATURES
from solver.prediction.prefill.quantile_fit import fit_quantile_trees
from solver.prediction.prefill.quantile_trees import QuantileTrees
from solver.routing.backlog import Backlog
from solver.routing.options import VARIANTS
from solver.routing.prefills import CalibratedPrefills
from solver.routing.request import RoutedRequest
from solver.routing.router import Router
from solver.routing.shares import TenantShares

NUM_INSTANCES = 16
MOST_MICROSECONDS = 150.0
"""
Upper limit of the time of one submission that scores all instances, in units of the fixed CPU
loop's time.
"""
_WAITING = 1000
_LEVELS = (0.9, 0.95)
_SAMPLES = 3000
_ARRIVALS, _LANE = 1000, "lane"
_ROUND = 20
"""Number of submissions between two timings of the fixed CPU loop."""


async def run(
    *,
    seed: int,
    quick: bool,
    broker: str | None,  # noqa: ARG001 - nothing here needs one
) -> Result:
    """Time submissions while a thousand requests wait; timings of the fixed CPU loop interleave."""
    result = Result(name="router_cost", seed=seed, quick=quick)
    prefills = _prefills(seed)
    costs: dict[str, list[float]] = {}
    loops = []
    arms = {name: _Arm(name, prefills) for name in ("default", "quartz", "fifo-ll")}
    grouper = _busy_grouper()
    for _ in range(50 if quick else 250):
        loops.append(loop_s())
        for name, arm in arms.items():
            costs.setdefault(name, []).extend(arm.submit_s() for _ in range(_ROUND))
        costs.setdefault("dispatch and first token", []).append(arms["default"].serve_s())
        costs.setdefault("forecast of a lane's wait", []).append(_predict_s(grouper))
    loop = statistics.median(loops)
    for name, values in costs.items():
        result.figures[f"{name}, microseconds"] = {
            "median": 1e6 * statistics.median(values),
            "normalised": 1e6 * statistics.median(values) / loop * LOOP_S,
            "p99": 1e6 * float(np.quantile(values, 0.99)),
        }
    value = 1e6 * statistics.median(costs["default"]) / loop * LOOP_S
    name = f"predict, score and enqueue, {NUM_INSTANCES} instances, normalised microseconds"
    result.lines.append(Line(name=name, value=value, bound=MOST_MICROSECONDS))
    return result


class _Arm:
    """A router of `NUM_INSTANCES` instances at which requests wait."""

    def __init__(self, variant: str, prefills: CalibratedPrefills) -> None:
        self._instances = [InstanceId(f"instance {n}") for n in range(NUM_INSTANCES)]
        self._router = Router(
            self._instances,
            VARIANTS[variant],
            prefills,
            random=np.random.default_rng(0),
            backlog=Backlog("router"),
        )
        self._number = 0
        for instance_id in self._instances:
            load = InstanceLoad(seq=1, running=20, prefill_backlog_tokens=5000, kv_utilization=0.5)
            self._router.observe(instance_id, load, 0.0)
        while self._number < _WAITING:
            self.submit_s()

    def submit_s(self) -> float:
        """Measured time of one submission of a request to the router."""
        self._number += 1
        request = RoutedRequest(
            request_id=RequestId(str(self._number)),
            tenant=TenantId(f"tenant {self._number % 50}"),
            arrived_at=1e-2 * self._number,
            prompt_tokens=500 + 37 * self._number % 8000,
            max_tokens=512,
            slo=Slo(ttft_s=2.0),
            cached_tokens={self._instances[self._number % NUM_INSTANCES]: 400},
        )
        began = time.perf_counter()
        self._router.submit(request, request.arrived_at)
        return time.perf_counter() - began

    def serve_s(self) -> float:
        """Measured time per request of dispatching, and of handling the first token."""
        now = 1e-2 * self._number
        began = time.perf_counter()
        sent = self._router.dispatch(now)
        for assignment in sent:
            self._router.finish(assignment.request.request_id, now)
        return (time.perf_counter() - began) / max(1, len(sent))


def _busy_grouper() -> GrouperState:
    """
    A grouper whose lane forecast is one second old; since then it grouped a request each ms.
    """
    shares = TenantShares(max_share=1.0, free_tokens=0)
    state = GrouperState(shares=shares, recent=FIFOCache(_ARRIVALS))
    forecast = LaneForecast(lane=_LANE, wait_s=3.0, wait_sd_s=0.5, request_s=1e-3)
    state.on_forecast(LanesForecast(epoch=1, at=0.0, lanes=(forecast,)), 0.0)
    state.lanes[_LANE] = LaneCounter()
    for number in range(_ARRIVALS):
        state.lanes[_LANE].recent.add(1e-3 * number)
    return state


def _predict_s(grouper: GrouperState) -> float:
    """Measured time of one lane forecast."""
    began = time.perf_counter()
    grouper.forecast(_LANE, 1e-3 * _ARRIVALS)
    return time.perf_counter() - began


def _prefills(seed: int) -> CalibratedPrefills:
    calibration = BucketedCalibration(_LEVELS, model_version="made up", origin="router")
    return CalibratedPrefills(
        _trees(seed), level=0.95, calibration=calibration, monitor=CoverageMonitor()
    )


def _trees(seed: int) -> QuantileTrees:
    """
    Quantile trees for random samples, because the cost of a prediction depends only on the trees'
    size.
    """
    random = np.random.default_rng(seed)
    features = random.random((_SAMPLES, len(FEATURES)))
    features[:, FEATURES.index("prompt_tokens")] *= 8000
    features[:, FEATURES.index("prefill_backlog_tokens")] *= 8000
    times = 1e-4 * (1 + features[:, FEATURES.index("prompt_tokens")])
    return fit_quantile_trees(features, times * random.lognormal(0, 0.2, _SAMPLES), levels=_LEVELS)
