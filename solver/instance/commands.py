"""What an instance does next: the output of `solver.instance.instance.Instance.handle`."""

from dataclasses import dataclass, field

from shared.contracts.base import InstanceId, ModelName, RunId, UnixTime
from shared.contracts.control import LsoCommand
from shared.contracts.qos import Slo
from shared.contracts.requests import Attempts, ErrorInfo, QueuedRequest
from shared.contracts.telemetry import ModelActivated
from solver.instance.events import Tag
from solver.planning.lso.operations import Lso
from solver.planning.lso.results import LsoResult


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """Base of all commands; executing a command again has no further effect."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Get(Command):
    """Take the first message of a queue: `Delivered` or `PullEnded` follows."""

    queue: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Submit(Command):
    """Begin a run on the engine; the run continues after the answer so far. `Ended` follows."""

    number: int
    """Number of the held request."""
    request: QueuedRequest
    run_id: RunId
    slo: Slo
    """Targets of this run."""
    room_tokens: int
    """Length of prompt and answer from which the run reports `Outgrown`."""
    checkpointed: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Abort(Command):
    """End a run and free its KV; the run's `Ended` follows in any case."""

    run_id: RunId


@dataclass(frozen=True, slots=True, kw_only=True)
class Reserve(Command):
    """Change the length from which a run reports `Outgrown`."""

    run_id: RunId
    room_tokens: int


class Publication:
    """A message that is published and confirmed before the next, and before the settlement."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion(Publication):
    """The final reply with the whole answer, to the producer or to the unclaimed replies."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure(Publication):
    """The final reply with an error, to the producer or to the unclaimed replies."""

    error: ErrorInfo


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadLetter(Publication):
    """A copy of the request in the dead letters, with the reason."""

    error: ErrorInfo


@dataclass(frozen=True, slots=True, kw_only=True)
class Requeueing(Publication):
    """The request with its progress, in a queue of its model."""

    queue: str
    attempts: Attempts


@dataclass(frozen=True, slots=True, kw_only=True)
class Depart(Command):
    """
    Publish messages in order and wait for their confirms, then acknowledge deliveries.

    `Departed` follows; or `Stranded`, with all deliveries unsettled, if a message is refused.
    """

    number: int
    """Number of the held request."""
    request: QueuedRequest
    how: str
    """The outcome in words, for logs."""
    publications: tuple[Publication, ...]
    tags: tuple[Tag, ...]
    pulled_at: UnixTime
    submitted_at: UnixTime = 0.0
    run_id: RunId | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Return(Command):
    """Return deliveries to their queues unchanged; delivery limits bound the repetitions."""

    number: int
    tags: tuple[Tag, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Discard(Command):
    """Acknowledge deliveries of another copy of a request that has left."""

    tags: tuple[Tag, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Renew(Command):
    """
    Publish a copy of a held request with its present progress to the instance's inbox: `Renewed` or
    `Unrenewed` follows. The request's deliveries stay as they are.
    """

    number: int
    """Number of the held request, by which its copy is recognized."""
    request: QueuedRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class Call(Command):
    """A call of the engine: `Done` or `Failed` with the same number follows."""

    command: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Start(Call):
    """Start a dead engine, without a model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Load(Call):
    """Make *model* the active model of the engine."""

    model: ModelName


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadWarm(Call):
    """Load *model* into host memory."""

    model: ModelName


@dataclass(frozen=True, slots=True, kw_only=True)
class Unload(Call):
    """Remove *model* from host memory."""

    model: ModelName


@dataclass(frozen=True, slots=True, kw_only=True)
class Release(Call):
    """
    Forget *model* with all its memory; refused while a request waits in one of the *queues*, which
    are known queues of the model.
    """

    model: ModelName
    queues: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit(Call):
    """Change the limits of the running engine."""

    token_budget: int
    max_running: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DropCaches(Call):
    """Drop all KV that no run owns."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PreemptNow(Call):
    """Drop the best-effort part of the forward pass at the next safepoint."""


CALLS: tuple[type[Call], ...] = (
    Start,
    Load,
    LoadWarm,
    Unload,
    Release,
    Limit,
    DropCaches,
    PreemptNow,
)
"""All kinds of calls."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Count(Command):
    """Find the queues with waiting requests: `Counted` follows."""

    queues: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim(Command):
    """Claim *model* among all instances without a plan: `Claimed` follows."""

    model: ModelName


@dataclass(frozen=True, slots=True, kw_only=True)
class Unclaim(Command):
    """Give a granted claim back."""

    model: ModelName


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer(Command):
    """Send the result of an order to its operator."""

    order: LsoCommand
    instance_id: InstanceId
    result: LsoResult


@dataclass(frozen=True, slots=True, kw_only=True)
class Record(Command):
    """Log and count an operation: at its begin without a result, at its end with one."""

    lso: Lso
    result: LsoResult | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Say(Command):
    """Log an event of the instance."""

    event: str
    fields: tuple[tuple[str, object], ...] = field(default=())
    is_error: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Report(Command):
    """Publish the status."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportActivation(Command):
    """Publish a finished activation."""

    activated: ModelActivated


@dataclass(frozen=True, slots=True, kw_only=True)
class WakeAt(Command):
    """Send `Wake` at *at*; replaces the last `WakeAt`."""

    at: UnixTime


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared(Command):
    """A stage of the start is over."""

    result: LsoResult | None = None
    """Result of activating the first model; None: all warm models are loaded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Drained(Command):
    """The instance holds no requests any more, and pulls none."""
