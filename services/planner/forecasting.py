"""What the leader tells groupers of lanes, each round."""

import asyncio

from services.planner.explaining import corrected_forecasts
from services.planner.policies import Planned
from services.planner.settings import LeaderSettings
from services.planner.state import LeaderState
from services.planner.view import empty_lanes
from shared.contracts.base import UnixTime
from shared.contracts.lanes import LaneLayout
from shared.contracts.plans import LaneForecast
from solver.planning.forecast import empty_lane_forecasts
from solver.planning.review import Review
from solver.prediction.lane_waits import LaneWaits

GROUPER_SILENT_S = 5.0
"""A grouper that has told nothing for so long takes in nothing."""


async def forecasts_of(
    planned: Planned,
    review: Review,
    state: LeaderState,
    waits: LaneWaits,
    *,
    layout: LaneLayout,
    settings: LeaderSettings,
    counted_at: UnixTime,
) -> tuple[LaneForecast, ...]:
    """
    Forecasts of lanes in which something waits, by the plan, and of the others.

    Args:
        planned: The plan in force.
        review: Its.
        state: What lanes have had.
        waits: Corrects forecasts by what came of earlier ones.
        layout: Of lanes, in force.
        settings: The leader's.
        counted_at: When lanes were counted for *planned*.
    """
    lanes = corrected_forecasts(waits, review.forecasts, counted_at)
    # In a thread: there may be hundreds of lanes.
    empty = await asyncio.to_thread(
        lambda known, told: empty_lane_forecasts(
            planned.snapshot,
            planned.order,
            empty_lanes(known, layout, counted_at, but=told),
            tier_weight=settings.tier_weight,
        ),
        state.copied(),
        {each.lane for each in lanes},
    )
    return (*lanes, *empty)
