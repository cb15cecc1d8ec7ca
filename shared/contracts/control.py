"""
Commands and notices beside the data plane. Unknown kinds are ignored by receivers.

LSO commands (`lso.*`) go to one instance. With `reply_to`, a key on `headway.replies`, each is
answered by one `LsoAnswered`; a `command_id` that was answered before is answered the same again.
"""

from enum import Enum
from typing import Annotated

from msgspec import Meta

from shared.contracts.base import (
    InstanceId,
    Message,
    ModelName,
    RequestId,
    RunId,
    Seconds,
    UnixTime,
)


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


class _Order(Message, frozen=True, kw_only=True, omit_defaults=True):
    """What all operators' orders to one instance have in common."""

    instance_id: InstanceId
    command_id: str = ""
    """Chosen by the sender, unique; empty is never recognised again."""
    reply_to: str | None = None
    """Where the answer goes, on `headway.replies`."""


class EvictRequest(_Order, frozen=True, kw_only=True, omit_defaults=True, tag="lso.evict.v1"):
    """Abort a run and send the request, with its progress, back to its resume queue."""

    request_id: RequestId


class LsoPull(_Order, frozen=True, kw_only=True, omit_defaults=True, tag="lso.pull.v1"):
    """Pull now, within the bounds, also from queues that seemed empty."""

    count: Annotated[int, Meta(ge=1, le=1000)] = 1


class LsoSwapOut(_Order, frozen=True, kw_only=True, omit_defaults=True, tag="lso.swap_out.v1"):
    """Take a run off the engine and keep the request, to resume it here."""

    request_id: RequestId
    rest_s: Annotated[float, Meta(ge=0)] = 0.0
    """It is not resumed before, unless it is swapped in; 0 is as soon as there is room."""


class LsoSwapIn(_Order, frozen=True, kw_only=True, omit_defaults=True, tag="lso.swap_in.v1"):
    """Resume a swapped-out request now."""

    request_id: RequestId


class LsoCheckpoint(_Order, frozen=True, kw_only=True, omit_defaults=True, tag="lso.checkpoint.v1"):
    """From its next run on, keep a request's KV in host memory, too."""

    request_id: RequestId


class LsoClear(_Order, frozen=True, kw_only=True, omit_defaults=True, tag="lso.clear.v1"):
    """Drop the KV that no running request needs: prefix cache and host checkpoints."""


class LsoWarm(_Order, frozen=True, kw_only=True, omit_defaults=True, tag="lso.warm.v1"):
    """Bring a model's weights into host memory."""

    model: ModelName


class LsoActivate(_Order, frozen=True, kw_only=True, omit_defaults=True, tag="lso.activate.v1"):
    """Make a model the active one, until the next plan says otherwise."""

    model: ModelName


class LsoPreempt(_Order, frozen=True, kw_only=True, omit_defaults=True, tag="lso.preempt.v1"):
    """Drop best-effort work inside the forward pass that runs (ConServe §4.3)."""


class LsoSet(_Order, frozen=True, kw_only=True, omit_defaults=True, tag="lso.set.v1"):
    """Change limits of the running engine; none leaves one as it is."""

    token_budget: Annotated[int, Meta(ge=1, le=2**31 - 1)] | None = None
    max_running: Annotated[int, Meta(ge=1, le=2**31 - 1)] | None = None


class LsoOutcome(Enum):
    """How an operation ended."""

    DONE = "done"
    ALREADY = "already"
    """Nothing was to be done."""
    REFUSED = "refused"
    """It makes no sense here and now; the message says why. Nothing was changed."""
    FAILED = "failed"
    """It was tried; the message says what happened."""


class LsoAnswered(Message, frozen=True, kw_only=True, omit_defaults=True, tag="lso.answered.v1"):
    """What became of one command."""

    instance_id: InstanceId
    command_id: str = ""
    lso: str
    """Kind of the operation, e.g. `swap_out`."""
    outcome: LsoOutcome
    message: str = ""
    duration_s: Seconds = 0.0
    num_bytes: int = 0
    """Of KV or weights that were moved or dropped, as far as that is known."""
    at: UnixTime


class SnapshotRequested(
    Message, frozen=True, kw_only=True, omit_defaults=True, tag="snapshot.requested.v1"
):
    """Whoever hears it publishes its status now."""

    reply_to: str | None = None
    at: UnixTime = 0.0


LsoCommand = (
    EvictRequest
    | LsoPull
    | LsoSwapOut
    | LsoSwapIn
    | LsoCheckpoint
    | LsoClear
    | LsoWarm
    | LsoActivate
    | LsoPreempt
    | LsoSet
)
Control = (
    RunStop
    | RequestCancel
    | LaneNonempty
    | DrainInstance
    | SnapshotRequested
    | LsoCommand
    | LsoAnswered
)
