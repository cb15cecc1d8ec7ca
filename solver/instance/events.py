"""What has happened to an instance: the input of `solver.instance.instance.Instance.handle`."""

from enum import Enum

import msgspec

from shared.contracts.base import ModelName, RequestId, RunId, Seconds, UnixTime
from shared.contracts.control import LsoCommand
from shared.contracts.estimates import Profile
from shared.contracts.plans import PlanPublished
from shared.contracts.requests import ErrorInfo, QueuedRequest
from shared.contracts.telemetry import ModelState


class Tag(msgspec.Struct, frozen=True):
    """An unsettled delivery; void after its connection is lost."""

    queue: str
    connection: int
    """Number of the connection that delivered the message."""
    number: int
    """Number of the delivery, unique in the process."""


class Event(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="event"):
    """Base of all events."""


class Delivered(Event, frozen=True, kw_only=True, tag="delivered"):
    """A `Get` returned a request."""

    tag: Tag
    request: QueuedRequest
    renewal: int | None = None
    """Number of the held request of which a `Renew` of this process has published this copy."""


class PullOutcome(Enum):
    """Result of a `Get` that returned no request."""

    EMPTY = "empty"
    ABSENT = "absent"
    """The queue does not exist, or the broker refuses to read it."""
    UNREACHABLE = "unreachable"
    """The broker cannot be reached."""
    DEAD_LETTERED = "dead_lettered"
    """The message was not a request and is among the dead letters now."""


class PullEnded(Event, frozen=True, kw_only=True, tag="pull_ended"):
    """A `Get` returned no request."""

    queue: str
    outcome: PullOutcome
    asked_at: UnixTime


class Noticed(Event, frozen=True, kw_only=True, tag="noticed"):
    """A request was put into a work queue."""

    queue: str


class Retiring(Event, frozen=True, kw_only=True, tag="retiring"):
    """The leader is about to delete *queues*."""

    queues: tuple[str, ...]


class Retired(Event, frozen=True, kw_only=True, tag="retired"):
    """The leader has deleted and kept queues."""

    deleted: tuple[str, ...] = ()
    kept: tuple[str, ...] = ()


class Renewed(Event, frozen=True, kw_only=True, tag="renewed"):
    """The broker has confirmed the copy of a `Renew` in the inbox."""

    number: int


class Unrenewed(Event, frozen=True, kw_only=True, tag="unrenewed"):
    """The copy of a `Renew` could not be published, or it is unknown whether it was."""

    number: int


class Lost(Event, frozen=True, kw_only=True, tag="lost"):
    """The connection to the broker was lost; its deliveries are void."""

    connection: int


class Connected(Event, frozen=True, kw_only=True, tag="connected"):
    """A connection to the broker was made."""


class Counted(Event, frozen=True, kw_only=True, tag="counted"):
    """Queues with waiting requests, as answer to `Count`."""

    ready: tuple[str, ...]


class Claimed(Event, frozen=True, kw_only=True, tag="claimed"):
    """Answer to `Claim`."""

    model: ModelName
    granted: bool


class Rendered(Event, frozen=True, kw_only=True, tag="rendered"):
    """The prompts of a run were rendered, and their length is not the one of the request."""

    run_id: RunId
    prompt_tokens: int


class Begun(Event, frozen=True, kw_only=True, tag="begun"):
    """A run has generated its first token."""

    run_id: RunId


class Outgrown(Event, frozen=True, kw_only=True, tag="outgrown"):
    """The answer of a run needs more KV than was reserved for it."""

    run_id: RunId
    num_tokens: int
    """Number of tokens of the answer so far, progress included."""


class RunEnd(Enum):
    """How the engine ended a run."""

    FINISHED = "finished"
    """The answer is complete."""
    ABORTED = "aborted"
    """The run was aborted before its answer was complete."""
    REFUSED = "refused"
    """The request is invalid, or the engine does not support it."""
    NOT_ACTIVE = "not_active"
    """The engine has another model."""
    CUT_OFF = "cut_off"
    """The connection to a server of others broke, or the server ended it before the answer."""
    BROKEN = "broken"
    """The instance could not run the request, because of a bug."""
    DIED = "died"
    """The engine died during the run."""


class Ended(Event, frozen=True, kw_only=True, tag="ended"):
    """A run has ended; no event of this run follows."""

    run_id: RunId
    how: RunEnd
    num_tokens: int = 0
    """Number of tokens of the answer so far, progress included."""
    first_token_at: UnixTime | None = None
    """Time of the answer's first token, maybe of an earlier run."""
    prompt_tokens: int = 0
    """Length of the prompt as the engine counted it; 0: that of the request counts."""
    error: ErrorInfo | None = None


class EngineView(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """State of the engine as the agent last observed it."""

    alive: bool = False
    model: ModelName | None = None
    waiting: int = 0
    """Number of runs that wait inside the engine."""
    max_running: int = 1
    spare_running: int = 0
    """Runs beyond `max_running` by which an engine is tried; only of work that can wait."""
    most_run: int | None = None
    """Most runs that the engine was seen to compute at once; None if it computes `max_running`."""
    kv_capacity_tokens: int = 0
    """0 if the engine has not reported it."""
    models: tuple[ModelState, ...] = ()
    warm_capacity_bytes: int = 0
    host_kv_bytes: int = 0
    host_kv_capacity_bytes: int = 0
    restored_bytes_per_s: float = 0.0
    """Measured rate of KV transfers from host memory; 0 before the first transfer."""
    longest_gap_s: Seconds = float("inf")
    """Longest recent time between two tokens of an answer; infinite if unknown."""
    pace_s: Seconds = float("inf")
    """Mean duration of recent iterations; infinite if unknown."""


class Loaded(Event, frozen=True, kw_only=True, tag="loaded"):
    """Present state of the engine, and the lengths of the answers that run."""

    engine: EngineView
    lengths: dict[RunId, int] = {}  # msgspec copies an empty default
    """Run -> number of tokens of its answer so far, progress included."""


class EngineDied(Event, frozen=True, kw_only=True, tag="engine_died"):
    """The engine died; the `Ended` of its runs follow."""


class Planned(Event, frozen=True, kw_only=True, tag="planned"):
    """A plan arrived."""

    plan: PlanPublished


class Profiled(Event, frozen=True, kw_only=True, tag="profiled"):
    """A profile of this kind of engine arrived."""

    profile: Profile


class Cancelled(Event, frozen=True, kw_only=True, tag="cancelled"):
    """A producer cancelled a request, wherever the request is."""

    request_id: RequestId
    reply_to: str | None = None
    user: str | None = None
    """Sender, as the broker has authenticated it; it counts for requests without a reply queue."""
    stored_of: str | None = None
    """Tenant whose stored request a gateway or planner cancels; then the sender counts no more."""


class RunStopped(Event, frozen=True, kw_only=True, tag="run_stopped"):
    """A producer no longer needs a run."""

    request_id: RequestId
    run_id: RunId


class Ordered(Event, frozen=True, kw_only=True, tag="ordered"):
    """An operator ordered an operation."""

    order: LsoCommand


class Started(Event, frozen=True, kw_only=True, tag="started"):
    """The engine runs, and the instance may serve."""

    initial: ModelName | None = None
    """Model that is activated before the first plan."""
    warm: tuple[ModelName, ...] = ()
    """Models that are loaded into host memory while the instance serves."""


class Draining(Event, frozen=True, kw_only=True, tag="draining"):
    """The instance must hand back its requests and pull no more."""

    drain_s: Seconds | None = None
    """
    Time in which runs may finish before they are evicted and the instance ends; None: the instance
    stays, and its runs finish.
    """


class ModelFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes of a model in bytes, 0 if unknown."""

    model: ModelName
    weight_bytes: int = 0
    kv_bytes_per_token: int = 0


class Added(Event, frozen=True, kw_only=True, tag="added"):
    """A model that the instance may serve was added."""

    model: ModelFacts


class Removed(Event, frozen=True, kw_only=True, tag="removed"):
    """A model was removed from the registry: its requests get served, and it is released."""

    model: ModelName


class Done(Event, frozen=True, kw_only=True, tag="done"):
    """A command with a number was executed."""

    command: int
    duration_s: Seconds = 0.0
    acted: bool = True
    """False if there was nothing to do."""


class Failed(Event, frozen=True, kw_only=True, tag="failed"):
    """A command with a number could not be executed."""

    command: int
    message: str
    refused: bool = False
    """True if nothing was changed."""


class Departed(Event, frozen=True, kw_only=True, tag="departed"):
    """A `Depart` was executed: its messages are confirmed and its deliveries settled."""

    number: int


class Stranded(Event, frozen=True, kw_only=True, tag="stranded"):
    """The messages of a `Depart` could not be published; its deliveries are unsettled."""

    number: int


class Stalled(Event, frozen=True, kw_only=True, tag="stalled"):
    """The process did not run for a while, so no message could arrive."""

    missed_s: Seconds


class Wake(Event, frozen=True, kw_only=True, tag="wake"):
    """The time of the last `WakeAt` has come."""
