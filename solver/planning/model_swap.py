"""How an instance gets empty for another model: drain, or evict with progress."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from shared.contracts.base import RequestId, Seconds

PATIENCE = 1.5
"""What drains may take so much longer than was predicted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Leaving:
    """A run that has to be gone before the model is."""

    request_id: RequestId
    remaining_s: Seconds | None
    """Predicted until its end; none when nobody can tell."""
    resume_s: Seconds
    """Predicted for computing its KV again elsewhere."""
    slack_s: Seconds = math.inf
    """How long it may stand still and be in time; negative when it is late anyway."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DrainPlan:
    """Who may finish, and for how long the head waits for them."""

    drain_s: Seconds
    """Limit; the drain ends when the last run does."""
    evicted: tuple[RequestId, ...] = ()
    predicted_s: Seconds = 0.0
    """Of the drain."""
    recompute_s: Seconds = 0.0
    """That the evictions cost, wherever those requests go on."""
    return_s: Seconds = 0.0
    """That bringing the model back for them costs."""
    drain_all_s: Seconds = 0.0
    """What waiting for all would take."""
    evict_all_s: Seconds = 0.0
    """What evicting all would cost, coming back for them included."""
    is_predicted: bool = True
    """Whether it rests on predictions; else all of its times but the limit are unknown."""

    @property
    def total_s(self) -> Seconds:
        """What is least."""
        return self.predicted_s + self.recompute_s + self.return_s


def cheapest_drain(
    runs: Sequence[Leaving], *, limit_s: Seconds, return_s: Seconds = 0.0
) -> DrainPlan:
    """
    The drain with the least sum of waiting, computing again and coming back.

    The head waits until the last run that may finish is over; whoever is predicted to last
    longer goes at once and costs one prefill. Without predictions all may finish until
    *limit_s*. So may whoever would be in time, and would be late after *limit_s* elsewhere.

    Args:
        runs: What has to leave.
        limit_s: Of the drain.
        return_s: What it costs to have the model once more, if anything is evicted.

    Source: QLM §5 flushes the KV at a model swap and leaves open how the batch ends.
    Decided: evicting costs a swap and a drain, too, when nothing else would bring the model back.
    Without that, an instance that serves many rarely used models evicts for ever: each prefill
    is cheaper than the wait for the last answer, and no answer ends.
    """
    if any(run.remaining_s is None for run in runs):
        return DrainPlan(drain_s=limit_s, is_predicted=False)
    ends_s = {_end_s(run) for run in runs if _end_s(run) <= limit_s}
    least_s = max((_end_s(run) for run in runs if _would_miss(run, limit_s)), default=0.0)
    allowed = [end_s for end_s in sorted({0.0, *ends_s}) if end_s >= least_s]
    plans = [_plan(runs, end_s, limit_s, return_s) for end_s in allowed]
    return min(plans, key=lambda plan: plan.total_s)


def _plan(
    runs: Sequence[Leaving], predicted_s: Seconds, limit_s: Seconds, return_s: Seconds
) -> DrainPlan:
    evicted = [run for run in runs if _end_s(run) > predicted_s]
    return DrainPlan(
        drain_s=min(limit_s, PATIENCE * predicted_s),
        evicted=tuple(run.request_id for run in evicted),
        predicted_s=predicted_s,
        recompute_s=sum(run.resume_s for run in evicted),
        return_s=return_s if evicted else 0.0,
        drain_all_s=max((_end_s(run) for run in runs), default=0.0),
        evict_all_s=sum(run.resume_s for run in runs) + (return_s if runs else 0.0),
    )


def _end_s(run: Leaving) -> Seconds:
    return run.remaining_s or 0.0


def _would_miss(run: Leaving, limit_s: Seconds) -> bool:
    return _end_s(run) <= limit_s and 0 <= run.slack_s < limit_s
