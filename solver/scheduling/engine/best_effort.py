"""
Best-effort work beside work with targets: its limits, and the KV that it gives up (ConServe §4.2).
"""

from collections.abc import Sequence
from math import inf

from shared.contracts.base import Seconds, UnixTime
from solver.scheduling.engine.admission import PlannedBatch
from solver.scheduling.engine.decision import BatchState, RunningView
from solver.scheduling.engine.entry import Entry
from solver.scheduling.engine.latency import LatencyTable
from solver.scheduling.engine.options import SchedulingOptions

_FIRST_TOKEN_SHARE = 0.75
"""Share of the time left until a first token is due that best-effort prefills may take."""
_Held = tuple[Entry, RunningView]


class Allowance:
    """
    Limits of the best-effort requests that may start, during one decision.

    Source: ConServe §4.2, algorithm 1 phase 2: an offline request only starts if it gets memory.
    Decided: best effort leaves a share of the KV free, so that requests with targets begin
    immediately and do not preempt best-effort requests that have just begun.
    Decided: running decodes are computed in every iteration and cannot be held, so their number is
    limited when offline requests begin. The decodes of all running requests at their full context
    take at most a share of the iteration limit. The limit is that of the latest interactive work,
    even if no interactive work runs, so that the engine is not too full when the next interactive
    request comes.
    Decided: an idle engine takes any request; otherwise a request too large for the share never
    runs.

    Args:
        options: Best-effort shares of KV and of the iteration limit.
        batch: State before the iteration.
        decodes: Work of the iteration without prefills.
        prefills: Running prefills.
        limit_s: Longest iteration that interactive work tolerates permanently; infinite if unknown.
    """

    def __init__(
        self,
        options: SchedulingOptions,
        latency: LatencyTable,
        batch: BatchState,
        *,
        decodes: PlannedBatch,
        prefills: Sequence[_Held],
        limit_s: Seconds,
    ) -> None:
        self._latency = latency
        self._most_s = inf if limit_s == inf else limit_s * options.best_effort_decode_share
        held_tokens = sum(run.num_computed_tokens for _, run in prefills)
        capacity_tokens = batch.free_kv_tokens + decodes.context_tokens + held_tokens
        self.kv_reserve_tokens = int(options.best_effort_kv_reserve * capacity_tokens)
        if not batch.running:
            self.kv_reserve_tokens, self._most_s = 0, inf
        self._num_running = len(batch.running)
        self._context_tokens = decodes.context_tokens
        self._context_tokens += sum(run.num_prefill_tokens for _, run in prefills)

    def admits(self, entry: Entry) -> bool:
        """
        Return True if all decodes remain within their share of the iteration when *entry* starts.
        """
        if self._most_s == inf:
            return True
        context_tokens = self._context_tokens + entry.prefill_tokens
        return self._latency.predict_s(self._num_running + 1, 0.0, context_tokens) <= self._most_s

    def count(self, entry: Entry) -> None:
        """Count the best-effort request *entry* as started."""
        self._num_running += 1
        self._context_tokens += entry.prefill_tokens


class FirstTokens:
    """
    Time limit for best-effort prefills in an iteration that produces first tokens.

    Decided: ConServe limits an iteration only by its decodes. The first token of a prefill that
    ends in the iteration also waits for the whole iteration. So best effort may take three quarters
    of the time left until the first token is due; the last quarter is for overruns and delivery. A
    first token that is late in any case gets its target again as the time left, so that it is not
    much later.

    Args:
        options: Enables the limit.
    """

    def __init__(self, options: SchedulingOptions, latency: LatencyTable) -> None:
        self._counts = options.best_effort_spares_first_tokens
        self._latency = latency
        self.limit_s: Seconds = inf

    def count(self, entry: Entry, planned: PlannedBatch, now: UnixTime) -> None:
        """
        Count the prefill of *entry*, which ends in this iteration; *planned* is the work so far.
        """
        target_s = entry.view.slo.ttft_s
        if not self._counts or target_s is None:
            return
        planned_s = planned.duration_s(self._latency)
        left_s = entry.deadline_at - now
        if left_s < planned_s:
            left_s = max(planned_s, target_s)
        self.limit_s = min(self.limit_s, planned_s + _FIRST_TOKEN_SHARE * (left_s - planned_s))


def freed_tokens(entry: Entry, run: RunningView) -> int:
    """
    KV tokens that are freed when a request is preempted: tokens that it holds or that are reserved
    for its prompt.
    """
    return run.num_computed_tokens + (entry.prefill_tokens if run.is_prefill else 0)


def kv_victims(candidates: Sequence[_Held], needed_tokens: int) -> list[_Held]:
    """
    Best-effort requests that give up their KV immediately, prefills and decodes alike.

    Args:
        candidates: Running best-effort requests.
        needed_tokens: KV tokens that are missing.

    Returns:
        Enough of *candidates*, or none if all of them would not be enough.

    Source: ConServe §4.2, algorithm 1 phase 1; §4.4 on the cost of a preemption.
    Decided: requests with the least progress are preempted first, because progress must be
    recomputed; of equal requests the latest. Victims that a larger victim makes unnecessary are
    spared.
    """
    least_first = sorted(candidates, key=lambda held: (held[1].num_computed_tokens, -held[0].place))
    victims: list[_Held] = []
    for held in least_first:
        if needed_tokens <= 0:
            break
        victims.append(held)
        needed_tokens -= freed_tokens(*held)
    if needed_tokens > 0:
        return []
    spare_tokens = -needed_tokens
    kept = []
    for held in reversed(victims):
        if freed_tokens(*held) <= spare_tokens:
            spare_tokens -= freed_tokens(*held)
        else:
            kept.append(held)
    return kept[::-1]
