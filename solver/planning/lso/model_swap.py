"""Choice of how an instance is emptied for another model: drain, or evict with progress."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from shared.contracts.base import RequestId, Seconds

PATIENCE = 1.5
"""Time limit of a drain, as a multiple of the drain's predicted time."""
LEAST_LIMIT_S: Seconds = 1.0
"""Longest drain before a model that is activated faster than this."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Leaving:
    """A run that must end before another model replaces its model."""

    request_id: RequestId
    remaining_s: Seconds | None
    """Predicted time until the end of the run; none if unknown."""
    resume_s: Seconds
    """Predicted time to recompute the KV of the run on another instance."""
    slack_s: Seconds = math.inf
    """
    Longest pause of the run without a missed deadline; negative if the run is late even without a
    pause.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class DrainPlan:
    """
    Runs that may finish before a model swap, and the time for which the head of the queue waits for
    these runs.
    """

    drain_s: Seconds
    """Time limit of the drain; the drain ends earlier if the last run ends earlier."""
    evicted: tuple[RequestId, ...] = ()
    predicted_s: Seconds = 0.0
    """Predicted duration of the drain."""
    recompute_s: Seconds = 0.0
    """Cost of recomputing the KV of the evicted requests, on whichever instance they resume."""
    return_s: Seconds = 0.0
    """Cost of activating the replaced model again for the evicted requests."""
    drain_all_s: Seconds = 0.0
    """Predicted duration of a drain in which all runs may finish."""
    evict_all_s: Seconds = 0.0
    """Cost of evicting all runs, including another activation of the model."""
    is_predicted: bool = True
    """True if the plan is based on predictions; otherwise all times but `drain_s` are unknown."""

    @property
    def total_s(self) -> Seconds:
        """Cost that is minimised: waiting, recomputing, and activating the replaced model again."""
        return self.predicted_s + self.recompute_s + self.return_s


def drain_limit_s(most_s: Seconds, activate_s: Seconds) -> Seconds:
    """
    Longest drain before a model that takes *activate_s* to activate; at most *most_s*.

    Decided: a drain takes no longer than the activation, because the slots that become free are
    idle meanwhile and the head's requests wait. So a drain at most doubles the time of a swap.
    """
    return min(most_s, max(LEAST_LIMIT_S, activate_s))


def cheapest_drain(
    runs: Sequence[Leaving], *, limit_s: Seconds, return_s: Seconds = 0.0
) -> DrainPlan:
    """
    The drain with the least sum of waiting, recomputing, and activating the model again.

    The head waits until the last run that may finish has ended. Runs predicted to last longer are
    evicted immediately and cost one prefill each. Without predictions all runs may finish until
    *limit_s*. A run may also finish if it would be in time here, but late when resumed on another
    instance after *limit_s*.

    Args:
        limit_s: Limit of the drain.
        return_s: Cost of activating the model again, which counts if any run is evicted.

    Source: QLM §5 flushes the KV at a model swap and does not specify how the batch ends.
    Decided: evicting also costs a swap and a drain, unless the queue contains the model anyway.
    Without this cost, an instance that serves many rarely used models would evict at every swap:
    each prefill is cheaper than the wait for the last answer, so no answer would end.
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
