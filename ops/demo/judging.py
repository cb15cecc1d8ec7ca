"""Judges each request by the sender's clock, with the same rule for the two arms."""

from dataclasses import dataclass, field

from ops.demo.workload import CLASSES, RequestClass
from shared.contracts.base import Seconds
from shared.contracts.qos import QosClass, Slo


@dataclass(slots=True)
class Timeline:
    """Times of one request on the sender's clock, in seconds since it was sent."""

    tokens: list[tuple[Seconds, int]] = field(default_factory=list)
    """Arrival time and number of tokens of each part of the streamed answer."""
    finished_s: Seconds | None = None
    """Arrival time of the final reply; None if the complete answer did not arrive."""
    diverged: bool = False
    """True if the stream ended early because a replay after the kill gave different tokens."""
    error: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """One judged request."""

    class_name: str
    sent_at_s: Seconds
    completed: bool
    attained: bool
    """True if the request was completed and met its target, or had no target."""
    ttft_s: Seconds | None = None
    """Time to the first token of the answer; None if tokens were not streamed."""
    ttlt_s: Seconds | None = None
    late_tokens: int = 0
    output_tokens: int = 0
    diverged: bool = False
    """
    True if the stream ended early and only the final reply has the whole answer; the target then
    counts as missed.
    """
    error: str | None = None


def late_tokens(tokens: list[tuple[Seconds, int]], slo: Slo) -> int:
    """
    Number of tokens that arrived after their deadlines (QoServe eq. 2); 0 without a TBT target.
    """
    late = number = 0
    for at_s, count in tokens:
        for _ in range(count):
            number += 1
            late += at_s > slo.token_deadline_at(0.0, number)
    return late


def judge(request_class: RequestClass, timeline: Timeline, *, sent_at_s: Seconds) -> Outcome:
    """
    Compare the times of one request with the target of its class.

    An interactive request meets its target if no token is late and the stream is complete; another
    request meets its target if its final reply is in time. Both arms are judged by the class's
    target, even where the arm published a different target.
    """
    slo = request_class.slo
    finished_s = timeline.finished_s
    completed = finished_s is not None
    late = late_tokens(timeline.tokens, slo)
    attained = finished_s is not None and finished_s <= slo.completion_deadline_at(0.0)
    if slo.qos_class is QosClass.INTERACTIVE:
        attained = attained and late == 0 and bool(timeline.tokens) and not timeline.diverged
    streamed = slo.qos_class is QosClass.INTERACTIVE and bool(timeline.tokens)
    return Outcome(
        class_name=request_class.name,
        sent_at_s=sent_at_s,
        completed=completed,
        attained=attained,
        ttft_s=timeline.tokens[0][0] if streamed else None,
        ttlt_s=finished_s,
        late_tokens=late,
        output_tokens=sum(count for _, count in timeline.tokens),
        diverged=timeline.diverged,
        error=timeline.error,
    )


def has_target(outcome: Outcome) -> bool:
    """True unless the request was best effort."""
    return outcome.class_name not in _BEST_EFFORT


_BEST_EFFORT = {c.name for c in CLASSES if c.qos_class is QosClass.BEST_EFFORT}
