"""One simulated request, with sizes instead of tokens, and its outcome."""

from dataclasses import dataclass

from shared.contracts.base import RequestId, Seconds, UnixTime
from shared.contracts.qos import Importance, QosClass, Slo


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """One arrival of a workload."""

    arrived_at: UnixTime
    prompt_tokens: int
    output_tokens: int
    class_name: str
    slo: Slo
    importance: Importance = Importance.HIGH


class SimRequest:
    """
    A request in the engine; implements `solver.scheduling.engine.decision.RunningView`.

    Only the engine writes the fields.
    """

    __slots__ = (
        "arrival",
        "blocks",
        "deadline_at",
        "finished_at",
        "first_token_at",
        "interactive",
        "is_prefill",
        "last_token_at",
        "late_tokens",
        "max_gap_s",
        "num_computed_tokens",
        "num_gaps_over",
        "num_output_tokens",
        "num_preempted",
        "num_prefill_tokens",
        "output_tokens",
        "request_id",
        "tbt_s",
    )

    def __init__(self, request_id: RequestId, arrival: Arrival) -> None:
        slo = arrival.slo
        self.request_id = request_id
        self.arrival = arrival
        self.interactive = slo.qos_class is QosClass.INTERACTIVE
        self.deadline_at = slo.planning_deadline_at(arrival.arrived_at)
        self.tbt_s: Seconds = slo.tbt_s or 0.0
        self.output_tokens = arrival.output_tokens
        self.num_prefill_tokens = arrival.prompt_tokens
        self.num_computed_tokens = 0
        self.num_output_tokens = 0
        self.is_prefill = True
        self.blocks = 0
        self.num_preempted = 0
        self.first_token_at: UnixTime | None = None
        self.last_token_at: UnixTime = 0.0
        self.finished_at: UnixTime | None = None
        self.late_tokens = 0
        """
        Number of late tokens of an interactive request (eq. 2), including the first token.
        """
        self.num_gaps_over = 0
        """Number of gaps between tokens above the TBT target, even if no token was late."""
        self.max_gap_s: Seconds = 0.0

    def generate(self, now: UnixTime) -> None:
        """Count the next token of the request, generated at the time *now*."""
        if self.first_token_at is None:
            self.first_token_at = now
        elif self.interactive:
            gap_s = now - self.last_token_at
            if gap_s > self.tbt_s:
                self.num_gaps_over += 1
                self.max_gap_s = max(self.max_gap_s, gap_s)
        if self.interactive and now > self.deadline_at + self.num_output_tokens * self.tbt_s:
            self.late_tokens += 1
        self.last_token_at = now
        self.num_output_tokens += 1

    @property
    def violated(self) -> bool:
        """
        True if the first token (interactive) or the last token (TTLT target) is late.
        """
        done_at = self.first_token_at if self.interactive else self.finished_at
        if self.arrival.slo.qos_class is QosClass.BEST_EFFORT:
            return False
        return done_at is None or done_at > self.deadline_at
