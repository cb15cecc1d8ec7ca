"""Dispatch order of the requests that wait for an instance (QUARTZ §3.4)."""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from shared.contracts.base import Seconds, UnixTime

MAX_TARGET_S = 60.0
"""
Maximum time from arrival to deadline that counts in a dispatch key, so that requests age alike.
"""
_TOKENS_PER_UNIT = 1000.0


class Admission(Enum):
    """Formula of a dispatch key."""

    FIFO = "fifo"
    TOKEN_FAIR = "token-fair"  # noqa: S105 - tokens of prompts
    """The recent service of the tenant alone (VTC)."""
    SIZE = "size"
    """QUARTZ's key: size, aged by arrival, plus the tenant's recent service."""
    DEADLINE = "deadline"
    """
    Headway's key: size, aged by the deadline instead of the arrival, plus the tenant's recent
    service.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyInputs:
    """Inputs of a dispatch key; all inputs are known when the request is enqueued."""

    arrived_at: UnixTime
    deadline_at: UnixTime
    size_s: Seconds
    """Prefill time on the chosen instance, at a quantile (eq. 6) or as a mean."""
    service_rate_per_s: float
    """Recent tokens per second of the request's tenant."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyWeights:
    """
    Weights of the components of a key.

    Decided: QUARTZ gives no units. Here the key is in seconds: `aging` is the seconds of size that
    one second of waiting compensates. `fairness` is the seconds for each 1,000 tokens per second of
    the tenant's recent service.
    """

    aging: float
    fairness: float


def dispatch_key(admission: Admission, weights: KeyWeights, inputs: KeyInputs) -> float:
    """
    Dispatch key of a request, smaller first; fixed when the request is enqueued.

    A later arrival never has a smaller key, all else equal, so equal requests are first come, first
    served.

    Source: QUARTZ eqs 6-8, k_fair = s + λ·a + β·u(c).
    """
    return _KEYS[admission](weights, inputs)


def _size_key(weights: KeyWeights, inputs: KeyInputs) -> float:
    return inputs.size_s + weights.aging * inputs.arrived_at + _fairness_s(weights, inputs)


def _deadline_key(weights: KeyWeights, inputs: KeyInputs) -> float:
    """
    Dispatch key with the deadline instead of the arrival.

    Differs: eq. 7 ages by the deadline, so that the more urgent of two requests of equal size goes
    first. A deadline is an arrival plus a bounded target, so requests age no less than by eq. 7.
    """
    deadline_at = min(inputs.deadline_at, inputs.arrived_at + MAX_TARGET_S)
    return inputs.size_s + weights.aging * deadline_at + _fairness_s(weights, inputs)


def _fairness_s(weights: KeyWeights, inputs: KeyInputs) -> Seconds:
    return weights.fairness * inputs.service_rate_per_s / _TOKENS_PER_UNIT


_KEYS: dict[Admission, Callable[[KeyWeights, KeyInputs], float]] = {
    Admission.FIFO: lambda _, inputs: inputs.arrived_at,
    Admission.TOKEN_FAIR: lambda _, inputs: inputs.service_rate_per_s,
    Admission.SIZE: _size_key,
    Admission.DEADLINE: _deadline_key,
}
