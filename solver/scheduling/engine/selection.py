"""Selection of the prefills of one iteration (QoServe algorithm 1, lines 8-23)."""

from math import inf

from shared.contracts.base import RequestId, Seconds, UnixTime
from solver.scheduling.engine.admission import PlannedBatch, admissible_tokens
from solver.scheduling.engine.best_effort import Allowance, FirstTokens, kv_victims
from solver.scheduling.engine.chunking import budget_tokens
from solver.scheduling.engine.decision import BatchState, RunningView
from solver.scheduling.engine.entry import Entry, Rank
from solver.scheduling.engine.options import SchedulingOptions
from solver.scheduling.engine.pace import EnginePace
from solver.scheduling.engine.preemption import may_rest, memory_victims, shared_cap
from solver.scheduling.engine.room import Room
from solver.scheduling.engine.waiting import WaitingWork

_FIRST = -1
"""Rank of a request that is served before all other requests in this iteration."""

_Candidate = tuple[float, float, int, Entry, RunningView]
_Held = tuple[Entry, RunningView]


class Selection:
    """
    Selects running prefills and waiting requests by priority until the token budget is used up.

    A selection is used for one decision. Chosen waiting requests move to *offered*. The waiting
    request *preferred* is served first in this iteration.
    """

    def __init__(
        self,
        *,
        options: SchedulingOptions,
        pace: EnginePace,
        waiting: WaitingWork,
        now: UnixTime,
        batch: BatchState,
        decodes: PlannedBatch,
        limit_s: Seconds,
        offered: list[Entry],
        best_effort_work: list[_Held],
        allowance: Allowance,
        preferred: Entry | None,
    ) -> None:
        self._options = options
        self._pace = pace
        self._waiting = waiting
        self._now = now
        self._batch = batch
        self._decodes = decodes
        self._limit_s = limit_s
        self._offered = offered
        self._best_effort_victims = best_effort_work
        self._allowance = allowance
        self._preferred = preferred
        self._prefills: list[tuple[Entry, RunningView]] = []
        self._resting: dict[RequestId, tuple[Entry, RunningView]] = {}
        self._later: list[tuple[int, Entry, RunningView]] = []
        self._remaining: list[int] = []
        self._last: RequestId | None = None
        self._victims: list[RequestId] = []
        self._room = Room(batch, decodes.tokens)
        self._blocked = False
        self._first_tokens = FirstTokens(options, pace.latency)
        self.budget_tokens = 0
        """Number of prefill tokens of the iteration."""

    def choose(self, prefills: list[_Held]) -> None:
        """Fill the token budget of the iteration; *prefills* are the running prefills."""
        self._prefills = prefills
        self._resting = {run.request_id: (entry, run) for entry, run in prefills}
        for entry, view in prefills:
            entry.prefill_tokens = view.num_prefill_tokens - view.num_computed_tokens
            self._room.keep(entry.prefill_tokens)
        running = self._ranked(prefills)
        self._save_decodes(running)
        planned: PlannedBatch | None = None
        used_tokens = 0
        while True:
            candidate = self._next(running)
            if candidate is None:
                break
            entry, run = candidate
            before_tokens = 0 if run is None else run.num_computed_tokens
            if planned is None:
                self.budget_tokens = budget_tokens(
                    self._options,
                    self._pace.latency,
                    self._decodes,
                    before_tokens=before_tokens,
                    limit_s=self._limit_s,
                    most_tokens=self._batch.max_budget_tokens,
                )
                planned = PlannedBatch(
                    self._decodes.tokens, self._decodes.pairs, self._decodes.context_tokens
                )
            left_tokens = self.budget_tokens - used_tokens
            if left_tokens <= 0:
                break
            if run is not None and self._would_cut(entry, left_tokens):
                self.budget_tokens = used_tokens
                break
            tokens = self._part(entry, planned, before_tokens, left_tokens)
            if tokens <= 0:
                self.budget_tokens = used_tokens
                break
            self._take(entry, run, running)
            planned.add(tokens, before_tokens)
            used_tokens += tokens
            if tokens < entry.prefill_tokens:
                self.budget_tokens = min(self.budget_tokens, used_tokens)
                break
            self._first_tokens.count(entry, planned, self._now)

    def held(self) -> frozenset[RequestId]:
        """Running prefills that were not selected for the iteration."""
        return frozenset(self._resting) - frozenset(self._victims)

    def preempted(self) -> frozenset[RequestId]:
        """Running requests that give up their KV for other requests."""
        return frozenset(self._victims)

    def cap(self) -> int | None:
        """
        Maximum number of tokens per prefill, if the engine's own order would starve a selected
        prefill.
        """
        if sum(self._remaining) <= self.budget_tokens or self._last_in_engine() == self._last:
            return None
        return shared_cap(self._remaining, self.budget_tokens)

    def one_more(self) -> Entry | None:
        """
        Select another waiting request if there is room, and return it; return None if there is no
        room.
        """
        if self._blocked:
            return None
        item = self._waiting.first()
        if item is None or not self._fits(item[2]):
            return None
        self._offer(item[2])
        return item[2]

    def _part(
        self, entry: Entry, planned: PlannedBatch, before_tokens: int, left_tokens: int
    ) -> int:
        """
        Number of tokens of *entry* that the iteration can compute in addition to the *planned*
        work.
        """
        # The budget already includes the context of the first prefill.
        budgeted = not before_tokens or planned.tokens == self._decodes.tokens
        limit_s = inf if budgeted else self._limit_s
        if entry.rank is Rank.BEST_EFFORT:
            limit_s = min(limit_s, self._first_tokens.limit_s)
        tokens = min(entry.prefill_tokens, left_tokens)
        if limit_s == inf:
            return tokens
        return admissible_tokens(
            self._pace.latency,
            planned,
            before_tokens=before_tokens,
            wanted_tokens=tokens,
            limit_s=limit_s,
        )

    def _ranked(self, prefills: list[_Held]) -> list[_Candidate]:
        """
        Regular running prefills, the best last; `_rank_later` ranks the prefills of other ranks.
        """
        regular = []
        for place, (entry, run) in enumerate(prefills):
            if self._is_lost(entry):
                entry.rank = Rank.RELEGATED
            if entry.rank is Rank.REGULAR:
                regular.append(self._candidate(place, entry, run))
            else:
                self._later.append((place, entry, run))
        # The places of entries differ, so the sort never compares the entries themselves.
        regular.sort(reverse=True)
        return regular

    def _is_lost(self, entry: Entry) -> bool:
        regular = entry.rank is Rank.REGULAR
        return self._options.relegation and regular and self._pace.is_infeasible(entry, self._now)

    def _rank_later(self, running: list[_Candidate]) -> None:
        """Add running prefills of later ranks to *running*; most iterations do not need them."""
        later = [self._candidate(*each) for each in self._later]
        self._later.clear()
        running[:0] = sorted(later, reverse=True)

    def _candidate(self, place: int, entry: Entry, run: RunningView) -> _Candidate:
        may = self._options.preemption and may_rest(entry, now=self._now, pace=self._pace)
        key = self._waiting.key(entry) if may else -inf
        return (float(entry.rank), key, place, entry, run)

    def _next(self, running: list[_Candidate]) -> tuple[Entry, RunningView | None] | None:
        """
        The best candidate for the iteration; waiting requests that will be late are relegated
        first.
        """
        while True:
            item = None if self._blocked else self._first_waiting()
            if self._later and not running and (item is None or item[0] > Rank.REGULAR):
                self._rank_later(running)
            if running and (item is None or running[-1][:2] <= item[:2]):
                return running[-1][3], running[-1][4]
            if item is None:
                return None
            entry = item[2]
            if self._is_lost(entry):
                self._waiting.relegate(entry)
                continue
            if self._fits(entry) or self._make_room(entry, running):
                return entry, None
            if entry is self._preferred:
                self._preferred = None
                continue
            self._blocked = True

    def _first_waiting(self) -> tuple[int, float, Entry] | None:
        if self._preferred is not None:
            return _FIRST, 0.0, self._preferred
        return self._waiting.first()

    def _fits(self, entry: Entry) -> bool:
        if entry.rank is not Rank.BEST_EFFORT or entry is self._preferred:
            return self._room.fits(entry, reserve_tokens=0)
        reserve = self._allowance.kv_reserve_tokens
        return self._allowance.admits(entry) and self._room.fits(entry, reserve_tokens=reserve)

    def _would_cut(self, entry: Entry, left_tokens: int) -> bool:
        """
        True if a running best-effort prefill would take a part of the other prefills' chunk.

        An engine gives tokens in order of admission, and the maximum per prefill that leaves tokens
        for later prefills applies to all prefills.
        """
        if entry.rank is not Rank.BEST_EFFORT:
            return False
        return max(self._remaining, default=0) > left_tokens

    def _save_decodes(self, running: list[_Candidate]) -> None:
        """
        Preempt best effort if decodes lack KV for their next tokens; the engine would preempt any
        request.
        """
        missing = self._room.missing_for_decodes
        has_others = self._decodes.tokens > len(self._best_effort_victims)
        if has_others and missing > 0 and self._options.best_effort_yields:
            self._rank_later(running)
            self._preempt(kv_victims(self._yielding(running), missing), running)

    def _make_room(self, entry: Entry, running: list[_Candidate]) -> bool:
        """
        Preempt requests of later ranks for the KV and the slot of *entry*; return True if it fits.
        """
        self._rank_later(running)
        missing = self._room.missing(entry)
        victims: list[_Held] = []
        if self._options.best_effort_yields and entry.rank is not Rank.BEST_EFFORT:
            victims = kv_victims(self._yielding(running), max(1, missing))
        if not victims:
            least = max(entry.rank, Rank.REGULAR)
            candidates = [(item[3], item[4]) for item in running if item[3].rank > least]
            victims = memory_victims(candidates, max(1, missing))
        if not victims:
            return False
        self._preempt(victims, running)
        return self._fits(entry)

    def _yielding(self, running: list[_Candidate]) -> list[_Held]:
        """Running best-effort prefills and decodes, which may give up their KV."""
        prefills = [(item[3], item[4]) for item in running if item[3].rank is Rank.BEST_EFFORT]
        return prefills + [
            held for held in self._best_effort_victims if held[1].request_id not in self._victims
        ]

    def _preempt(self, victims: list[_Held], running: list[_Candidate]) -> None:
        gone = {run.request_id for _, run in victims}
        self._room.release(victims)
        self._victims.extend(gone)
        running[:] = [item for item in running if item[4].request_id not in gone]

    def _take(self, entry: Entry, run: RunningView | None, running: list[_Candidate]) -> None:
        self._remaining.append(entry.prefill_tokens)
        self._last = entry.view.request_id
        if run is None:
            if entry is self._preferred:
                self._preferred = None
            self._offer(entry)
        else:
            running.pop()
            del self._resting[run.request_id]

    def _offer(self, entry: Entry) -> None:
        self._waiting.discard(entry)
        entry.waiting = True
        self._offered.append(entry)
        self._room.take(entry)
        self._allowance.count(entry)

    def _last_in_engine(self) -> RequestId | None:
        """The running prefill to which the engine gives tokens last."""
        if self._offered:
            return self._offered[-1].view.request_id
        for _, run in reversed(self._prefills):
            if run.request_id not in self._resting and run.request_id not in self._victims:
                return run.request_id
        return None
