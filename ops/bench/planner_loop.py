"""
Time that planning for 400,000 requests blocks the leader's event loop.

`python -m ops.bench.planner_loop SEED` prints the figures as JSON. A task sleeps for a
millisecond at a time; its delays during planning are compared with its delays while idle.
"""

import asyncio
import statistics
import sys
import time
from collections.abc import Awaitable
from typing import Any

import msgspec

from ops.bench.planner_published import LAYOUT, NOW, NUM_REQUESTS, counted
from services.planner.leader.plan_report import corrected_forecasts
from services.planner.leader.plan_worker import PlanWorker
from services.planner.leader.policies import GENERATOR, Planner
from services.planner.leader.snapshot_builder import cluster_snapshot, lane_counts
from services.planner.settings import LeaderSettings
from services.planner.state import LeaderState
from shared.contracts.base import Seconds
from solver.planning.review import ReviewOptions
from solver.prediction.calibration.lane_waits import LaneWaits

ROUNDS = 9
_BEAT_S = 1e-3


async def measured(seed: int) -> dict[str, Any]:
    """
    Longest stall of the event loop in each round, during planning and in an equally long period
    without planning.
    """
    state = counted(seed, NUM_REQUESTS)
    settings = LeaderSettings()
    options = ReviewOptions(
        importance_weight=settings.importance_weight, budget_s=settings.solve_budget_s
    )
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
    """The longest time for which the event loop was blocked during *work*."""
    task = asyncio.ensure_future(work)
    longest_s = 0.0
    while not task.done():
        begun_s = time.perf_counter()
        await asyncio.sleep(_BEAT_S)
        longest_s = max(longest_s, time.perf_counter() - begun_s - _BEAT_S)
    await task
    return longest_s


async def _plan(state: LeaderState, worker: PlanWorker) -> None:
    """Make a first plan as the leader does, including the lane forecasts."""
    settings = LeaderSettings()
    waits = LaneWaits()
    waits.counted(lane_counts(state), NOW)
    snapshot = await asyncio.to_thread(
        cluster_snapshot, state.copied(), layout=LAYOUT, settings=settings, now=NOW
    )
    planned = await Planner(GENERATOR, settings.importance_weight, worker).plan(snapshot)
    if planned.policy != GENERATOR or planned.review is None:
        raise RuntimeError("the worker returned no plan")
    corrected_forecasts(waits, planned.review.forecasts, NOW)


if __name__ == "__main__":
    figures = asyncio.run(measured(int(sys.argv[1])))
    sys.stdout.write(msgspec.json.encode(figures).decode() + "\n")
