"""SLOs and deadlines (QoServe eqs 1-3)."""

from enum import Enum
from math import inf
from typing import Annotated

from msgspec import Meta

from shared.contracts.base import Seconds, UnixTime, Value

MAX_TARGET_S: Seconds = 30 * 24 * 3600.0
"""Maximum value of a latency target, and maximum time from arrival to deadline, in seconds."""
PositiveSeconds = Annotated[float, Meta(gt=0, le=MAX_TARGET_S)]


class QosClass(Enum):
    """QoS class of a request, determined by its SLO."""

    INTERACTIVE = "interactive"
    """
    Interactive: the first token is due within `ttft_s`, then each token within `tbt_s` after the
    last.
    """
    NON_INTERACTIVE = "non_interactive"
    """Non-interactive: the whole answer is due within `ttlt_s`, or by an absolute deadline."""
    BEST_EFFORT = "best_effort"
    """Best effort: the request has no target (offline work in ConServe)."""


class Importance(Enum):
    """Importance of a request to its tenant; under overload, low importance is relegated first."""

    LOW = "low"
    HIGH = "high"


class OnLate(Enum):
    """What happens to a request that misses its deadline."""

    SERVE = "serve"
    """The request is served late."""
    DROP = "drop"
    """
    The request ends at its deadline: an interactive one that has no first token at the deadline of
    the first token, a non-interactive one at the deadline of its completion.
    """


class Slo(Value, frozen=True, kw_only=True, omit_defaults=True):
    """
    Latency targets of one request; best effort if all fields are empty.

    A request with `ttft_s` is interactive, regardless of its other fields.
    """

    ttft_s: PositiveSeconds | None = None
    tbt_s: PositiveSeconds | None = None
    ttlt_s: PositiveSeconds | None = None
    deadline_at: UnixTime | None = None
    """Absolute deadline of the request's completion, Unix seconds."""

    @property
    def at_once(self) -> "Slo":
        """
        The same targets for an answer that comes in one piece: the time to the first token is the
        time to the whole answer.
        """
        targets = [target for target in (self.ttft_s, self.ttlt_s) if target is not None]
        return Slo(ttlt_s=min(targets, default=None), deadline_at=self.deadline_at)

    @property
    def qos_class(self) -> QosClass:
        if self.ttft_s is not None:
            return QosClass.INTERACTIVE
        if self.ttlt_s is not None or self.deadline_at is not None:
            return QosClass.NON_INTERACTIVE
        return QosClass.BEST_EFFORT

    def first_token_deadline_at(self, arrived_at: UnixTime) -> UnixTime:
        """
        Deadline of the first token: D_first = arrival + ttft (QoServe eq. 1); infinite without
        `ttft_s`.
        """
        return inf if self.ttft_s is None else arrived_at + self.ttft_s

    def token_deadline_at(self, arrived_at: UnixTime, n: int) -> UnixTime:
        """Deadline of token n, from 1: D_n = arrival + ttft + (n-1)·tbt (QoServe eq. 2)."""
        pace_s = self.tbt_s or 0.0
        if n > 1 and self.tbt_s is None:
            return inf
        return self.first_token_deadline_at(arrived_at) + (n - 1) * pace_s

    def completion_deadline_at(self, arrived_at: UnixTime) -> UnixTime:
        """
        Deadline of the whole answer: D_total = arrival + ttlt (QoServe eq. 3), or the absolute
        deadline if sooner.
        """
        relative = inf if self.ttlt_s is None else arrived_at + self.ttlt_s
        absolute = inf if self.deadline_at is None else self.deadline_at
        return min(relative, absolute)

    def planning_deadline_at(self, arrived_at: UnixTime) -> UnixTime:
        """
        Deadline that planning uses: of the first token if interactive, else of the completion.

        The deadline of best-effort requests is infinite.
        """
        if self.ttft_s is not None:
            return self.first_token_deadline_at(arrived_at)
        return self.completion_deadline_at(arrived_at)


class SloVerdict(Value, frozen=True, kw_only=True, omit_defaults=True):
    """Result of a finished request against its SLO, measured on the instance that ran it."""

    attained: bool
    """True if every target of the request was met; always true for best effort."""
    ttft_s: Seconds | None = None
    ttlt_s: Seconds | None = None
    max_tbt_s: Seconds | None = None
    late_tokens: int = 0
    """Number of tokens that were generated later than their deadlines (QoServe eq. 2)."""


class Clamp(Value, frozen=True, kw_only=True, omit_defaults=True):
    """A claim of a request beyond its tenant's policy, and what was granted instead."""

    field: str
    """`class`, `ttft_s`, `tbt_s`, `ttlt_s`, `deadline_at`, `importance` or `priority`."""
    asked: str
    given: str

    def __str__(self) -> str:
        return f"{self.field}={self.asked}->{self.given}"
