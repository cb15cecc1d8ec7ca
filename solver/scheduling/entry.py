"""What the composed policy keeps of each request."""

from dataclasses import dataclass, field
from enum import IntEnum
from math import inf

from shared.contracts.base import Seconds, UnixTime
from shared.contracts.qos import QosClass
from solver.scheduling.decision import RequestView


class Rank(IntEnum):
    """Order of service; a later rank is served from what the earlier ones leave."""

    REGULAR = 0
    RELEGATED = 1
    """Late for certain."""
    BEST_EFFORT = 2


@dataclass(slots=True, eq=False)
class Entry:
    """One request from `add` to `remove`. Only `qoserve` and its parts write it."""

    view: RequestView
    place: int
    """Order of arrival at the engine; breaks ties."""
    qos_class: QosClass = field(init=False)
    deadline_at: UnixTime = field(init=False)
    """Of the first token if interactive, else of the last; infinite for best effort."""
    key_deadline_at: UnixTime = field(init=False)
    """In eqs 4 and 5; for best effort its arrival, since it competes only with its kind."""
    tbt_s: Seconds = field(init=False)
    rank: Rank = Rank.REGULAR
    waiting: bool = True
    version: int = 0
    """Grows when it leaves a heap, so that copies left in heaps are known as stale."""
    prefill_tokens: int = field(init=False)
    """Left to prefill while it waits."""
    decode_tokens: float = 0.0
    """Expected of the answer."""
    output_tokens: int = 0
    """Seen so far."""
    service_s: Seconds = 0.0
    """What fairness adds to its key."""
    first_token_late: bool | None = None
    """Known once it has decoded."""

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
