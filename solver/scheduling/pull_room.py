"""
Limits on the requests that an instance pulls from the lanes ahead of time: late binding.

The limits are predicted seconds, requests, and the engine's token capacity (QLM §5 pulls while the
running batch is below the token capacity).
"""

import math
from dataclasses import dataclass

from shared.contracts.base import Seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class PullBounds:
    """Limits of the requests that an instance has pulled and not begun."""

    window: int = 16
    """Maximum number of requests, including pulls in progress."""
    best_effort_window: int = 8
    """Maximum number of best-effort and relegated requests in the window."""
    max_backlog_s: Seconds = 1.0
    """Maximum predicted work ahead of one more request; one request may be pulled in any case."""
    backlog_level: float = 0.5
    """Quantile level at which `max_backlog_s` bounds the waiting work; above 0 and below 1."""
    max_tokens: float = math.inf
    """Maximum KV tokens of held requests: work beyond the engine's KV could not begin soon."""


DEFAULT_BOUNDS = PullBounds()
_LEAST_HELD = 4
"""Number of requests of any length that the bound in seconds always allows an instance to hold."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """
    Totals of the requests that an instance has pulled and not begun, in its window or its engine.
    """

    num_regular: int = 0
    """Number of held requests with a feasible SLO."""
    num_best_effort: int = 0
    """Number of held best-effort and relegated requests, which yield to other requests."""
    num_pulling: int = 0
    """Number of pulls in progress, of regular and other requests."""
    regular_s: Seconds = 0.0
    """Predicted work of the held regular requests in seconds, as in `work_s`."""
    best_effort_s: Seconds = 0.0
    regular_tokens: int = 0
    """Number of KV tokens that the held regular requests may need when they end."""
    best_effort_tokens: int = 0

    @property
    def num_requests(self) -> int:
        return self.num_regular + self.num_best_effort + self.num_pulling


def counted_s(prefill_s: Seconds, bounds: PullBounds) -> Seconds:
    """
    Contribution of one prefill to the work that an instance holds, in seconds.

    Decided: a prefill counts at most as a share of the bound, so that an instance with a long
    prompt still pulls more urgent requests; the engine's policy can pause the long prefill.
    """
    return min(prefill_s, bounds.max_backlog_s / _LEAST_HELD)


def work_s(*, prefill_s: Seconds, whole_s: Seconds, num_free_slots: int) -> Seconds:
    """
    Time that one more request waits for the work that the instance holds.

    Args:
        prefill_s: Predicted time until all held work has its first token, each as in `counted_s`.
        whole_s: Predicted time until all held work is done.
        num_free_slots: Running slots that held work will not take. With a free slot, a request
            waits only for the prefills before it; without one, it also waits for answers to end.
    """
    return prefill_s if num_free_slots > 0 else max(prefill_s, whole_s)


def has_room(held: Held, bounds: PullBounds) -> bool:
    """
    Return True if one more regular request may be pulled.

    A larger bound never changes the result to False. Best-effort and relegated work yields, so it
    counts only in the number of requests.
    """
    if held.num_requests >= bounds.window:
        return False
    if held.num_requests == 0:
        return True
    return held.regular_s < bounds.max_backlog_s and held.regular_tokens < bounds.max_tokens


def has_best_effort_room(held: Held, bounds: PullBounds) -> bool:
    """Return True if best-effort or relegated work may be pulled next; implies `has_room`."""
    if not has_room(held, bounds):
        return False
    if held.num_best_effort + held.num_pulling >= bounds.best_effort_window:
        return False
    if held.num_requests == 0:
        return True
    if held.regular_tokens + held.best_effort_tokens >= bounds.max_tokens:
        return False
    return held.regular_s + held.best_effort_s < bounds.max_backlog_s


def is_loaded(held: Held, bounds: PullBounds) -> bool:
    """
    True if prefills wait all the time, so that answers are decoded in iterations with prefills.
    """
    return 2 * held.regular_s >= bounds.max_backlog_s
