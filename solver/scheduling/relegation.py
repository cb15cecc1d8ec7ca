"""Eager relegation at pull time (QoServe §3.4)."""

from shared.contracts.base import Seconds, UnixTime
from shared.contracts.qos import QosClass
from shared.contracts.requests import QueuedRequest

BUSY_TOKENS = 1024
"""
Assumed tokens of an iteration while prefills wait; determines the time of an answer token.
"""


def busy_token_s(*, predicted_s: Seconds, pace_s: Seconds) -> Seconds:
    """
    Time of one answer token on a loaded instance.

    Args:
        predicted_s: Duration of an iteration of `BUSY_TOKENS`.
        pace_s: Mean duration of recent iterations; infinite when unknown.

    Decided: the time is the mean of recent iterations, at most *predicted_s*. If requests wait for
    running slots, few iterations have prefills, and *predicted_s* alone would relegate batch work
    without need.
    """
    return min(predicted_s, pace_s)


def is_infeasible(
    request: QueuedRequest, *, now: UnixTime, prefill_s: Seconds, decode_s: Seconds
) -> bool:
    """
    True if the SLO would be missed even if the request ran immediately.

    Args:
        request: The result is False for a request that is already relegated.
        now: Unix seconds.
        prefill_s: Predicted time to its first token: alone, or on a server of others as much
            longer as earlier prefills took there.
        decode_s: Predicted time from first to last token: alone, or beside prefills on a loaded
            instance. On a loaded instance, a prediction for a request alone would accept requests
            that end late.
    """
    if request.attempts.relegated:
        return False
    qos_class = request.slo.qos_class
    if qos_class is QosClass.INTERACTIVE and request.progress.first_token_at is not None:
        return False
    finish_s = finishing_s(qos_class, prefill_s=prefill_s, decode_s=decode_s)
    return now + finish_s > request.deadline_at


def finishing_s(qos_class: QosClass, *, prefill_s: Seconds, decode_s: Seconds) -> Seconds:
    """Predicted time until the token to which the deadline applies: the first or the last token."""
    return prefill_s if qos_class is QosClass.INTERACTIVE else prefill_s + decode_s
