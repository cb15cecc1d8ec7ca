"""Ranks of queued requests, and their order in the window."""

import math
from typing import NamedTuple

from shared.contracts.base import Seconds, UnixTime
from shared.contracts.requests import QueuedRequest
from solver.scheduling.engine.entry import Rank


class PriorityKey(NamedTuple):
    """Sort key of queued requests; the smallest is served first."""

    deadline_at: UnixTime
    negated_priority: int
    arrived_at: UnixTime
    request_id: str


def rank_of(request: QueuedRequest) -> Rank:
    """Rank of *request*; relegated work keeps its deadline but loses its rank."""
    if request.attempts.relegated:
        return Rank.RELEGATED
    return Rank.BEST_EFFORT if math.isinf(request.deadline_at) else Rank.REGULAR


def edf_key(request: QueuedRequest, *, aging_bound_s: Seconds) -> PriorityKey:
    """
    Key for earliest deadline first; work of a later rank gets a deadline from its age.

    From *aging_bound_s* after its arrival, work of a later rank competes with regular work, so that
    no request starves.
    """
    deadline_at = request.deadline_at
    if rank_of(request) is not Rank.REGULAR:
        deadline_at = request.arrived_at + aging_bound_s
    return PriorityKey(deadline_at, -request.priority, request.arrived_at, request.request_id)
