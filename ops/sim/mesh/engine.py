"""
One engine with continuous batching, in time proportional to the number of changes.

Decodes are counted, not iterated: a heap sorts requests by the iteration in which they end, and
consecutive decode-only iterations are computed together. A test checks that the iterations equal
those of `ops.sim.engine.SimulatedReplica` with first come, first served and blocks of one token.
"""

import math
from bisect import insort

from ops.sim.mesh.decoding import Decodes
from ops.sim.mesh.limits import BatchLimits, BatchTotals
from ops.sim.mesh.request import MeshRequest
from shared.contracts.base import RequestId, Seconds, UnixTime
from solver.scheduling.engine.latency import LatencyTable


class BatchEngine:
    """
    An engine that serves one model, first come, first served.

    Args:
        limits: Limits of memory and batch.
        totals: Counters that the engine updates.
        now: Time at which the engine begins.
    """

    def __init__(
        self,
        latency: LatencyTable,
        limits: BatchLimits,
        totals: BatchTotals | None = None,
        *,
        now: UnixTime = 0.0,
    ) -> None:
        self.now = now
        """Time at which the next iteration begins."""
        self.totals = totals or BatchTotals()
        self.free_tokens = limits.kv_capacity_tokens
        self._latency = latency
        self._limits = limits
        self._decodes = Decodes(latency)
        self._prefills: dict[RequestId, MeshRequest] = {}
        self._waiting: list[tuple[int, MeshRequest]] = []
        self._num_added = 0
        self._finished: list[MeshRequest] = []

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        return len(self._decodes) + len(self._prefills)

    @property
    def num_unfinished(self) -> int:
        return self.num_running + len(self._waiting)

    @property
    def free_slots(self) -> int:
        return self._limits.max_running - self.num_running

    @property
    def pace_s(self) -> Seconds:
        """Duration of an iteration that only computes the current decodes."""
        return self._decodes.pace_s

    def running(self) -> list[MeshRequest]:
        """
        Running requests with valid counters, in order of their first decode; prefills come last.
        """
        return [*self._decodes.runs(), *self._prefills.values()]

    def waiting(self) -> list[MeshRequest]:
        """Waiting requests in order of service."""
        return [run for _, run in self._waiting]

    def add(self, run: MeshRequest, now: UnixTime) -> None:
        """
        Append *run* to the waiting requests at *now*.

        Raises:
            ValueError: The request is larger than the engine's KV memory.
        """
        if run.arrival.prompt_tokens + run.output_tokens > self._limits.kv_capacity_tokens:
            raise ValueError(f"request {run.request_id} does not fit into the engine")
        if not self.num_unfinished:
            self.now = max(self.now, now)
        self._num_added += 1
        run.place = self._num_added
        self._waiting.append((run.place, run))

    def take_finished(self) -> list[MeshRequest]:
        """Requests that have ended since the last call, in order of their ends."""
        finished, self._finished = self._finished, []
        return finished

    def take_waiting(self) -> list[MeshRequest]:
        """Remove and return all waiting requests, in order of service."""
        waiting, self._waiting = self.waiting(), []
        return waiting

    def evict(self, run: MeshRequest) -> None:
        """Remove the running request *run*, which keeps its answer so far and loses its KV."""
        self._leave(run)
        self.totals.wasted_tokens += run.num_computed_tokens
        run.forget()

    def swap_out(self, run: MeshRequest) -> None:
        """Remove the running request *run*, and keep its KV in host memory."""
        self._leave(run)
        run.kept_tokens = run.num_computed_tokens

    def wake_at(self) -> UnixTime:
        """Time of the next event other than a plain decode; infinite while the engine is idle."""
        if not self.num_unfinished:
            return math.inf
        count = self._quiet_steps()
        return self.now + self._decodes.steps_s(count) if count else self.now

    def catch_up(self, until: UnixTime) -> None:
        """Compute all iterations that begin before the time *until*."""
        while self.now < until and self.num_unfinished:
            count = self._quiet_steps()
            if count:
                self._decode(min(count, self._decodes.steps_within(until - self.now)))
            else:
                self.iterate()

    def iterate(self) -> None:
        """Compute the next iteration of the engine."""
        if self._limits.static_batch is not None and not self.num_running:
            self._begin_batch(self._limits.static_batch)
        starved = self._make_room()
        num_decodes, context_tokens = len(self._decodes), self._decodes.context_tokens
        self.free_tokens -= num_decodes
        parts: list[tuple[MeshRequest, int]] = []
        budget, starved = self._continue_prefills(starved=starved, parts=parts)
        restored = [] if starved else self._admit(budget, parts)
        pairs = sum(n * (run.num_computed_tokens + n / 2) for run, n in parts)
        context_tokens += sum(run.num_computed_tokens for run, _ in parts)
        tokens = num_decodes + sum(n for _, n in parts)
        duration_s = self._latency.predict_s(tokens, pairs, context_tokens) if tokens else 0.0
        for run in restored:
            duration_s += run.num_computed_tokens * self._limits.restore_s_per_token
        if duration_s <= 0:
            raise RuntimeError("the engine computes no token although requests wait")
        self._count(duration_s, tokens)
        self._end_all(self._decodes.advance(1))
        for run, n in parts:
            self._computed(run, n)
        for run in restored:
            self._join(run)

    def _quiet_steps(self) -> int:
        """
        Number of the next iterations that only compute decodes; the last of them may end a request.
        """
        if self._prefills or not self._decodes or self._can_begin():
            return 0
        return min(self._decodes.steps_left(), self.free_tokens // len(self._decodes))

    def _can_begin(self) -> bool:
        if not self._waiting:
            return False
        if self._limits.static_batch is not None:
            return not self.num_running
        return self.free_slots > 0 and self._fits(self._waiting[0][1])

    def _fits(self, run: MeshRequest) -> bool:
        return max(run.num_prefill_tokens, run.kept_tokens) <= self.free_tokens

    def _decode(self, count: int) -> None:
        """Compute *count* iterations with decodes only in one step."""
        num_tokens = len(self._decodes) * count
        duration_s = self._decodes.steps_s(count)
        self.free_tokens -= num_tokens
        self._count(duration_s, num_tokens)
        self._end_all(self._decodes.advance(count))

    def _count(self, duration_s: Seconds, tokens: int) -> None:
        totals, capacity = self.totals, self._limits.kv_capacity_tokens
        totals.busy_s += duration_s
        totals.tokens += tokens
        totals.kv_share_s += duration_s * (capacity - self.free_tokens) / capacity
        self.now += duration_s

    def _make_room(self) -> bool:
        """Free memory for one token of each decode; return whether a run lost its KV."""
        starved = False
        while self._decodes and self.free_tokens < len(self._decodes):
            starved = True
            self._starve()
        return starved

    def _starve(self) -> MeshRequest:
        """
        Take the KV from the request that began last, so that the request waits again; return this
        request.
        """
        prefills = self._prefills
        victim = prefills[next(reversed(prefills))] if prefills else self._decodes.last()
        self.evict(victim)
        victim.num_preempted += 1
        insort(self._waiting, (victim.place, victim), key=lambda entry: entry[0])
        return victim

    def _begin_batch(self, size: int) -> None:
        """Begin up to *size* waiting requests together, as far as their whole prompts fit."""
        free_tokens = self.free_tokens
        while self._waiting and size > 0:
            run = self._waiting[0][1]
            free_tokens -= run.num_prefill_tokens
            if free_tokens < 0:
                return
            self._waiting.pop(0)
            self._prefills[run.request_id] = run
            size -= 1

    def _continue_prefills(
        self, *, starved: bool, parts: list[tuple[MeshRequest, int]]
    ) -> tuple[int, bool]:
        """
        Continue prefills, appended to *parts*; return the remaining budget, and whether a request
        lost its KV.
        """
        budget = self._limits.token_budget - len(self._decodes)
        for run in list(self._prefills.values()):
            if budget <= 0 or run.request_id not in self._prefills:
                break
            count = min(run.num_prefill_tokens - run.num_computed_tokens, budget)
            while self.free_tokens < count:
                starved = True
                if self._starve() is run:
                    return budget, starved
            self.free_tokens -= count
            parts.append((run, count))
            budget -= count
        return budget, starved

    def _admit(self, budget: int, parts: list[tuple[MeshRequest, int]]) -> list[MeshRequest]:
        """Begin waiting requests; return the requests whose KV is restored from host memory."""
        restored: list[MeshRequest] = []
        if self._limits.static_batch is not None:
            return restored
        room = self.free_slots
        while budget > 0 and room > 0 and self._waiting and self._fits(self._waiting[0][1]):
            _, run = self._waiting.pop(0)
            room -= 1
            if run.kept_tokens:
                self._restore(run)
                restored.append(run)
                continue
            self._prefills[run.request_id] = run
            count = min(run.num_prefill_tokens, budget)
            self.free_tokens -= count
            parts.append((run, count))
            budget -= count
        return restored

    def _restore(self, run: MeshRequest) -> None:
        run.num_computed_tokens, run.kept_tokens = run.kept_tokens, 0
        self.free_tokens -= run.num_computed_tokens
        self.totals.restored_tokens += run.num_computed_tokens

    def _computed(self, run: MeshRequest, count: int) -> None:
        run.num_computed_tokens += count
        if run.num_computed_tokens < run.num_prefill_tokens:
            return
        del self._prefills[run.request_id]
        run.is_prefill = False
        run.generate(self.now)
        if run.num_output_tokens < run.output_tokens:
            self._join(run)
        else:
            self.free_tokens += run.num_computed_tokens
            self._end(run)

    def _join(self, run: MeshRequest) -> None:
        """Let the request *run* compute from the next iteration on."""
        if run.is_prefill:
            self._prefills[run.request_id] = run
        else:
            self._decodes.join(run)

    def _end_all(self, runs: list[MeshRequest]) -> None:
        """End the requests *runs*, which have their last token and no longer decode."""
        for run in runs:
            self.free_tokens += run.num_computed_tokens
            self._end(run)

    def _end(self, run: MeshRequest) -> None:
        """End the request *run*, which has its last token."""
        run.last_token_at = run.finished_at = self.now
        self._finished.append(run)

    def _leave(self, run: MeshRequest) -> None:
        if self._prefills.pop(run.request_id, None) is None:
            self._decodes.leave(run)
        self.free_tokens += run.num_computed_tokens
