"""The composed scheduling policy: many SLOs in one batch (QoServe, Niyama, ConServe §4.2)."""

from collections.abc import Iterator
from math import inf

from shared.contracts.base import RequestId, Seconds, TenantId, UnixTime
from solver.scheduling.admission import PlannedBatch
from solver.scheduling.best_effort import Allowance
from solver.scheduling.chunking import decode_slack_s, steady_limit_s
from solver.scheduling.decision import (
    BatchState,
    IterationDecision,
    IterationOutcome,
    RequestView,
    RunningView,
)
from solver.scheduling.decode_history import DecodeHistory
from solver.scheduling.entry import Entry, Rank
from solver.scheduling.latency import LatencyTable
from solver.scheduling.options import DEFAULT, SchedulingOptions
from solver.scheduling.pace import EnginePace
from solver.scheduling.selection import Selection
from solver.scheduling.waiting import WaitingWork

_Held = tuple[Entry, RunningView]


class QoServePolicy:
    """
    Dynamic chunks, hybrid priority, eager relegation, selective preemption, best-effort filler.

    Per iteration it looks at the running requests and at the waiting ones that it starts;
    per request it costs O(log waiting).

    Args:
        latency: Of the engine; `set_latency` replaces it when a better one was learnt.
        options: Which parts are on.
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
        self._service_s: dict[TenantId | None, Seconds] = {}
        self._offered: list[Entry] = []
        self._decode_limit_s = steady_limit_s if options.steady_pace else decode_slack_s
        self._pace_limit_s = inf
        """Longest iteration that the interactive work seen last can bear every time."""

    @property
    def overloaded(self) -> bool:
        """Whether the overload mode holds."""
        return self._waiting.overloaded

    def set_latency(self, latency: LatencyTable) -> None:
        """Decide by *latency* from here on."""
        self._pace.latency = latency

    def rank(self, request_id: RequestId) -> Rank:
        """In which order of service a known request is."""
        return self._entries[request_id].rank

    def add(self, request: RequestView) -> None:
        self._num_added += 1
        entry = Entry(request, self._num_added)
        entry.decode_tokens = self._history.expected_tokens(request.application, request.max_tokens)
        weight = self._options.fairness_weight
        if weight:
            entry.service_s = weight * self._service_s.get(request.tenant, 0.0)
        self._entries[request.request_id] = entry
        self._waiting.push(entry)

    def remove(self, request_id: RequestId) -> None:
        entry = self._entries.pop(request_id, None)
        if entry is None:
            return
        if entry in self._offered:
            self._offered.remove(entry)
        elif entry.waiting:
            self._waiting.discard(entry)
        else:
            self._history.observe(entry.view.application, entry.output_tokens + 1)
            if self._options.fairness_weight:
                tokens = entry.view.prompt_tokens + entry.output_tokens + 1
                tenant = entry.view.tenant
                served_s = self._service_s.get(tenant, 0.0) + tokens * self._pace.token_s
                self._service_s[tenant] = served_s

    def observe(self, now: UnixTime, outcome: IterationOutcome) -> None:  # noqa: ARG002 - protocol
        self._pace.observe(outcome.iteration)
        for request_id in outcome.admitted:
            entry = self._entries.get(request_id)
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
        decodes, prefills, fillers, limit_s = self._survey(now, batch)
        selection = Selection(
            options=self._options,
            pace=self._pace,
            waiting=self._waiting,
            now=now,
            batch=batch,
            decodes=decodes,
            limit_s=limit_s,
            offered=self._offered,
            fillers=fillers,
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
        """Cost of decodes, running prefills, best-effort decodes, and how long it may take."""
        entries = self._entries
        decode_limit_s = self._decode_limit_s
        decodes = PlannedBatch()
        prefills: list[_Held] = []
        fillers: list[_Held] = []
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
                fillers.append((entry, run))
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
        return decodes, prefills, fillers, limit_s

    def _order(self, selection: Selection) -> Iterator[RequestId]:
        """Those that were chosen, then more, in case an engine finds their prefixes cached."""
        for entry in tuple(self._offered):
            yield entry.view.request_id
        while (more := selection.one_more()) is not None:
            yield more.view.request_id

    def _take_back_offered(self) -> None:
        for entry in self._offered:
            self._waiting.push(entry)
        self._offered.clear()
