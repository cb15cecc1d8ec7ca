"""
Simulation of one replica: the simulated engine's scheduling and memory, with counts instead of
tokens.

Without prefix hits, a replica has the same iterations as `services.agent.backends.simulated.core`;
a test checks this. Because it counts blocks instead of hashing tokens, it is fast enough for hours
of traffic.
"""

from collections import deque
from collections.abc import Sequence

from ops.sim.limits import EngineLimits, EngineTotals
from ops.sim.request import SimRequest
from ops.sim.work import Work, view_of
from shared.contracts.base import RequestId, Seconds, UnixTime
from shared.contracts.telemetry import Iteration
from solver.scheduling.engine.decision import (
    BatchState,
    IterationDecision,
    IterationOutcome,
    SchedulingPolicy,
)
from solver.scheduling.engine.latency import LatencyTable


class SimulatedReplica:
    """
    One engine in virtual time.

    Args:
        policy: Decides each iteration.
        latency: Times of iterations; the policy may use another table.
        limits: Limits of memory and batch.
        record: True: record each iteration's token counts.
    """

    def __init__(
        self,
        policy: SchedulingPolicy,
        latency: LatencyTable,
        limits: EngineLimits,
        *,
        record: bool = False,
    ) -> None:
        self._policy = policy
        self._latency = latency
        self._limits = limits
        self._record = record
        self._free_blocks = limits.kv_capacity_tokens // limits.block_tokens
        self._decodes: list[SimRequest] = []
        self._prefills: list[SimRequest] = []
        self._waiting: dict[RequestId, SimRequest] = {}
        self._arrivals: deque[SimRequest] = deque()
        """Requests of the current call of `run` that have not arrived yet."""
        self.totals = EngineTotals()

    @property
    def num_unfinished(self) -> int:
        return len(self._decodes) + len(self._prefills) + len(self._waiting)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def free_blocks(self) -> int:
        return self._free_blocks

    def run(self, requests: Sequence[SimRequest], *, until: UnixTime | None = None) -> UnixTime:
        """
        Serve *requests*, which are in order of arrival, to their end.

        Args:
            requests: Requests, each to be served once.
            until: Time at which the simulation stops at the latest.

        Returns:
            Time at which the last request finished or the simulation stopped.
        """
        arrivals = self._arrivals = deque(requests)
        now = 0.0
        while arrivals or self.num_unfinished:
            if not self.num_unfinished:
                now = max(now, arrivals[0].arrival.arrived_at)
            while arrivals and arrivals[0].arrival.arrived_at <= now:
                self.add(arrivals.popleft())
            if until is not None and now >= until:
                break
            duration_s = self.iterate(now)
            if duration_s <= 0:
                if not arrivals:
                    raise RuntimeError("the policy computes no token and no request will arrive")
                duration_s = max(1e-3, arrivals[0].arrival.arrived_at - now)
            now += duration_s
        return now

    def add(self, request: SimRequest) -> None:
        """Add *request* to the waiting requests."""
        self._waiting[request.request_id] = request
        self._policy.add(view_of(request))

    def iterate(self, now: UnixTime) -> Seconds:
        """
        Compute one iteration that begins *now*; return its duration, or 0 if the iteration is
        empty.
        """
        limits = self._limits
        decision = self._policy.decide(
            now,
            BatchState(
                running=self._decodes + self._prefills,
                num_waiting=len(self._waiting),
                max_running=limits.max_running,
                max_budget_tokens=limits.max_budget_tokens,
                free_kv_tokens=self._free_blocks * limits.block_tokens,
            ),
        )
        preempted = self._preempt_decided(decision)
        total = budget = max(1, min(decision.token_budget, limits.max_budget_tokens))
        parts: list[tuple[SimRequest, int]] = []
        budget, num_decodes, starved = self._schedule_decodes(budget)
        budget = self._schedule_prefills(decision, budget, parts, starved)
        admitted = [] if starved else self._admit(decision, budget, parts)
        work = Work(self._decodes[:num_decodes], parts)
        assert work.tokens <= total
        duration_s, work = self._compute(now, work)
        tokens, num_decodes = work.tokens, len(work.decodes)
        self._policy.observe(
            now + duration_s,
            IterationOutcome(
                iteration=Iteration(
                    compute_tokens=tokens,
                    context_tokens=work.context_tokens,
                    num_decodes=num_decodes,
                    duration_s=duration_s,
                ),
                admitted=tuple([run.request_id for run in admitted]),
                preempted=tuple([run.request_id for run in (*preempted, *starved)]),
            ),
        )
        self.totals.count(duration_s, tokens, num_decodes)
        if self._record and tokens:
            self.totals.steps.append((tokens, num_decodes))
        self._advance(now + duration_s, work)
        return duration_s

    def _compute(self, now: UnixTime, work: Work) -> tuple[Seconds, Work]:  # noqa: ARG002 - seam
        """
        Return the duration of the iteration that begins *now*, and the completed part of *work*.
        """
        return work.duration_s(self._latency), work

    def _is_loading(self, run: SimRequest) -> bool:  # noqa: ARG002 - seam
        """True while earlier KV of *run* is being restored; meanwhile *run* pauses."""
        return False

    def _preempt_decided(self, decision: IterationDecision) -> list[SimRequest]:
        if not decision.preempted:
            return []
        victims = [
            run for run in self._decodes + self._prefills if run.request_id in decision.preempted
        ]
        for run in victims:
            self._preempt(run)
        return victims

    def _schedule_decodes(self, budget: int) -> tuple[int, int, list[SimRequest]]:
        """
        Return the remaining budget, the number of decodes, and the runs that lost KV for these
        decodes.
        """
        starved: list[SimRequest] = []
        block_tokens = self._limits.block_tokens
        index = 0
        decodes = self._decodes
        while index < len(decodes) and budget > 0:
            run = decodes[index]
            computed = run.num_computed_tokens
            if computed >= run.blocks * block_tokens:
                while self._free_blocks == 0:
                    victim = self._prefills[-1] if self._prefills else decodes[-1]
                    starved.append(victim)
                    self._preempt(victim)
                    if victim is run:
                        return budget, index, starved
                self._free_blocks -= 1
                run.blocks += 1
            budget -= 1
            index += 1
        return budget, index, starved

    def _schedule_prefills(
        self,
        decision: IterationDecision,
        budget: int,
        parts: list[tuple[SimRequest, int]],
        starved: list[SimRequest],
    ) -> int:
        """
        Continue running prefills; append to *parts* and *starved*; return the remaining budget.
        """
        cap = decision.per_request_cap
        index = 0
        while index < len(self._prefills) and budget > 0:
            run = self._prefills[index]
            index += 1
            if run.request_id in decision.held or self._is_loading(run):
                continue
            count = min(run.num_prefill_tokens - run.num_computed_tokens, budget)
            if cap is not None:
                count = min(count, max(1, cap))
            while not self._grow(run, count):
                victim = self._prefills[-1]
                starved.append(victim)
                self._preempt(victim)
                if victim is run:
                    return budget
            parts.append((run, count))
            budget -= count
        return budget

    def _admit(
        self, decision: IterationDecision, budget: int, parts: list[tuple[SimRequest, int]]
    ) -> list[SimRequest]:
        admitted: list[SimRequest] = []
        limits = self._limits
        room = limits.max_running - len(self._decodes) - len(self._prefills)
        cap = decision.per_request_cap
        order = iter(decision.order)
        while budget > 0 and room > 0 and (request_id := next(order, None)) is not None:
            run = self._waiting[request_id]
            if -(-run.num_prefill_tokens // limits.block_tokens) > self._free_blocks:
                break
            del self._waiting[request_id]
            self._prefills.append(run)
            admitted.append(run)
            room -= 1
            if self._is_loading(run):
                self._grow(run, 0)
                continue
            count = min(run.num_prefill_tokens - run.num_computed_tokens, budget)
            if cap is not None:
                count = min(count, max(1, cap))
            self._grow(run, count)
            parts.append((run, count))
            budget -= count
        return admitted

    def _grow(self, run: SimRequest, count: int) -> bool:
        needed = -(-(run.num_computed_tokens + count) // self._limits.block_tokens) - run.blocks
        if needed > self._free_blocks:
            return False
        if needed > 0:
            self._free_blocks -= needed
            run.blocks += needed
        return True

    def _preempt(self, run: SimRequest) -> None:
        (self._prefills if run.is_prefill else self._decodes).remove(run)
        self._free_blocks += run.blocks
        self.totals.wasted_tokens += run.num_computed_tokens
        self.totals.num_preempted += 1
        run.blocks = 0
        run.num_preempted += 1
        run.num_prefill_tokens = run.arrival.prompt_tokens + run.num_output_tokens
        run.num_computed_tokens = 0
        run.is_prefill = True
        self._waiting[run.request_id] = run

    def _advance(self, now: UnixTime, work: Work) -> None:
        finished = False
        for run in work.decodes:
            run.num_computed_tokens += 1
            finished |= self._generate(run, now)
        if finished:
            self._decodes = [run for run in self._decodes if run.finished_at is None]
        complete = False
        for run, count in work.prefills:
            run.num_computed_tokens += count
            if run.num_computed_tokens >= run.num_prefill_tokens:
                complete = True
                run.is_prefill = False
                if not self._generate(run, now):
                    self._decodes.append(run)
        if complete:
            self._prefills = [run for run in self._prefills if run.is_prefill]

    def _generate(self, run: SimRequest, now: UnixTime) -> bool:
        """Generate a token of the request *run*; return whether this token is the last."""
        run.generate(now)
        if run.num_output_tokens < run.output_tokens and not self._limits.prefill_only:
            return False
        run.finished_at = now
        self._free_blocks += run.blocks
        run.blocks = 0
        self._policy.remove(run.request_id, run.num_output_tokens)
        return True

    def kept_tokens(self, run: SimRequest) -> int:
        """Number of tokens of the request *run* that need not be recomputed."""
        return run.num_computed_tokens
