"""Commands and notices beside the data plane. Unknown kinds are ignored by receivers."""

from enum import Enum

from shared.contracts.base import InstanceId, Message, RequestId, RunId, UnixTime


class StopReason(Enum):
    """Why a producer wants a run to end."""

    DUPLICATE = "duplicate"
    CANCELLED = "cancelled"
    SUPERSEDED = "superseded"
    COMPLETED = "completed"


class RunStop(Message, frozen=True, kw_only=True, omit_defaults=True, tag="run.stop.v1"):
    """A producer's answer to a run it does not want."""

    request_id: RequestId
    run_id: RunId
    reason: StopReason


class RequestCancel(
    Message, frozen=True, kw_only=True, omit_defaults=True, tag="request.cancel.v1"
):
    """The producer gives the request up, wherever it is."""

    request_id: RequestId
    reply_to: str | None = None
    """Its reply queue, which nobody else knows: ids alone are the producers' own, and equal."""


class LaneNonempty(Message, frozen=True, kw_only=True, omit_defaults=True, tag="lane.nonempty.v1"):
    """Something was published to a queue that was quiet: look again."""

    queue: str


class DrainInstance(
    Message, frozen=True, kw_only=True, omit_defaults=True, tag="instance.drain.v1"
):
    """Stop pulling; finish or evict what runs; with `exit`, end the process then."""

    instance_id: InstanceId
    exit: bool = False


class EvictRequest(Message, frozen=True, kw_only=True, omit_defaults=True, tag="lso.evict.v1"):
    """Abort a run and send the request, with its progress, back to its resume queue."""

    instance_id: InstanceId
    request_id: RequestId


class SnapshotRequested(
    Message, frozen=True, kw_only=True, omit_defaults=True, tag="snapshot.requested.v1"
):
    """Whoever hears it publishes its status now."""

    reply_to: str | None = None
    at: UnixTime = 0.0


Control = RunStop | RequestCancel | LaneNonempty | DrainInstance | EvictRequest | SnapshotRequested
