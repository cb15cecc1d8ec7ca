"""Stops of a run, with defaults for irrelevant fields."""

from shared.contracts.base import InstanceId, RunId
from shared.contracts.control import StopReason
from shared.producer.effects import SendStop


def stop(run: str, reason: StopReason) -> SendStop:
    """The stop of a run on the instance that `started` gives it."""
    return SendStop(run_id=RunId(run), instance_id=InstanceId(f"instance-of-{run}"), reason=reason)
