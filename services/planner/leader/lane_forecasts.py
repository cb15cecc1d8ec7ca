"""Lane forecasts that the leader publishes to groupers in each round."""

import asyncio

from services.planner.leader.plan_report import corrected_forecasts
from services.planner.leader.policies import Planned
from services.planner.leader.snapshot_builder import empty_lanes
from services.planner.settings import LeaderSettings
from services.planner.state import LeaderState
from shared.contracts.base import UnixTime
from shared.contracts.lanes import LaneLayout
from shared.contracts.plans import LaneForecast
from solver.planning.forecast import empty_lane_forecasts
from solver.planning.review import Review
from solver.prediction.calibration.lane_waits import LaneWaits

GROUPER_SILENT_S = 5.0
"""Time without reports after which a grouper is assumed to admit no requests."""


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
    Forecasts of the lanes in the plan and of empty lanes.

    Args:
        planned: The plan in force.
        review: Review of that plan.
        state: Totals of lanes.
        waits: Corrects forecasts, using the outcomes of earlier ones.
        layout: Lane layout in force.
        settings: Settings of the leader.
        counted_at: Time of the lane counts on which *planned* is based.
    """
    lanes = corrected_forecasts(waits, review.forecasts, counted_at)
    # Compute this in a thread, since there may be hundreds of lanes.
    empty = await asyncio.to_thread(
        lambda known, covered: empty_lane_forecasts(
            planned.snapshot,
            planned.order,
            empty_lanes(known, layout, counted_at, but=covered),
            importance_weight=settings.importance_weight,
        ),
        state.copied(),
        {each.lane for each in lanes},
    )
    return (*lanes, *empty)
