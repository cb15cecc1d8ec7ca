"""Selective preemption: which running prefills may give way, and which give up memory."""

from collections.abc import Sequence

from shared.contracts.base import UnixTime
from solver.scheduling.decision import RunningView
from solver.scheduling.entry import Entry, Rank
from solver.scheduling.pace import EnginePace


def may_rest(entry: Entry, *, now: UnixTime, pace: EnginePace) -> bool:
    """
    Whether a running prefill can sit out one iteration without missing its deadline by it.

    Source: QoServe §3.4: only prefills, and only if the preemption leads to no violation.
    Decided: one that has no reachable deadline has nothing to lose.
    """
    if entry.rank is not Rank.REGULAR or pace.is_hopeless(entry, now):
        return True
    return not pace.is_hopeless(entry, now + pace.iteration_s)


def shared_cap(remaining: Sequence[int], budget_tokens: int) -> int | None:
    """
    Tokens per prefill at most, so that all of *remaining* get a part of the budget and use it up.

    None when the budget suffices for all. An engine gives tokens to running prefills in the
    order in which they were admitted; the cap keeps a large one from taking what is meant for
    another that goes first.
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
    Half-prefilled requests that give up their KV, least worth keeping first.

    Args:
        candidates: Running prefills that are relegated or best effort.
        needed_tokens: KV tokens that are missing.

    Returns:
        Enough of them, or none when all of them would not be enough.

    Decided: relegated prefills keep their KV until someone needs it. Without giving it up on
    demand an engine full of them admits nothing and never ends.
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
        needed_tokens -= run.num_computed_tokens
    return victims if needed_tokens <= 0 else []
