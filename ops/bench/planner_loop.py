"""
How long planning for 400,000 requests holds the leader's event loop.

`python -m ops.bench.planner_loop SEED` prints its figures as JSON. A task that wants to run each
millisecond is the measure, beside what it sees while nothing is planned.
"""

import asyncio
import statistics
import sys
import time
from collections.abc import Awaitable
from typing import Any

import msgspec

from ops.bench.planner_published import LAYOUT, NOW, NUM_REQUESTS, counted
from services.planner.explaining import corrected_forecasts
from services.planner.plan_worker import PlanWorker
from services.planner.policies import GENERATOR, Planner
from services.planner.settings import LeaderSettings
from services.planner.state import LeaderState
from services.planner.view import cluster_snapshot, lane_counts
from shared.contracts.base import Seconds
from solver.planning.review import ReviewOptions
from solver.prediction.lane_waits import LaneWaits

ROUNDS = 9
_BEAT_S = 1e-3


async def measured(seed: int) -> dict[str, Any]:
    """Longest holds of the loop, in each round: while a plan is made, and as long idle."""
    state = counted(seed, NUM_REQUESTS)
    settings = LeaderSettings()
    options = ReviewOptions(tier_weight=settings.tier_weight, budget_s=settings.solve_budget_s)
    planning_ms, idle_ms, taken_s = [], [], []
    async with PlanWorker(options) as worker:
        await worker.ready()
        for _ in range(ROUNDS):
            begun_s = time.perf_counter()
            planning_ms.append(1e3 * await longest_hold_s(_plan(state, worker)))
            taken_s.append(time.perf_counter() - begun_s)
            idle_ms.append(1e3 * await longest_hold_s(asyncio.sleep(taken_s[-1])))
    return {
        "planning_ms": statistics.median(planning_ms),
        "worst_ms": max(planning_ms),
        "idle_ms": statistics.median(idle_ms),
        "plan_s": statistics.median(taken_s),
    }


async def longest_hold_s(work: Awaitable[object]) -> Seconds:
    """The longest that the loop was held while *work* was done."""
    task = asyncio.ensure_future(work)
    longest_s = 0.0
    while not task.done():
        begun_s = time.perf_counter()
        await asyncio.sleep(_BEAT_S)
        longest_s = max(longest_s, time.perf_counter() - begun_s - _BEAT_S)
    await task
    return longest_s


async def _plan(state: LeaderState, worker: PlanWorker) -> None:
    """A first plan, as the leader makes it, and what it foretells of lanes."""
    settings = LeaderSettings()
    waits = LaneWaits()
    waits.counted(lane_counts(state), NOW)
    snapshot = await asyncio.to_thread(
        cluster_snapshot, state.copied(), layout=LAYOUT, settings=settings, now=NOW
    )
    planned = await Planner(GENERATOR, settings.tier_weight, worker).plan(snapshot)
    if planned.policy != GENERATOR or planned.review is None:
        raise RuntimeError("the worker gave no plan")
    corrected_forecasts(waits, planned.review.forecasts, NOW)


if __name__ == "__main__":
    figures = asyncio.run(measured(int(sys.argv[1])))
    sys.stdout.write(msgspec.json.encode(figures).decode() + "\n")
