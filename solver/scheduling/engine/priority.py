"""Formulas of the keys of waiting requests, and their inputs; the smallest key is served first."""

from collections.abc import Callable
from enum import Enum

from shared.contracts.base import Seconds, UnixTime
from shared.contracts.qos import QosClass


class Ordering(Enum):
    """Order of waiting work within one rank."""

    FCFS = "fcfs"
    EDF = "edf"
    SRPF = "srpf"
    """Shortest remaining prefill first."""
    HYBRID = "hybrid"
    """QoServe's hybrid key: deadline plus weighted remaining work."""
    QUARTZ = "quartz"
    """
    QUARTZ's key: size, aged by arrival: `s + λ·a`, where s is the size and a is the arrival time.
    """
    COMBINED = "combined"
    """The hybrid key of QoServe plus a delay for the engine time that the tenant used before."""


AGING_WEIGHT = 0.2
"""QUARTZ's lambda: seconds of work that one second of waiting compensates."""


def remaining_work_tokens(
    qos_class: QosClass, *, prefill_tokens: float, decode_tokens: float
) -> float:
    """
    Work tokens in eqs 4 and 5: the prefill, and without a TBT target also the expected decode.

    Source: QoServe eqs 4-5, algorithm 1.
    Decided: work is in tokens, as in algorithm 1; the paper's text says time. So the work weight is
    in seconds per token, the unit of the paper's 8 ms/token.
    """
    if qos_class is QosClass.INTERACTIVE:
        return prefill_tokens
    return prefill_tokens + decode_tokens


KeyFunction = Callable[[UnixTime, UnixTime, float, Seconds, Seconds], float]


KEYS: dict[Ordering, KeyFunction] = {
    Ordering.FCFS: lambda arrived_at, _deadline, _work, _weight, _service: arrived_at,
    Ordering.EDF: lambda _arrived, deadline_at, _work, _weight, _service: deadline_at,
    Ordering.SRPF: lambda _arrived, _deadline, work, _weight, _service: work,
    Ordering.HYBRID: lambda _arrived, deadline_at, work, weight, _service: (
        deadline_at + weight * work
    ),
    Ordering.QUARTZ: lambda arrived_at, _deadline, work, weight, service_s: (
        weight * work + AGING_WEIGHT * arrived_at + service_s
    ),
    Ordering.COMBINED: lambda _arrived, deadline_at, work, weight, service_s: (
        deadline_at + weight * work + service_s
    ),
}
"""
Key functions by order, with arguments arrival, deadline, work tokens, work weight, tenant service.

The work weight is in seconds per token. The tenant service is the engine time that the tenant had
used when the request arrived, times `fairness_weight`, in seconds.
"""
