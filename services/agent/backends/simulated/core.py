"""
Simulated engine core: continuous batching with a model of vLLM's scheduler and allocator.

The core is synchronous and does no IO. The simulated backend and the trace simulator both drive it.
"""

from services.agent.backends.base import EngineRequest
from services.agent.backends.checks import output_room, stop_tokens
from services.agent.backends.policies import UNLIMITED_TOKENS, free_tokens, is_relegated
from services.agent.backends.prefill_times import PrefillTimes
from services.agent.backends.settings import SimulatedSettings
from services.agent.backends.simulated.memory import KvMemory
from services.agent.backends.simulated.run import Run
from services.agent.backends.simulated.schedule import IterationResult, Pass, Schedule, TokenOutput
from services.agent.backends.simulated.tokens import TokenSource
from services.agent.backends.totals import SchedulingTotals
from shared.contracts.base import RequestId, Seconds, UnixTime
from shared.contracts.models import ModelEntry
from shared.contracts.qos import QosClass
from solver.prediction.latency.latency_model import predict_s
from solver.scheduling.engine.decision import (
    BatchState,
    IterationOutcome,
    RequestView,
    SchedulingPolicy,
)
from solver.scheduling.run_ends import RunEnds


class SimulatedEngineCore:
    """
    One engine with one model.

    Args:
        entry: The model.
        settings: Limits and latency; the KV capacity must be at least `max_model_len` tokens.
        policy: Scheduling policy; no other core may use the same object.
        vocab_size: Exclusive upper bound of generated token ids.
    """

    def __init__(
        self,
        entry: ModelEntry,
        settings: SimulatedSettings,
        policy: SchedulingPolicy,
        *,
        vocab_size: int | None = None,
    ) -> None:
        self._entry = entry
        self._settings = settings
        self._policy = policy
        self._vocab_size = vocab_size or settings.vocab_size
        self._token_budget = settings.token_budget
        self.max_running = settings.max_running
        self._block_tokens = settings.block_tokens
        self.memory = KvMemory(settings)
        self._running: list[Run] = []
        self._waiting: dict[RequestId, Run] = {}
        self._ends = RunEnds()
        self._stalled = False
        self.totals = SchedulingTotals()
        """Counters of the scheduling policy."""
        self.prefill_times = PrefillTimes()
        """
        Measures prefill times by the times that the caller passes to `begin`. The code that
        delivers a request's first token ends the measurement.
        """
        self.last_budget_tokens = 0
        """Token budget of the engine's last iteration."""

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def kv_utilization(self) -> float:
        """Share of KV that unfinished requests hold, 0..1."""
        return self.memory.pool.utilization

    def limit(self, *, token_budget: int, max_running: int) -> None:
        """Change the engine's limits; values above the limits in the settings have no effect."""
        self._token_budget = max(1, min(token_budget, self._settings.token_budget))
        self.max_running = max(1, min(max_running, self._settings.max_running))

    def add(self, request: EngineRequest) -> None:
        """Queue *request*; its id must be new, and `checks.check_request` must have accepted it."""
        stops = stop_tokens(self._entry, request)
        run = Run(
            request_id=request.request_id,
            tokens=[*request.prompt, *request.progress],
            num_prefill_tokens=len(request.prompt) + len(request.progress),
            room_tokens=output_room(self._entry, request),
            request=request,
            stops=stops,
            best_effort=request.slo.qos_class is QosClass.BEST_EFFORT,
            source=TokenSource(
                request,
                stops,
                first_token=self._settings.first_token,
                vocab_size=self._vocab_size,
                mean_output_tokens=self._settings.mean_output_tokens,
            ),
        )
        self._waiting[run.request_id] = run
        self._ends.add(run.request_id, request.expires_at, request.first_token_by)
        self.memory.host.track(run)
        self._policy.add(
            RequestView(
                request_id=run.request_id,
                arrived_at=request.arrived_at,
                prompt_tokens=run.num_prefill_tokens,
                progress_tokens=len(request.progress),
                max_tokens=run.room_tokens,
                slo=request.slo,
                importance=request.importance,
                tenant=request.tenant,
                application=request.application,
            )
        )

    def abort(self, request_id: RequestId) -> None:
        """Remove a request from the engine and free its KV; unknown ids are ignored."""
        run = self._waiting.pop(request_id, None)
        if run is None:
            run = next((run for run in self._running if run.request_id == request_id), None)
            if run is None:
                return
            self._running.remove(run)
        self.prefill_times.forget(request_id)
        self.memory.host.leave(run)
        self._leave(run)

    def clear_caches(self) -> None:
        """
        Drop all KV that no running request owns; the KV of running requests is copied to host
        memory again.
        """
        self.memory.clear(self._running)

    def iterate(self, now: UnixTime) -> IterationResult:
        """Begin an iteration at time *now* and complete it immediately."""
        return self.finish(self.begin(now))

    def begin(self, now: UnixTime) -> Pass:
        """
        Select the work of the iteration that begins at time *now*, and allocate KV for the work.

        Requests that are past their ends leave the engine.
        """
        for request_id in self._ends.over(now, self._has_token):
            self.abort(request_id)
        schedule = Schedule(self._policy.decide(now, self._batch_state()), self._token_budget)
        self.last_budget_tokens = schedule.budget_tokens
        stopped = [run for run in self._running if run.request_id in schedule.decision.preempted]
        for run in stopped:
            self._preempt(run)
        # Decodes come first in the list; requests at its end lose their KV first.
        self._running.sort(key=lambda run: run.is_prefill)
        starved = self._schedule_running(schedule)
        admitted = [] if starved else self._admit(schedule)
        for run in (*stopped, *starved):
            self.prefill_times.pause(run.request_id, now)
        for run in admitted:
            if not run.num_output_tokens:
                self.prefill_times.begin(run.request_id, now)
        # The selected requests do not fit into memory. In the next iteration no request is held,
        # and the first request in order starts if there is room.
        self._stalled = not schedule.parts
        begun = Pass(
            schedule.parts,
            self._settings.latency,
            self.memory.host.take_due_s() if schedule.parts else 0.0,
        )
        iteration = begun.iteration()
        self._policy.observe(
            now + iteration.duration_s,
            IterationOutcome(
                iteration=iteration,
                admitted=tuple(run.request_id for run in admitted),
                cached_tokens={run.request_id: run.cached_tokens or 0 for run in admitted},
                preempted=tuple(run.request_id for run in (*stopped, *starved)),
            ),
        )
        return begun

    def finish(self, begun: Pass) -> IterationResult:
        """Complete the parts of *begun* that were not dropped; aborted requests get no output."""
        iteration = begun.iteration()
        outputs = (self._advance(run, count) for run, count in begun.parts if not run.ended)
        return IterationResult(
            duration_s=iteration.duration_s,
            outputs=tuple(output for output in outputs if output is not None),
            iteration=iteration if begun.parts else None,
        )

    def online_prefills_s(self) -> dict[RequestId, Seconds]:
        """Predicted prefill time of each waiting request with targets."""
        latency = self._settings.latency
        return {
            run.request_id: predict_s(
                latency, compute_tokens=run.num_prefill_tokens, context_tokens=0
            )
            for run in self._waiting.values()
            if not run.best_effort
        }

    def _batch_state(self) -> BatchState:
        return BatchState(
            running=self._running,
            num_waiting=len(self._waiting),
            max_running=self.max_running,
            max_budget_tokens=self._token_budget,
            free_kv_tokens=UNLIMITED_TOKENS
            if self._stalled
            else free_tokens(self.memory.pool.num_free, self._block_tokens),
        )

    def _schedule_running(self, schedule: Schedule) -> list[Run]:
        """
        Schedule tokens of running requests; return the requests that were preempted for lack of KV.
        """
        starved: list[Run] = []
        index = 0
        # Preempted requests are removed from the end of the list, so entries before the index stay.
        while index < len(self._running) and schedule.budget_tokens > 0:
            run = self._running[index]
            index += 1
            if schedule.is_held(run) and not self._stalled:
                self.totals.held += 1
                continue
            count = schedule.share(run)
            while not self.memory.grow(run, count):
                starved.append(self._running[-1])
                self._preempt(self._running[-1])
                if starved[-1] is run:
                    return starved
            schedule.take(run, count)
        return starved

    def _admit(self, schedule: Schedule) -> list[Run]:
        """Start waiting requests in the policy's order until a request does not fit into the KV."""
        admitted: list[Run] = []
        for request_id in schedule.decision.order:
            if schedule.budget_tokens == 0 or len(self._running) >= self.max_running:
                break
            run = self._waiting[request_id]
            if not self.memory.begin(run):
                break
            self._running.append(run)
            admitted.append(run)
            count = schedule.share(run)
            self.memory.grow(run, count)
            schedule.take(run, count)
        for run in admitted:
            del self._waiting[run.request_id]
        return admitted

    def _preempt(self, run: Run) -> None:
        self.totals.preempted += 1
        self._running.remove(run)
        self.memory.pool.release(run.blocks)
        run.preempt()
        self._waiting[run.request_id] = run

    def _has_token(self, request_id: RequestId) -> bool:
        run = self._waiting.get(request_id)
        if run is None:
            run = next((run for run in self._running if run.request_id == request_id), None)
        return run is not None and run.num_output_tokens > 0

    def _leave(self, run: Run, answer_tokens: int | None = None) -> None:
        run.ended = True
        self._ends.remove(run.request_id)
        self.memory.pool.release(run.blocks)
        self.totals.relegated += is_relegated(self._policy, run.request_id)
        self._policy.remove(run.request_id, answer_tokens)

    def _advance(self, run: Run, count: int) -> TokenOutput | None:
        self.memory.compute(run, count)
        if run.num_computed_tokens < len(run.tokens):
            self.memory.save(run)
            return None
        token_ids, finish_reason = run.generate()
        cached, run.cached_tokens = run.cached_tokens or 0, 0
        if finish_reason is not None:
            self._running.remove(run)
            self.memory.host.release(run)
            self._leave(run, len(run.request.progress) + run.num_output_tokens)
        else:
            self.memory.save(run)
        return TokenOutput(run.request_id, token_ids, finish_reason, cached)
