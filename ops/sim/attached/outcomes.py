"""Times of one answer's tokens, and whether they were late."""

from dataclasses import dataclass

from shared.contracts.base import UnixTime
from shared.contracts.qos import Slo


@dataclass(slots=True)
class Outcome:
    """Tokens of one answer and their times."""

    arrived_at: UnixTime
    first_token_at: UnixTime | None = None
    last_token_at: UnixTime | None = None
    num_tokens: int = 0
    finished: bool = False

    def add(self, num_tokens: int, now: UnixTime) -> None:
        """Record new tokens."""
        if num_tokens:
            if self.first_token_at is None:
                self.first_token_at = now
            self.last_token_at = now
            self.num_tokens += num_tokens


def is_missed(outcome: Outcome, slo: Slo) -> bool:
    """True if the first or the last token was later than its deadline (QoServe eqs 1-3)."""
    if not outcome.finished or outcome.first_token_at is None or outcome.last_token_at is None:
        return True
    arrived_at = outcome.arrived_at
    late = outcome.last_token_at > slo.completion_deadline_at(arrived_at)
    if slo.ttft_s is None:
        return late
    late |= outcome.first_token_at > slo.token_deadline_at(arrived_at, 1)
    return late or outcome.last_token_at > slo.token_deadline_at(arrived_at, outcome.num_tokens)
