"""Selective preemption: selects running prefills that pause or give up their KV."""

from collections.abc import Sequence

from shared.contracts.base import UnixTime
from solver.scheduling.engine.best_effort import freed_tokens
from solver.scheduling.engine.decision import RunningView
from solver.scheduling.engine.entry import Entry, Rank
from solver.scheduling.engine.pace import EnginePace


def may_rest(entry: Entry, *, now: UnixTime, pace: EnginePace) -> bool:
    """
    Return True if a running prefill can skip one iteration without becoming late by the pause.

    Source: QoServe §3.4: only prefills are preempted, and only if this causes no violation.
    Decided: a prefill with an infeasible deadline may always pause.
    """
    if entry.rank is not Rank.REGULAR or pace.is_infeasible(entry, now):
        return True
    return not pace.is_infeasible(entry, now + pace.iteration_s)


def shared_cap(remaining: Sequence[int], budget_tokens: int) -> int | None:
    """
    Maximum tokens per prefill with which all prefills in *remaining* share the budget fully.

    The result is None if the budget suffices for all prefills. An engine gives tokens to running
    prefills in the order of their admission. The maximum leaves tokens for a later prefill with
    higher priority.
    """
    if sum(remaining) <= budget_tokens:
        return None
    left = budget_tokens
    for index, tokens in enumerate(sorted(remaining)):
        share = left // (len(remaining) - index)
        if tokens > share:
            return max(1, share)
        left -= tokens
    return None


def memory_victims(
    candidates: Sequence[tuple[Entry, RunningView]], needed_tokens: int
) -> list[tuple[Entry, RunningView]]:
    """
    Half-prefilled requests that give up their KV, the one with the least priority first.

    Args:
        candidates: Running prefills that are relegated or best effort.
        needed_tokens: KV tokens that are missing.

    Returns:
        Enough of *candidates*, or none if all of them would not be enough.

    Decided: relegated prefills keep their KV until another request needs it. If they kept it
    always, an engine full of relegated prefills could neither admit nor finish a request.
    """
    worst_first = sorted(
        candidates,
        key=lambda pair: (pair[0].rank, pair[1].num_computed_tokens, pair[0].place),
        reverse=True,
    )
    victims = []
    for entry, run in worst_first:
        if needed_tokens <= 0:
            break
        victims.append((entry, run))
        needed_tokens -= freed_tokens(entry, run)
    return victims if needed_tokens <= 0 else []
