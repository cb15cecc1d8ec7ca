"""LLM serving operations as values (QLM §5): each has its arguments and a reason."""

from dataclasses import dataclass
from enum import Enum
from typing import ClassVar

from shared.contracts.base import ModelName, RequestId, Seconds


class Rule(Enum):
    """Rule that selects an LLM serving operation, as a sentence with placeholders for figures."""

    ORDERED = "an operator ordered the operation"
    INITIAL = "the settings name {model} as the first model"
    SET_WARM = "the settings name {model} as a warm model"
    PLANNED = "{model} heads the virtual queue"
    PLANNED_CHEAPEST = (
        "{model} heads the virtual queue; cheapest are {drain_s:.3g} s of draining, "
        "{recompute_s:.3g} s of recomputing and {return_s:.3g} s of reactivating (draining "
        "all {drain_all_s:.3g} s, evicting all {evict_all_s:.3g} s)"
    )
    PLANNED_BLIND = (
        "{model} heads the virtual queue; remaining times of running requests are unknown: "
        "they may finish within {drain_s:.3g} s"
    )
    LATER = "{model} is later in the virtual queue; its {num_bytes} bytes fit into host memory"
    NOT_QUEUED = "{model} is not in the virtual queue and other models need its host memory"
    EVICT_CHEAPER = (
        "{new} replaces {old}: draining {drain_s:.3g} s and recomputing {recompute_s:.3g} s "
        "is cheapest"
    )
    MODEL_LEAVES = "the request's KV belongs to {model}, which leaves the instance"
    DRAIN_OVER = "the request was still running after {drain_s:.3g} s of draining"
    HEAD_NEEDS_ROOM = "the head lacks {lack_tokens} tokens and {lack_slots} slots; {verdict}"
    ROOM_AGAIN = "the head leaves room for the request's {tokens} tokens"
    LEASE_ENDED = "the request's swap-out lease of {lease_s:.3g} s ended"
    LATE = "the request's deadline passed while the request waited in the engine"
    PULL_ROOM = "there is room for {count} more requests"


@dataclass(frozen=True, slots=True)
class Reason:
    """
    Reason of an LLM serving operation: a rule, and the figures on which the decision was based.
    """

    rule: Rule
    facts: tuple[tuple[str, str | float], ...] = ()

    @property
    def text(self) -> str:
        """The reason of an LLM serving operation as a sentence, for logs and displays."""
        return self.rule.value.format(**dict(self.facts))


def because(rule: Rule, **facts: str | float) -> Reason:
    """Create the reason of an operation; *facts* fill the placeholders of the rule's sentence."""
    return Reason(rule, tuple(facts.items()))


ORDERED = Reason(Rule.ORDERED)


class Track(Enum):
    """
    The part of an instance that an operation changes. Operations of one track run one after
    another.

    An operation on both tracks waits for `WARM_SET` first, and meanwhile does not block `RUNS`,
    because weights take long to transfer.
    """

    WARM_SET = "warm_set"
    """Operations on the models in host memory."""
    RUNS = "runs"
    """
    Operations on the requests on the engine, and on the active model that these requests need.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class Lso:
    """
    One LLM serving operation on one instance. Each subclass is a kind, with an executor registered
    in the agent.

    `tracks` are the parts of the instance that the operation changes. An agent that follows a plan
    does not wait for a *background* operation, because no other operation depends on it.
    """

    kind: ClassVar[str]
    tracks: ClassVar[tuple[Track, ...]] = (Track.RUNS,)
    background: ClassVar[bool] = False
    reason: Reason = ORDERED
    predicted_s: Seconds | None = None
    """Predicted cost of the operation, summed over all its requests; none if unknown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pull(Lso):
    """Pull requests now from the lanes of the queue's head, within the bounds of pulled work."""

    kind: ClassVar[str] = "pull"
    background: ClassVar[bool] = True
    count: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Evict(Lso):
    """Return requests with their progress to their resume queues; drop the KV of the requests."""

    kind: ClassVar[str] = "evict"
    request_ids: tuple[RequestId, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SwapOut(Lso):
    """Remove a run from the engine; the same instance keeps the request and resumes it later."""

    kind: ClassVar[str] = "swap_out"
    request_id: RequestId
    rest_s: Seconds = 0.0
    """
    Time in which only a `SwapIn` resumes the request; with 0 the request is resumed when there is
    room.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class SwapIn(Lso):
    """Resume a swapped-out request immediately."""

    kind: ClassVar[str] = "swap_in"
    request_id: RequestId


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint(Lso):
    """Also copy a request's KV to host memory as the KV grows."""

    kind: ClassVar[str] = "checkpoint"
    request_id: RequestId


@dataclass(frozen=True, slots=True, kw_only=True)
class ClearCaches(Lso):
    """Drop KV that no running request needs: prefix cache and host checkpoints."""

    kind: ClassVar[str] = "clear"


@dataclass(frozen=True, slots=True, kw_only=True)
class Warm(Lso):
    """Load a model's weights into host memory (QLM: storage-CPU swapping)."""

    kind: ClassVar[str] = "warm"
    tracks: ClassVar[tuple[Track, ...]] = (Track.WARM_SET,)
    background: ClassVar[bool] = True
    model: ModelName


@dataclass(frozen=True, slots=True, kw_only=True)
class Cool(Lso):
    """Remove a model's weights from host memory."""

    kind: ClassVar[str] = "cool"
    tracks: ClassVar[tuple[Track, ...]] = (Track.WARM_SET,)
    background: ClassVar[bool] = True
    model: ModelName


@dataclass(frozen=True, slots=True, kw_only=True)
class Activate(Lso):
    """
    Activate a model (QLM: CPU-GPU swapping); all KV of the previously active model is dropped.
    """

    kind: ClassVar[str] = "activate"
    tracks: ClassVar[tuple[Track, ...]] = (Track.RUNS, Track.WARM_SET)
    model: ModelName
    drain_s: Seconds = 0.0
    """Time in which running requests may finish; requests that still run then are evicted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Preempt(Lso):
    """Drop best-effort work inside the running forward pass (ConServe §4.3)."""

    kind: ClassVar[str] = "preempt"


@dataclass(frozen=True, slots=True, kw_only=True)
class SetScheduling(Lso):
    """Change the limits of the running engine; the value none leaves a limit unchanged."""

    kind: ClassVar[str] = "set"
    token_budget: int | None = None
    max_running: int | None = None
