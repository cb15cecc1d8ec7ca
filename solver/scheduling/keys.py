"""Ranks of queued requests, and their order in the window."""

from typing import NamedTuple

from shared.contracts.base import Seconds, UnixTime
from shared.contracts.requests import QueuedRequest
from solver.scheduling.engine.entry import Rank

FAR_S: Seconds = 3600.0
"""
Time to a deadline from which work yields like best effort.

Much longer than the targets of the papers' classes, and than one answer with its pauses takes.
"""


UNIMPORTANT_DELAY_S: Seconds = 500.0
"""
Delay of work of low importance in an overload.

Source: QoServe §3.4, which relegates such work first.
"""


class PriorityKey(NamedTuple):
    """Sort key of queued requests; the smallest is served first."""

    deadline_at: UnixTime
    negated_priority: int
    arrived_at: UnixTime
    request_id: str


def rank_of(request: QueuedRequest, now: UnixTime) -> Rank:
    """
    Rank of *request* at *now*; relegated work keeps its deadline but loses its rank.

    Decided: work whose deadline is far yields like best effort, as ConServe's offline requests do.
    With regular rank, the lines of a batch would occupy the slots that interactive requests need.
    """
    if request.attempts.relegated:
        return Rank.RELEGATED
    return Rank.BEST_EFFORT if is_far(request.deadline_at, now) else Rank.REGULAR


def is_far(deadline_at: UnixTime, now: UnixTime) -> bool:
    """True if work with this deadline may yield like best effort."""
    return deadline_at - now > FAR_S


def edf_key(request: QueuedRequest, rank: Rank, *, aging_bound_s: Seconds) -> PriorityKey:
    """
    Key for earliest deadline first; work of a later rank gets a deadline from its age.

    From *aging_bound_s* after its arrival, work of a later rank competes with regular work, so that
    no request starves; work with a deadline competes at the latest when the deadline is not far.
    """
    deadline_at = request.deadline_at
    if rank is not Rank.REGULAR:
        deadline_at = request.arrived_at + aging_bound_s
    if rank is Rank.BEST_EFFORT:
        deadline_at = min(deadline_at, request.deadline_at - FAR_S)
    return PriorityKey(deadline_at, -request.priority, request.arrived_at, request.request_id)
