"""A request that an instance holds, and the phases that the request goes through."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from shared.contracts.base import RequestId, RunId, Seconds, UnixTime
from shared.contracts.ends import End, has_token, nearest_end
from shared.contracts.requests import QueuedRequest
from solver.instance.events import Tag
from solver.scheduling.engine.entry import Rank
from solver.scheduling.keys import rank_of
from solver.scheduling.window import tokens_needed

SUSPECT_CRASHES = 2
"""
Number of engine crashes during a request's runs after which the request runs without other
requests.
"""


class Phase(Enum):
    """Where a held request is; `Held` alone writes it."""

    WAITING = "waiting"
    """In the window."""
    RUNNING = "running"
    """On the engine."""
    ENDING = "ending"
    """On the engine; its run was aborted, and the engine has not ended it yet."""
    RESTING = "resting"
    """Swapped out and not in the window."""
    LEAVING = "leaving"
    """Its outcome is being published; its deliveries are settled afterwards."""
    GONE = "gone"
    """All of its deliveries are settled."""


EDGES: Mapping[Phase, frozenset[Phase]] = {
    Phase.WAITING: frozenset({Phase.RUNNING, Phase.LEAVING}),
    Phase.RUNNING: frozenset({Phase.ENDING, Phase.LEAVING}),
    Phase.ENDING: frozenset({Phase.WAITING, Phase.RESTING, Phase.LEAVING}),
    Phase.RESTING: frozenset({Phase.WAITING, Phase.RUNNING, Phase.LEAVING}),
    Phase.LEAVING: frozenset({Phase.GONE}),
    Phase.GONE: frozenset(),
}
"""Phase -> phases that may follow."""


class Ending(Enum):
    """Reason for which the instance ends a run early."""

    EVICTED = "evicted"
    """The request returns to its resume queue with its progress."""
    STOPPED = "stopped"
    """The producer no longer needs this run, so no final reply is sent."""
    CANCELLED = "cancelled"
    """The producer cancelled the request, so the final reply is an error."""
    EXPIRED = "expired"
    """The request has reached its end, so the final reply is an error."""
    SWAPPED_OUT = "swapped_out"
    """The run leaves the engine, and the instance keeps the request to resume it here."""


@dataclass(slots=True, kw_only=True)
class Run:
    """One execution of a held request on the engine."""

    run_id: RunId
    submitted_at: UnixTime
    room_tokens: int
    """KV tokens that are reserved for the run; the run reports when it outgrows them."""
    prefill_s: Seconds = 0.0
    """Predicted prefill of the run, and of those that the engine had when it was submitted."""
    begun: bool = False
    """True once the run has generated a token."""
    prefilled: bool = False
    """True once the prompt counts as computed, of an answer that comes as a whole."""
    ending: Ending | None = None
    why: str = ""
    """Reason of the ending."""
    rest_s: Seconds = 0.0
    """Least time outside the window after the run was swapped out."""
    growths: int = 0
    """Number of times that the answer has outgrown its room."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """Permission to keep a swapped-out request on this instance."""

    context_tokens: int
    """Number of tokens whose KV was on the engine when the request was swapped out."""
    until: UnixTime
    """Time at which the request is evicted if it has not run again."""
    resume_at: UnixTime
    """Time at which the request returns to the window."""


class PhaseError(RuntimeError):
    """A request was moved along an edge that `EDGES` does not have; this is a bug."""


@dataclass(slots=True, kw_only=True, eq=False)
class Held:
    """A request that the instance holds, with all of its unsettled deliveries."""

    number: int
    """Unique on the instance: a request that leaves and returns has another number."""
    request: QueuedRequest
    tags: list[Tag]
    pulled_at: UnixTime
    generated: int = 0
    """Number of tokens of the answer at the last event of the request; progress included."""
    first_token_at: UnixTime | None = None
    run: Run | None = None
    lease: Lease | None = None
    """Set while the request is swapped out: in its rest and in the window."""
    checkpointed: bool = False
    """True if an operator ordered copies of the request's KV in host memory."""
    renew_at: UnixTime = math.inf
    """Time at which a copy is published, so that the broker does not take the request back."""
    is_renewed: bool = False
    """True once a copy was published."""
    fate: str = ""
    """Outcome of a request that leaves or is gone."""
    settling: tuple[Tag, ...] = ()
    """Deliveries that are acknowledged after the outcome's messages are confirmed."""
    phase: Phase = field(default=Phase.WAITING, init=False)

    def __post_init__(self) -> None:
        progress = self.request.progress
        self.generated, self.first_token_at = progress.num_tokens, progress.first_token_at

    @property
    def request_id(self) -> RequestId:
        return self.request.request_id

    @property
    def rank(self) -> Rank:
        """Rank of the request when it was pulled; it does not change while the request is held."""
        return rank_of(self.request, self.pulled_at)

    @property
    def context_tokens(self) -> int:
        """Tokens of the prompt and of the answer so far."""
        return self.request.prompt_tokens + self.generated

    @property
    def tokens_needed(self) -> int:
        """KV tokens that the request is expected to need at the end of its answer."""
        return tokens_needed(self.request, generated=self.generated)

    @property
    def end(self) -> End:
        """The end of the request, as its tokens so far determine it."""
        begun = self.run is not None and self.run.begun
        has_begun = begun or self.first_token_at is not None or has_token(self.request)
        return nearest_end(self.request, has_begun=has_begun)

    @property
    def has_left(self) -> bool:
        """True if the request leaves or is gone."""
        return self.phase in (Phase.LEAVING, Phase.GONE)

    @property
    def is_suspect(self) -> bool:
        """True if the request must run alone, because it may crash engines."""
        return self.request.attempts.crashes >= SUSPECT_CRASHES

    @property
    def comes_whole(self) -> bool:
        """True if a server sends the answer at its end, so that no token says when it has begun."""
        return self.request.call is not None and not self.request.call.deltas

    @property
    def only_waits(self) -> bool:
        """True if the request is in the window and has not run on this instance."""
        return self.phase is Phase.WAITING and self.lease is None

    @property
    def ahead(self) -> bool:
        """True while the request delays a request that is pulled next: it has not begun."""
        if self.phase in (Phase.RUNNING, Phase.ENDING):
            return self.run is not None and not (self.run.begun or self.run.prefilled)
        return self.phase is Phase.WAITING

    def submit(self, run: Run) -> None:
        """Begin *run*, which ends the lease of a swapped-out request."""
        self._to(Phase.RUNNING)
        self.run, self.lease = run, None

    def abort(self, ending: Ending, *, why: str = "", rest_s: Seconds = 0.0) -> None:
        """End the run early; the engine reports its end later."""
        self._to(Phase.ENDING)
        if self.run is not None:
            self.run.ending, self.run.why, self.run.rest_s = ending, why, rest_s

    def swap_out(self, lease: Lease, now: UnixTime) -> None:
        """Keep the request of an ended run: in the window, or resting until `Lease.resume_at`."""
        self._to(Phase.RESTING if lease.resume_at > now else Phase.WAITING)
        self.run, self.lease = None, lease

    def wake(self) -> None:
        """Return to the window after the rest."""
        self._to(Phase.WAITING)

    def leave(self) -> None:
        """Leave the instance; the outcome is published next."""
        self._to(Phase.LEAVING)

    def settled(self) -> None:
        """Record that all deliveries are settled."""
        self._to(Phase.GONE)
        self.tags.clear()

    def _to(self, phase: Phase) -> None:
        if phase not in EDGES[self.phase]:
            raise PhaseError(f"{self.request_id}: from {self.phase.value} to {phase.value}")
        self.phase = phase
