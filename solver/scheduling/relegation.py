"""Eager relegation at pull time (QoServe §3.4)."""

from shared.contracts.base import Seconds, UnixTime
from shared.contracts.qos import QosClass
from shared.contracts.requests import QueuedRequest


def is_hopeless(
    request: QueuedRequest, *, now: UnixTime, prefill_s: Seconds, decode_s: Seconds
) -> bool:
    """
    Whether the SLO would be missed even if the request ran at once and alone.

    Args:
        request: Not yet relegated.
        now: Unix seconds.
        prefill_s: Predicted time to its first token.
        decode_s: Predicted time from first token to last.
    """
    if request.slo.qos_class is QosClass.BEST_EFFORT or request.attempts.relegated:
        return False
    if request.slo.qos_class is QosClass.INTERACTIVE:
        if request.progress.first_token_at is not None:
            return False
        return now + prefill_s > request.deadline_at
    return now + prefill_s + decode_s > request.deadline_at
