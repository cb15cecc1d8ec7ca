"""
Commands and notices besides the data plane. Receivers ignore unknown kinds.

LSO commands (`lso.*`) go to one instance. With `reply_to`, a key on `headway.replies`, each is
answered by one `LsoAnswered`; a repeated `command_id` gets the same answer again.
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
    """Reason why a producer ends a run."""

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
    """The producer cancels the request, wherever it is."""

    request_id: RequestId
    reply_to: str | None = None
    """
    The producer's secret reply queue. It authenticates the sender: ids are chosen by producers
    and may be equal.
    """


class LaneNonempty(Message, frozen=True, kw_only=True, omit_defaults=True, tag="lane.nonempty.v1"):
    """Something was published to a queue that was empty: agents should try to pull again."""

    queue: str
    source: str = ""
    """Publisher, as in its reports; empty if it sends none."""
    put: int = 0
    """Number of requests that `source` has published to `queue` since its start."""


class QueuesRetiring(
    Message, frozen=True, kw_only=True, omit_defaults=True, tag="queues.retiring.v1"
):
    """
    The leader is about to delete idle queues. Receivers release the queues that they do not use,
    and list them in their next report.
    """

    queues: tuple[str, ...]


class QueuesRetired(
    Message, frozen=True, kw_only=True, omit_defaults=True, tag="queues.retired.v1"
):
    """The end of a retirement."""

    deleted: tuple[str, ...] = ()
    kept: tuple[str, ...] = ()


class DrainInstance(
    Message, frozen=True, kw_only=True, omit_defaults=True, tag="instance.drain.v1"
):
    """Stop pulling; finish or evict running requests; with `exit`, end the process afterwards."""

    instance_id: InstanceId
    exit: bool = False


class _Order(Message, frozen=True, kw_only=True, omit_defaults=True):
    """Common fields of operators' commands to one instance."""

    instance_id: InstanceId
    command_id: str = ""
    """Unique id chosen by the sender; commands with an empty id are never deduplicated."""
    reply_to: str | None = None
    """Routing key of the answer on `headway.replies`."""


class EvictRequest(_Order, frozen=True, kw_only=True, omit_defaults=True, tag="lso.evict.v1"):
    """Abort a run and send the request, with its progress, back to its resume queue."""

    request_id: RequestId


class LsoPull(_Order, frozen=True, kw_only=True, omit_defaults=True, tag="lso.pull.v1"):
    """Pull now, within the bounds, also from queues that seemed empty."""

    count: Annotated[int, Meta(ge=1, le=1000)] = 1


class LsoSwapOut(_Order, frozen=True, kw_only=True, omit_defaults=True, tag="lso.swap_out.v1"):
    """Take a run off the engine and keep the request on this instance, which resumes it later."""

    request_id: RequestId
    rest_s: Annotated[float, Meta(ge=0)] = 0.0
    """
    Minimum time before the request is resumed, unless a command swaps it in earlier; 0: it is
    resumed as soon as there is room.
    """


class LsoSwapIn(_Order, frozen=True, kw_only=True, omit_defaults=True, tag="lso.swap_in.v1"):
    """Resume a swapped-out request now."""

    request_id: RequestId


class LsoCheckpoint(_Order, frozen=True, kw_only=True, omit_defaults=True, tag="lso.checkpoint.v1"):
    """From the next run of the request on, also keep its KV in host memory."""

    request_id: RequestId


class LsoClear(_Order, frozen=True, kw_only=True, omit_defaults=True, tag="lso.clear.v1"):
    """Drop the KV that no running request needs: prefix cache and host checkpoints."""


class LsoWarm(_Order, frozen=True, kw_only=True, omit_defaults=True, tag="lso.warm.v1"):
    """Load a model's weights into host memory."""

    model: ModelName


class LsoActivate(_Order, frozen=True, kw_only=True, omit_defaults=True, tag="lso.activate.v1"):
    """Make a model the active one until the next plan selects another."""

    model: ModelName


class LsoPreempt(_Order, frozen=True, kw_only=True, omit_defaults=True, tag="lso.preempt.v1"):
    """Drop best-effort work within the current forward pass (ConServe §4.3)."""


class LsoSet(_Order, frozen=True, kw_only=True, omit_defaults=True, tag="lso.set.v1"):
    """Change limits of the running engine; None leaves a limit unchanged."""

    token_budget: Annotated[int, Meta(ge=1, le=2**31 - 1)] | None = None
    max_running: Annotated[int, Meta(ge=1, le=2**31 - 1)] | None = None


class LsoOutcome(Enum):
    """Outcome of an operation."""

    DONE = "done"
    ALREADY = "already"
    """There was nothing to do."""
    REFUSED = "refused"
    """The operation is not possible in the current state; the message says why. Nothing changed."""
    FAILED = "failed"
    """The operation was tried and failed; the message says how."""


class LsoAnswered(Message, frozen=True, kw_only=True, omit_defaults=True, tag="lso.answered.v1"):
    """Result of one command."""

    instance_id: InstanceId
    command_id: str = ""
    lso: str
    """Kind of the operation, e.g. `swap_out`."""
    outcome: LsoOutcome
    message: str = ""
    duration_s: Seconds = 0.0
    num_bytes: int = 0
    """Bytes of KV or weights that were moved or dropped, where known."""
    at: UnixTime


class SnapshotRequested(
    Message, frozen=True, kw_only=True, omit_defaults=True, tag="snapshot.requested.v1"
):
    """Asks every receiver to publish its status now."""

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
    | QueuesRetiring
    | QueuesRetired
    | DrainInstance
    | SnapshotRequested
    | LsoCommand
    | LsoAnswered
)
