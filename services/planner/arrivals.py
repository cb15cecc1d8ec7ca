"""What has come to lanes lately, for leases and shares of express models."""

from collections.abc import Iterator

from services.planner.rates import output_tokens
from services.planner.state import LeaderState
from shared.contracts.errors import ContractError
from shared.contracts.lanes import LaneKey, LaneLayout
from solver.planning.express import LaneArrivals
from solver.planning.lanes import band_lower_edge_s


def lane_arrivals(state: LeaderState, layout: LaneLayout) -> Iterator[LaneArrivals]:
    """Of every lane that a grouper has told of; one that several fill comes as often."""
    for observed in state.lanes.values():
        for total in observed.lanes:
            key = _lane(total.lane)
            if key is None or not total.requests:
                continue
            answer = output_tokens(state, key.model, total.max_tokens / total.requests).mean
            yield LaneArrivals(
                model=key.model,
                least_left_s=band_lower_edge_s(key.band, layout),
                arrivals=total.arrivals,
                tokens=total.prompt_tokens / total.requests + answer,
            )


def _lane(queue: str) -> LaneKey | None:
    try:
        return LaneKey.parse(queue)
    except ContractError:
        return None
