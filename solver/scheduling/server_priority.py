"""Priorities of requests at a server of others that orders them by one number."""

import math

from shared.contracts.base import UnixTime
from shared.contracts.qos import QosClass, Slo

_RANKS = {QosClass.INTERACTIVE: 0, QosClass.NON_INTERACTIVE: 1, QosClass.BEST_EFFORT: 2}
_RANK_STEP = 10**12


def server_priority(slo: Slo, arrived_at: UnixTime) -> int:
    """Priority for vLLM's server, lower first: the class, then the deadline in units of 0.1 s."""
    deadline_at = slo.planning_deadline_at(arrived_at)
    within = 0 if math.isinf(deadline_at) else round(deadline_at * 10)
    return _RANKS[slo.qos_class] * _RANK_STEP + within
