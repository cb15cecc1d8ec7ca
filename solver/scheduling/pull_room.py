"""
How much an instance takes out of the lanes ahead of time: late binding, bounded three times.

By predicted seconds, by requests and by the engine's token capacity (QLM §5 pulls while the
running batch is below it).
"""

import math
from dataclasses import dataclass

from shared.contracts.base import Seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class PullBounds:
    """Most that may be pulled and not begun."""

    window: int = 32
    """Requests, pulls under way included."""
    best_effort_window: int = 8
    """Of these, best-effort and relegated ones."""
    max_backlog_s: Seconds = 2.0
    """Predicted work that one more would have to wait for; one request may always wait."""
    backlog_level: float = 0.5
    """Of the quantile of that work which is bounded, 0..1, both excluded."""
    max_tokens: float = math.inf
    """KV tokens that what is held may need: more than the engine has cannot soon begin."""


DEFAULT_BOUNDS = PullBounds()
_LEAST_HELD = 4
"""Requests that the bound in seconds always lets an instance hold, however long they are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """What an instance has pulled and not begun, wherever it waits: its window or its engine."""

    num_regular: int = 0
    """Requests whose SLO is in reach."""
    num_filler: int = 0
    """Best-effort and relegated ones, which give way."""
    num_pulling: int = 0
    """Pulls under way: of either kind."""
    regular_s: Seconds = 0.0
    """Predicted work of the regular ones; see `work_s`."""
    filler_s: Seconds = 0.0
    regular_tokens: int = 0
    """KV tokens that the regular ones may need at their ends."""
    filler_tokens: int = 0

    @property
    def num_requests(self) -> int:
        return self.num_regular + self.num_filler + self.num_pulling


def counted_s(prefill_s: Seconds, bounds: PullBounds) -> Seconds:
    """
    What one prefill adds to the work that is held.

    Decided: at most a share of the bound, so that no prompt, however long, keeps an instance
    from pulling what goes before it: the engine's policy lets a long prefill rest.
    """
    return min(prefill_s, bounds.max_backlog_s / _LEAST_HELD)


def work_s(*, prefill_s: Seconds, whole_s: Seconds, num_free_slots: int) -> Seconds:
    """
    How long what is held keeps one more from beginning.

    Args:
        prefill_s: Predicted until all of it has its first token, each as `counted_s` has it.
        whole_s: Predicted until all of it is done.
        num_free_slots: Running slots that nothing held will take. With one left, only the
            prefills before it delay a request; without, it waits for answers to end, too.
    """
    return prefill_s if num_free_slots > 0 else max(prefill_s, whole_s)


def has_room(held: Held, bounds: PullBounds) -> bool:
    """
    Whether one more regular request may be pulled.

    Never falls as a bound grows; filler, which gives way, takes room in requests only.
    """
    if held.num_requests >= bounds.window:
        return False
    if held.num_requests == 0:
        return True
    return held.regular_s < bounds.max_backlog_s and held.regular_tokens < bounds.max_tokens


def has_filler_room(held: Held, bounds: PullBounds) -> bool:
    """Whether the next pull may be of filler; implies `has_room`."""
    if not has_room(held, bounds):
        return False
    if held.num_filler + held.num_pulling >= bounds.best_effort_window:
        return False
    if held.num_requests == 0:
        return True
    if held.regular_tokens + held.filler_tokens >= bounds.max_tokens:
        return False
    return held.regular_s + held.filler_s < bounds.max_backlog_s


def is_loaded(held: Held, bounds: PullBounds) -> bool:
    """Whether prefills wait all the time, so that answers are decoded beside them."""
    return 2 * held.regular_s >= bounds.max_backlog_s
