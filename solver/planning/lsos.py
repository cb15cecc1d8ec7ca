"""LLM serving operations as values (QLM §5): what is to be done, and why."""

from dataclasses import dataclass
from enum import Enum
from typing import ClassVar

from shared.contracts.base import ModelName, RequestId, Seconds


class Rule(Enum):
    """Why an operation is chosen: a sentence that the reason's facts complete."""

    ORDERED = "an operator ordered it"
    INITIAL = "the settings name {model} as the first model"
    PLANNED = "{model} heads the virtual queue"
    PLANNED_CHEAPEST = (
        "{model} heads the virtual queue; cheapest are {drain_s:.3g} s of draining, "
        "{recompute_s:.3g} s of computing again and {return_s:.3g} s of coming back "
        "(draining all {drain_all_s:.3g} s, evicting all {evict_all_s:.3g} s)"
    )
    PLANNED_BLIND = (
        "{model} heads the virtual queue; nobody can tell how long what runs takes: it may finish "
        "within {drain_s:.3g} s"
    )
    LATER = "{model} stands later in the virtual queue; {num_bytes} bytes fit into host memory"
    NOT_QUEUED = "{model} is not in the virtual queue and others need its host memory"
    EVICT_CHEAPER = (
        "{new} replaces {old}: draining {drain_s:.3g} s and computing again {recompute_s:.3g} s "
        "is the cheapest"
    )
    MODEL_LEAVES = "{model}, whose KV it has, leaves the instance"
    DRAIN_OVER = "it still ran after {drain_s:.3g} s of draining"
    HEAD_NEEDS_ROOM = "the head lacks {lack_tokens} tokens and {lack_slots} slots; {verdict}"
    ROOM_AGAIN = "the head leaves room for its {tokens} tokens"
    LEASE_ENDED = "it was swapped out for {lease_s:.3g} s, as long as its lease"
    LATE = "its deadline passed while it waited in the engine"
    PULL_ROOM = "there is room for {count} more"


@dataclass(frozen=True, slots=True)
class Reason:
    """A rule and the figures that it was decided on."""

    rule: Rule
    facts: tuple[tuple[str, str | float], ...] = ()

    @property
    def text(self) -> str:
        """For logs and people."""
        return self.rule.value.format(**dict(self.facts))


def because(rule: Rule, **facts: str | float) -> Reason:
    """A reason; *facts* are the names in the rule's sentence."""
    return Reason(rule, tuple(facts.items()))


ORDERED = Reason(Rule.ORDERED)


class Track(Enum):
    """
    What an operation acts on. Operations of one track follow one another.

    One that acts on both waits for the first here first, and keeps the second from nobody
    meanwhile: weights on their way take long.
    """

    WARM_SET = "warm_set"
    """Models in host memory."""
    RUNS = "runs"
    """Requests on the engine, and the active model that they need."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lso:
    """
    One operation on one instance. A subclass is a new kind: the agent registers how it is done.

    `tracks` are what it acts on; one in the background is not waited for by whoever follows a
    plan, because nothing else depends on it.
    """

    kind: ClassVar[str]
    tracks: ClassVar[tuple[Track, ...]] = (Track.RUNS,)
    background: ClassVar[bool] = False
    reason: Reason = ORDERED
    predicted_s: Seconds | None = None
    """What it costs, whoever pays; none when nobody can tell."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pull(Lso):
    """Take requests out of the head's lanes now, as far as the bounds allow."""

    kind: ClassVar[str] = "pull"
    background: ClassVar[bool] = True
    count: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Evict(Lso):
    """Send requests back to their resume queues with their progress; their KV is dropped."""

    kind: ClassVar[str] = "evict"
    request_ids: tuple[RequestId, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SwapOut(Lso):
    """Take a run off the engine; the instance keeps the request, to resume it here."""

    kind: ClassVar[str] = "swap_out"
    request_id: RequestId
    rest_s: Seconds = 0.0
    """It is not resumed before unless it is swapped in; 0 is when there is room."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SwapIn(Lso):
    """Resume a swapped-out request now."""

    kind: ClassVar[str] = "swap_in"
    request_id: RequestId


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint(Lso):
    """Keep a request's KV in host memory, too, as it grows."""

    kind: ClassVar[str] = "checkpoint"
    request_id: RequestId


@dataclass(frozen=True, slots=True, kw_only=True)
class ClearCaches(Lso):
    """Drop KV that no running request needs: prefix cache and host checkpoints."""

    kind: ClassVar[str] = "clear"


@dataclass(frozen=True, slots=True, kw_only=True)
class Warm(Lso):
    """Bring a model's weights into host memory (QLM: storage-CPU swapping)."""

    kind: ClassVar[str] = "warm"
    tracks: ClassVar[tuple[Track, ...]] = (Track.WARM_SET,)
    background: ClassVar[bool] = True
    model: ModelName


@dataclass(frozen=True, slots=True, kw_only=True)
class Cool(Lso):
    """Give up a model's weights in host memory."""

    kind: ClassVar[str] = "cool"
    tracks: ClassVar[tuple[Track, ...]] = (Track.WARM_SET,)
    background: ClassVar[bool] = True
    model: ModelName


@dataclass(frozen=True, slots=True, kw_only=True)
class Activate(Lso):
    """Make a model the active one (QLM: CPU-GPU swapping); all KV of the one before goes."""

    kind: ClassVar[str] = "activate"
    tracks: ClassVar[tuple[Track, ...]] = (Track.RUNS, Track.WARM_SET)
    model: ModelName
    drain_s: Seconds = 0.0
    """What runs may finish for so long; then it is evicted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Preempt(Lso):
    """Drop best-effort work inside the forward pass that runs (ConServe §4.3)."""

    kind: ClassVar[str] = "preempt"


@dataclass(frozen=True, slots=True, kw_only=True)
class SetScheduling(Lso):
    """Change the limits of the running engine; none leaves one as it is."""

    kind: ClassVar[str] = "set"
    token_budget: int | None = None
    max_running: int | None = None
