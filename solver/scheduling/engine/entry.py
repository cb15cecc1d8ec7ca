"""State of each request in the composed scheduling policy."""

from dataclasses import dataclass, field
from enum import IntEnum
from math import inf

from shared.contracts.base import Seconds, UnixTime
from shared.contracts.qos import QosClass
from solver.scheduling.engine.decision import RequestView


class Rank(IntEnum):
    """
    Rank in the order of service; a later rank gets the capacity that earlier ranks do not use.
    """

    REGULAR = 0
    RELEGATED = 1
    """Rank of requests that are certain to be late."""
    BEST_EFFORT = 2


@dataclass(slots=True, eq=False)
class Entry:
    """
    State of one request in the policy, from `add` to `remove`; only `qoserve` and its parts modify
    it.
    """

    view: RequestView
    place: int
    """Number of the request in the order of arrival at the engine; breaks ties."""
    qos_class: QosClass = field(init=False)
    deadline_at: UnixTime = field(init=False)
    """
    Deadline of the first token if interactive, else of the last token; infinite for best effort.
    """
    key_deadline_at: UnixTime = field(init=False)
    """
    Deadline in eqs 4 and 5; the arrival time for best effort, which is only ordered among itself.
    """
    tbt_s: Seconds = field(init=False)
    rank: Rank = Rank.REGULAR
    waiting: bool = True
    version: int = 0
    """
    Version of the entry, increased when it leaves a heap, so that its copies in heaps are
    recognised as stale.
    """
    prefill_tokens: int = field(init=False)
    """Number of prefill tokens left while the request waits."""
    cached_tokens: int = 0
    """Prefill tokens that the prefix cache is expected to have."""
    has_run: bool = False
    decode_tokens: float = 0.0
    """Number of tokens of the answer, over-approximated, for the order of service."""
    mean_decode_tokens: float = 0.0
    """Mean number of tokens of the answer, for feasibility."""
    output_tokens: int = 0
    """Number of output tokens so far."""
    service_s: Seconds = 0.0
    """Fairness term of the request's key, in seconds."""
    first_token_late: bool | None = None
    """True if the first token of the request was late; none before the first decode."""

    def __post_init__(self) -> None:
        slo = self.view.slo
        self.qos_class = slo.qos_class
        self.deadline_at = slo.planning_deadline_at(self.view.arrived_at)
        self.tbt_s = inf if slo.tbt_s is None else slo.tbt_s
        self.prefill_tokens = self.view.prompt_tokens
        self.key_deadline_at = self.deadline_at
        if self.qos_class is QosClass.BEST_EFFORT:
            self.rank = Rank.BEST_EFFORT
            self.key_deadline_at = self.view.arrived_at
