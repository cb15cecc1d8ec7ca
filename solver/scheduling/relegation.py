"""Eager relegation at pull time (QoServe §3.4)."""

from shared.contracts.base import Seconds, UnixTime
from shared.contracts.qos import QosClass
from shared.contracts.requests import QueuedRequest

BUSY_TOKENS = 1024
"""Of an iteration while prefills wait: what an answer's token then takes."""


def busy_token_s(*, predicted_s: Seconds, pace_s: Seconds) -> Seconds:
    """
    What a token of an answer takes on an instance that is loaded.

    Args:
        predicted_s: Of an iteration of `BUSY_TOKENS`.
        pace_s: Mean of what iterations took lately; infinite when unknown.

    Decided: never longer than that. Where running slots are what requests wait for, there are
    prefills in few iterations, and batch work would be given up that is in no danger.
    """
    return min(predicted_s, pace_s)


def is_hopeless(
    request: QueuedRequest, *, now: UnixTime, prefill_s: Seconds, decode_s: Seconds
) -> bool:
    """
    Whether the SLO would be missed even if the request ran at once.

    Args:
        request: Not yet relegated.
        now: Unix seconds.
        prefill_s: Predicted time to its first token, alone.
        decode_s: Predicted time from first token to last: alone, or beside prefills on an
            instance that is loaded, where what is pulled just in time would else be late
            after it had cost everything.
    """
    if request.attempts.relegated:
        return False
    qos_class = request.slo.qos_class
    if qos_class is QosClass.INTERACTIVE and request.progress.first_token_at is not None:
        return False
    finish_s = finishing_s(qos_class, prefill_s=prefill_s, decode_s=decode_s)
    return now + finish_s > request.deadline_at


def finishing_s(qos_class: QosClass, *, prefill_s: Seconds, decode_s: Seconds) -> Seconds:
    """Predicted time until what the deadline is about: the first token, or the last."""
    return prefill_s if qos_class is QosClass.INTERACTIVE else prefill_s + decode_s
