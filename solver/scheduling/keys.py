"""Service tiers and the order inside the window."""

import math
from enum import IntEnum
from typing import NamedTuple

from shared.contracts.base import Seconds, UnixTime
from shared.contracts.requests import QueuedRequest


class Tier(IntEnum):
    """Order of service; a lower tier waits until the one before has nothing to run."""

    REACHABLE = 0
    RELEGATED = 1
    BEST_EFFORT = 2


class PriorityKey(NamedTuple):
    """Smallest first."""

    deadline_at: UnixTime
    shed_rank: int
    arrived_at: UnixTime
    request_id: str


def tier_of(request: QueuedRequest) -> Tier:
    """Relegated work keeps its deadline but has lost its claim to it."""
    if request.attempts.relegated:
        return Tier.RELEGATED
    return Tier.BEST_EFFORT if math.isinf(request.deadline_at) else Tier.REACHABLE


def edf_key(request: QueuedRequest, *, aging_bound_s: Seconds) -> PriorityKey:
    """
    Earliest deadline first; work without a reachable deadline gets one from its age.

    *aging_bound_s* after arrival such work competes with the reachable, so nothing starves.
    """
    deadline_at = request.deadline_at
    if tier_of(request) is not Tier.REACHABLE:
        deadline_at = request.arrived_at + aging_bound_s
    return PriorityKey(deadline_at, -request.priority, request.arrived_at, request.request_id)
