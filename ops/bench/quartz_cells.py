"""One simulation of QUARTZ's benchmark, and the search for its load."""

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from ops.sim.profiles import load
from ops.sim.routing.cluster import (
    RoutingCluster,
    RoutingOutcome,
    simulate_front,
    simulate_routing,
)
from ops.sim.routing.engine import Slowdown
from ops.sim.routing.fronts import PulledQueue, Routers
from ops.sim.routing.predictors import (
    LEVELS,
    PROFILE,
    OraclePrefills,
    SimulatedPrefills,
    prefills_for,
    seat_of,
)
from ops.sim.routing.summary import summarize_routing
from ops.sim.routing.workload import MIXES, RoutedArrival, RoutedTraffic
from shared.contracts.base import Seconds
from solver.routing.dispatch_key import Admission
from solver.routing.options import VARIANTS, Placement, Prediction, RoutingOptions

PULL = "pull"
"""
Name of the variant without a router: instances pull from one queue, as agents pull from lanes.
"""

LOWEST, HIGHEST = 0.06, 0.09
"""Range of FIFO-LL's share of violations in which the search for the load ends."""
_LOW_RPS, _FIRST_RPS, _HIGH_RPS = 3.0, 11.0, 16.0
"""Rates of the search for a model of scale 1: almost no violations, first guess, overload."""
_MOST_TRIALS = 10
_LATEST = 1000
"""Number of latest requests over which coverage is reported."""


class LoadCell(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Parameters of a search for the load at which FIFO-LL violates 5 to 10 % of the targets."""

    mix: str = "mixed"
    scale: float = 2.0
    """Scale factor of the latency profile of an 8B model: 2 represents a 14B model."""
    num_requests: int = 3000
    seed: int = 0


class RoutingCell(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Parameters of one simulation; equal cells of equal code give equal figures."""

    variant: str
    rate_rps: float
    mix: str = "mixed"
    scale: float = 2.0
    num_requests: int = 3000
    seed: int = 0
    heaviest: float = 0.2
    """Share of requests from the first of five tenants; the other tenants have equal shares."""
    slowdown: float = 1.0
    """Factor of all iteration times in the middle third of the arrivals."""
    routers: int = 1
    """Number of routers, which get requests in turn and share their work and observations."""

    def arrivals(self) -> list[RoutedArrival]:
        """The trace of arrivals, which is the same for every variant."""
        return _traffic(
            self.mix, self.rate_rps, self.num_requests, self.seed, self.heaviest
        ).arrivals()


def find_load(cell: LoadCell) -> dict[str, Any]:
    """
    Bisect the request rate; `violations` is the last trial's result, possibly out of the range.
    """
    low, rate, high = (rps / cell.scale for rps in (_LOW_RPS, _FIRST_RPS, _HIGH_RPS))
    violations = 0.0
    for _ in range(_MOST_TRIALS):
        trial = RoutingCell(
            variant="fifo-ll", rate_rps=rate, mix=cell.mix, scale=cell.scale,
            num_requests=cell.num_requests, seed=cell.seed,
        )  # fmt: skip
        violations = measure_routing(trial)["violations"]
        if LOWEST <= violations <= HIGHEST:
            break
        low, high = (low, rate) if violations > HIGHEST else (rate, high)
        rate = (low + high) / 2
    return {"rate_rps": rate, "violations": violations}


def measure_routing(cell: RoutingCell) -> dict[str, Any]:
    """Simulate the cell; return JSON-able figures."""
    arrivals, latency = cell.arrivals(), load(PROFILE).latency
    third_s = arrivals[-1].arrival.arrived_at / 3
    slowdown = Slowdown(factor=cell.slowdown, begins_at=third_s, ends_at=2 * third_s)
    cluster = RoutingCluster(latency=latency, scale=cell.scale, slowdown=slowdown, seed=cell.seed)
    oracle = OraclePrefills(latency, cell.scale)
    if cell.variant == PULL:
        queue = PulledQueue(cluster.instance_ids, oracle.uncached_s)
        return summarize_routing(simulate_front(arrivals, cluster, queue))
    options = VARIANTS[cell.variant]
    if _needs_no_prediction(options):
        return summarize_routing(simulate_routing(arrivals, cluster, options, oracle))
    prefills = [
        prefills_for(options, cell.scale, origin=f"router {number}")
        for number in range(cell.routers)
    ]
    seats = [seat_of(each) for each in prefills]
    routers = Routers(cluster.instance_ids, options, seats, cluster.seed)
    outcome = simulate_front(arrivals, cluster, routers)
    return {
        **summarize_routing(outcome),
        "coverage": _coverage(prefills),
        "fallback": _fallback(outcome, slowdown.begins_at, slowdown.ends_at),
    }


def _traffic(
    mix: str, rate_rps: float, num_requests: int, seed: int, heaviest: float
) -> RoutedTraffic:
    return RoutedTraffic(
        mix=MIXES[mix],
        rate_rps=rate_rps,
        num_requests=num_requests,
        seed=seed,
        tenants=(heaviest, *[(1 - heaviest) / 4] * 4),
    )


def _needs_no_prediction(options: RoutingOptions) -> bool:
    """
    True if decisions use no predicted prefill times: either no prefill times at all, or those of
    the oracle.
    """
    if options.prediction is Prediction.ORACLE:
        return True
    unsized = options.admission in {Admission.FIFO, Admission.TOKEN_FAIR}
    return unsized and options.placement is not Placement.SCORE


def _coverage(prefills: Sequence[SimulatedPrefills]) -> dict[str, dict[str, float]]:
    """Coverage by quantile level over each router's latest requests, uncorrected and corrected."""
    latest = _LATEST // len(prefills)
    actual = np.concatenate([each.actual_s[-latest:] for each in prefills])
    raw = np.concatenate([each.raw_s[-latest:] for each in prefills])
    corrected = np.concatenate([each.corrected_s[-latest:] for each in prefills])
    return {
        f"{level:g}": {
            "raw": float(np.mean(actual <= raw[:, column])),
            "corrected": float(np.mean(actual <= corrected[:, column])),
            "raw residual ms": 1000 * float(np.mean(raw[:, column] - actual)),
            "corrected residual ms": 1000 * float(np.mean(corrected[:, column] - actual)),
        }
        for column, level in enumerate(LEVELS)
    }


def _fallback(outcome: RoutingOutcome, begins_at: Seconds, ends_at: Seconds) -> dict[str, Any]:
    """
    Number of requests with a first token from the slowdown's start to the fallback, and from its
    end to recovery.
    """
    middle = [fallen for at, fallen in outcome.fallen_back if begins_at <= at < ends_at]
    after = [fallen for at, fallen in outcome.fallen_back if at >= ends_at]
    return {
        "until": middle.index(True) if True in middle else None,
        "until recovered": after.index(False) if False in after else None,
        "before": sum(fallen for at, fallen in outcome.fallen_back if at < begins_at),
        "ends": bool(after) and after[-1],
    }
