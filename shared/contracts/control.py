"""
Commands and notices on the control exchange. Receivers ignore unknown kinds.

An LSO command (`lso.*`) goes to one instance. If it has a `reply_to`, a routing key on
`headway.replies`, the instance answers it with one `LsoAnswered`. A repeated `command_id` gets the
same answer again.
"""

from enum import Enum
from typing import Annotated

import msgspec
from msgspec import Meta

from shared.contracts.base import (
    InstanceId,
    Message,
    ModelName,
    RequestId,
    RunId,
    Seconds,
    TenantId,
    UnixTime,
)
from shared.contracts.telemetry import RegistryState
from shared.contracts.tenants.policies import TenantsState


class StopReason(Enum):
    """Reason why a producer ends a run of its request."""

    DUPLICATE = "duplicate"
    CANCELLED = "cancelled"
    SUPERSEDED = "superseded"
    COMPLETED = "completed"


class RunStop(Message, frozen=True, kw_only=True, omit_defaults=True, tag="run.stop.v1"):
    """A producer's command to end a run that the producer does not need."""

    request_id: RequestId
    run_id: RunId
    reason: StopReason


class RequestCancel(
    Message, frozen=True, kw_only=True, omit_defaults=True, tag="request.cancel.v1"
):
    """A producer's command to cancel a request, wherever the request is."""

    request_id: RequestId
    reply_to: str | None = None
    """
    Name of the producer's reply queue, which is secret and authenticates the sender. A request
    without a reply queue is cancelled only by a message whose AMQP `user_id` is its tenant.

    Ids do not authenticate: producers choose them, so two requests may have equal ids.
    """


class StoredCancel(Message, frozen=True, kw_only=True, omit_defaults=True, tag="stored.cancel.v1"):
    """
    A gateway's command to cancel a request whose id the store knows, wherever the request is.

    The sender has authenticated the tenant; producers have no permission for the routing key.
    """

    tenant: TenantId
    request_id: RequestId


class CancelsMarked(
    Message, frozen=True, kw_only=True, omit_defaults=True, tag="cancels.marked.v1"
):
    """
    A mark that an agent puts into the stream of cancellations: when it reads the mark, it has read
    all cancellations that were sent before.
    """

    mark: str
    """Random, so that it differs from the marks of other agents and of earlier attempts."""


class LaneNonempty(Message, frozen=True, kw_only=True, omit_defaults=True, tag="lane.nonempty.v1"):
    """A message was put into an empty queue, so agents should pull from it."""

    queue: str
    source: str = ""
    """
    Name of the publisher, as in its reports; empty if a publisher still waits for the queue's lock.
    Only the leader acts on notices without a source: it keeps the queue.
    """
    put: int = 0
    """Number of requests that `source` has published to `queue` since its start."""


class GatewayStatus(
    Message, frozen=True, kw_only=True, omit_defaults=True, tag="gateway.status.v1"
):
    """What one gateway follows; published every `GATEWAY_PERIOD_S`."""

    gateway: str
    """Unique name of the gateway process."""
    registry: RegistryState | None = None
    """The registry that the gateway follows; None from gateways of older versions."""
    tenants: TenantsState | None = None
    """The policies that the gateway follows; None without a file of policies."""


GATEWAY_PERIOD_S: Seconds = 2.0
"""Period of `GatewayStatus`."""


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
    """The end of a queue retirement: the listed queues are deleted or kept."""

    deleted: tuple[str, ...] = ()
    kept: tuple[str, ...] = ()


class DrainInstance(
    Message, frozen=True, kw_only=True, omit_defaults=True, tag="instance.drain.v1"
):
    """
    Stop pulling, and finish or evict running requests; if `exit` is set, then end the process.
    """

    instance_id: InstanceId
    exit: bool = False


class _Order(Message, frozen=True, kw_only=True, omit_defaults=True):
    """Common fields of operators' commands to one instance."""

    instance_id: InstanceId
    command_id: str = ""
    """Unique id that the sender selects; commands with an empty id are never deduplicated."""
    reply_to: str | None = None
    """Routing key of the command's answer on `headway.replies`."""


class EvictRequest(_Order, frozen=True, kw_only=True, omit_defaults=True, tag="lso.evict.v1"):
    """Abort a run, and return the request with its progress to its resume queue."""

    request_id: RequestId


class LsoPull(_Order, frozen=True, kw_only=True, omit_defaults=True, tag="lso.pull.v1"):
    """Pull now within the bounds of pulled work, also from queues that were recently empty."""

    count: Annotated[int, Meta(ge=1, le=1000)] = 1


class LsoSwapOut(_Order, frozen=True, kw_only=True, omit_defaults=True, tag="lso.swap_out.v1"):
    """Remove a run from the engine; the instance keeps the request and resumes it later."""

    request_id: RequestId
    rest_s: Annotated[float, Meta(ge=0)] = 0.0
    """
    Minimum time until the request is resumed without a swap-in command. With 0 the request is
    resumed as soon as there is room.
    """


class LsoSwapIn(_Order, frozen=True, kw_only=True, omit_defaults=True, tag="lso.swap_in.v1"):
    """Resume a swapped-out request immediately."""

    request_id: RequestId


class LsoCheckpoint(_Order, frozen=True, kw_only=True, omit_defaults=True, tag="lso.checkpoint.v1"):
    """Keep the KV of a request in host memory also, from the request's next run on."""

    request_id: RequestId


class LsoClear(_Order, frozen=True, kw_only=True, omit_defaults=True, tag="lso.clear.v1"):
    """Drop the KV that no running request needs: prefix cache and host checkpoints."""


class LsoWarm(_Order, frozen=True, kw_only=True, omit_defaults=True, tag="lso.warm.v1"):
    """Load a model's weights into host memory."""

    model: ModelName


class LsoActivate(_Order, frozen=True, kw_only=True, omit_defaults=True, tag="lso.activate.v1"):
    """Activate a model; the model stays active until the next plan selects another model."""

    model: ModelName


class LsoPreempt(_Order, frozen=True, kw_only=True, omit_defaults=True, tag="lso.preempt.v1"):
    """Drop best-effort work within the current forward pass (ConServe §4.3)."""


class LsoSet(_Order, frozen=True, kw_only=True, omit_defaults=True, tag="lso.set.v1"):
    """Change limits of the running engine; the value None leaves a limit unchanged."""

    token_budget: Annotated[int, Meta(ge=1, le=2**31 - 1)] | None = None
    max_running: Annotated[int, Meta(ge=1, le=2**31 - 1)] | None = None


class LsoRun(_Order, frozen=True, kw_only=True, omit_defaults=True, tag="lso.run.v1"):
    """Execute an operation that a package of the instance's agent adds."""

    operation: str
    """Name of the operation's entry point."""
    arguments: dict[str, str] = msgspec.field(default_factory=dict)


class LsoOutcome(Enum):
    """Outcome of an LLM serving operation."""

    DONE = "done"
    ALREADY = "already"
    """Nothing was left to do for the operation."""
    REFUSED = "refused"
    """
    The instance's state does not allow the operation; nothing changed. The message has the reason.
    """
    FAILED = "failed"
    """The operation failed; the message has the reason."""


class LsoAnswered(Message, frozen=True, kw_only=True, omit_defaults=True, tag="lso.answered.v1"):
    """Result of one operator's command to an instance."""

    instance_id: InstanceId
    command_id: str = ""
    lso: str
    """Kind of the LLM serving operation, e.g. `swap_out`."""
    outcome: LsoOutcome
    message: str = ""
    duration_s: Seconds = 0.0
    num_bytes: int = 0
    """Number of bytes of KV or weights that the operation moved or dropped, as far as known."""
    at: UnixTime


class SnapshotRequested(
    Message, frozen=True, kw_only=True, omit_defaults=True, tag="snapshot.requested.v1"
):
    """Request to every receiver to publish its status now."""

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
    | LsoRun
)
Control = (
    RunStop
    | RequestCancel
    | StoredCancel
    | CancelsMarked
    | LaneNonempty
    | QueuesRetiring
    | QueuesRetired
    | DrainInstance
    | SnapshotRequested
    | LsoCommand
    | LsoAnswered
)
