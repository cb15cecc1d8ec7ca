"""The composed scheduling policy: many SLOs in one batch (QoServe, Niyama, ConServe §4.2)."""

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from math import inf

from shared.contracts.base import RequestId, Seconds, TenantId, UnixTime
from solver.prediction.calibration.moments import RunningMoments, over_approximation
from solver.prediction.latency.service_time import RESIDUAL_SHARE
from solver.prediction.lengths.cached_shares import CachedShares, expected_cached_tokens
from solver.scheduling.engine.admission import PlannedBatch
from solver.scheduling.engine.best_effort import Allowance
from solver.scheduling.engine.chunking import decode_slack_s, steady_limit_s
from solver.scheduling.engine.decision import (
    BatchState,
    IterationDecision,
    IterationOutcome,
    RequestView,
    RunningView,
)
from solver.scheduling.engine.entry import Entry, Rank
from solver.scheduling.engine.latency import LatencyTable
from solver.scheduling.engine.options import DEFAULT, SchedulingOptions
from solver.scheduling.engine.pace import EnginePace
from solver.scheduling.engine.selection import Selection
from solver.scheduling.engine.waiting import WaitingWork

_Held = tuple[Entry, RunningView]


class QoServePolicy:
    """
    Dynamic chunks, hybrid priority, eager relegation, selective preemption, best-effort work.

    A decision examines only the running requests and the waiting requests that it starts. Each
    request costs O(log waiting).

    Args:
        latency: Latency table of the engine; `set_latency` replaces it by a newer table.
        options: Settings, and enabled parts of the policy.
    """

    def __init__(self, latency: LatencyTable, options: SchedulingOptions = DEFAULT) -> None:
        self._options = options
        self._pace = EnginePace(
            latency, chunk_tokens=min(options.max_chunk_tokens, latency.max_tokens)
        )
        self._num_added = 0
        self._num_iterations = 0
        self._entries: dict[RequestId, Entry] = {}
        self._waiting = WaitingWork(options)
        self._history = DecodeHistory(default_tokens=options.default_decode_tokens)
        self._cached = CachedShares()
        self._service_s: dict[TenantId | None, Seconds] = {}
        self._offered: list[Entry] = []
        self._decode_limit_s = steady_limit_s if options.steady_pace else decode_slack_s
        self._pace_limit_s = inf
        """
        Longest iteration with which the latest interactive work meets its TBT targets; infinite
        when there has been none for `_PACE_KEPT_S`.
        """
        self._interactive_at = -inf
        """Time of the last iteration with tokens of interactive work."""

    def set_latency(self, latency: LatencyTable) -> None:
        """Use the latency table *latency* for decisions from now on."""
        self._pace.latency = latency

    def rank(self, request_id: RequestId) -> Rank:
        """Rank of a known request."""
        return self._entries[request_id].rank

    def add(self, request: RequestView) -> None:
        self._num_added += 1
        entry = Entry(request, self._num_added)
        expected = self._history.expected(request.application)
        most, progress = request.max_tokens, request.progress_tokens
        entry.decode_tokens = rest_of(expected.bound, most, progress_tokens=progress)
        entry.mean_decode_tokens = rest_of(expected.mean, most, progress_tokens=progress)
        share = self._cached.share(request.application)
        entry.cached_tokens = expected_cached_tokens(share, request.prompt_tokens)
        weight = self._options.fairness_weight
        if weight:
            entry.service_s = weight * self._service_s.get(request.tenant, 0.0)
        self._entries[request.request_id] = entry
        self._waiting.push(entry)

    def remove(self, request_id: RequestId, answer_tokens: int | None = None) -> None:
        entry = self._entries.pop(request_id, None)
        if entry is None:
            return
        if answer_tokens is not None:
            self._history.observe(entry.view.application, answer_tokens)
        if entry in self._offered:
            self._offered.remove(entry)
        elif entry.waiting:
            self._waiting.discard(entry)
        elif self._options.fairness_weight:
            tokens = entry.view.prompt_tokens + entry.output_tokens + 1
            tenant = entry.view.tenant
            served_s = self._service_s.get(tenant, 0.0) + tokens * self._pace.token_s
            self._service_s[tenant] = served_s

    def observe(self, now: UnixTime, outcome: IterationOutcome) -> None:  # noqa: ARG002 - protocol
        self._pace.observe(outcome.iteration)
        for request_id in outcome.admitted:
            entry = self._entries.get(request_id)
            if entry is not None and not entry.has_run:
                entry.has_run = True
                self._cached.observe(
                    entry.view.application,
                    prompt_tokens=entry.view.prompt_tokens,
                    cached_tokens=outcome.cached_tokens.get(request_id, 0),
                )
            if entry is not None and entry in self._offered:
                self._offered.remove(entry)
                entry.waiting = False
        self._take_back_offered()
        for request_id in outcome.preempted:
            entry = self._entries.get(request_id)
            if entry is not None and not entry.waiting:
                entry.prefill_tokens = entry.view.prompt_tokens + entry.output_tokens
                self._waiting.push(entry)

    def decide(self, now: UnixTime, batch: BatchState) -> IterationDecision:
        self._take_back_offered()
        self._num_iterations += 1
        self._waiting.observe(self._pace.token_s)
        decodes, prefills, best_effort_work, limit_s = self._survey(now, batch)
        selection = Selection(
            options=self._options,
            pace=self._pace,
            waiting=self._waiting,
            now=now,
            batch=batch,
            decodes=decodes,
            limit_s=limit_s,
            offered=self._offered,
            best_effort_work=best_effort_work,
            allowance=Allowance(
                self._options,
                self._pace.latency,
                batch,
                decodes=decodes,
                prefills=prefills,
                limit_s=self._pace_limit_s,
            ),
            preferred=None
            if self._num_iterations % self._options.aged_share
            else self._waiting.aged(now),
        )
        selection.choose(prefills)
        return IterationDecision(
            order=self._order(selection),
            token_budget=max(1, decodes.tokens + selection.budget_tokens),
            per_request_cap=selection.cap(),
            held=selection.held(),
            preempted=selection.preempted(),
        )

    def _survey(
        self, now: UnixTime, batch: BatchState
    ) -> tuple[PlannedBatch, list[_Held], list[_Held], Seconds]:
        """
        Work of the iteration's decodes, running prefills, best-effort decodes, and the iteration's
        time limit.
        """
        entries = self._entries
        decode_limit_s = self._decode_limit_s
        decodes = PlannedBatch()
        prefills: list[_Held] = []
        best_effort_work: list[_Held] = []
        num_decodes = context_tokens = 0
        limit_s = least_tbt_s = inf
        for run in batch.running:
            entry = entries[run.request_id]
            if run.is_prefill:
                prefills.append((entry, run))
                continue
            num_decodes += 1
            context_tokens += run.num_computed_tokens
            entry.output_tokens = run.num_output_tokens
            if entry.rank is Rank.BEST_EFFORT:
                best_effort_work.append((entry, run))
                continue
            limit_s = min(limit_s, decode_limit_s(entry, run.num_output_tokens, now))
            least_tbt_s = min(least_tbt_s, entry.tbt_s)
        decodes.tokens = num_decodes
        decodes.context_tokens = context_tokens
        left = 1 - self._options.latency_margin
        if limit_s != inf:
            limit_s = min(left * limit_s, self._options.iteration_limit_s)
        if least_tbt_s != inf:
            self._pace_limit_s = min(left * least_tbt_s, self._options.iteration_limit_s)
            self._interactive_at = now
        elif now - self._interactive_at > _PACE_KEPT_S:
            self._pace_limit_s = inf
        return decodes, prefills, best_effort_work, limit_s

    def _order(self, selection: Selection) -> Iterator[RequestId]:
        """
        Yield the selected requests, then more requests, because cached prefixes may leave tokens
        for them.
        """
        for entry in tuple(self._offered):
            yield entry.view.request_id
        while (more := selection.one_more()) is not None:
            yield more.view.request_id

    def _take_back_offered(self) -> None:
        for entry in self._offered:
            self._waiting.push(entry)
        self._offered.clear()


_PACE_KEPT_S: Seconds = 10.0
"""
Time after the last token of interactive work for which best-effort work keeps to its pace, since
the next request of a conversation often follows within seconds.
"""
_ENOUGH = 10
"""Number of answers of an application from which its own history is used."""


@dataclass(frozen=True, slots=True)
class AnswerLength:
    """Expected number of tokens of a whole answer."""

    mean: float
    bound: float
    """`moments.over_approximation`."""


def rest_of(answer_tokens: float, max_tokens: int, *, progress_tokens: int) -> float:
    """
    Number of tokens that are assumed to follow the *progress_tokens* of an answer of
    *answer_tokens*, at most *max_tokens*.

    An answer beyond its assumed length is assumed to take another `RESIDUAL_SHARE` of it.
    """
    return min(max_tokens, max(RESIDUAL_SHARE * answer_tokens, answer_tokens - progress_tokens))


class DecodeHistory:
    """
    Expected answer lengths by application, learned with `moments.over_approximation`.

    Source: QoServe §3.4.

    Args:
        default_tokens: Expected length of an application with fewer than `_ENOUGH` answers so far.
        max_applications: Maximum number of applications with a history, because clients choose
            their names; the application without an answer for longest is forgotten first.
    """

    def __init__(self, *, default_tokens: float, max_applications: int = 1000) -> None:
        self._default = AnswerLength(default_tokens, default_tokens)
        self._max_applications = max_applications
        self._moments: OrderedDict[str, RunningMoments] = OrderedDict()
        """Moments of the answers of each application, the application of the last answer last."""
        self._expected: dict[str, AnswerLength] = {}

    def observe(self, application: str, answer_tokens: int) -> None:
        """Learn from a whole answer of *answer_tokens*."""
        moments = self._moments.setdefault(application, RunningMoments())
        self._moments.move_to_end(application)
        if len(self._moments) > self._max_applications:
            forgotten, _ = self._moments.popitem(last=False)
            self._expected.pop(forgotten, None)
        moments.observe(answer_tokens)
        value = moments.value()
        if value is not None and value.count >= _ENOUGH:
            self._expected[application] = AnswerLength(value.mean, over_approximation(value))

    def expected(self, application: str) -> AnswerLength:
        """Expected length of an answer of *application*."""
        return self._expected.get(application, self._default)
