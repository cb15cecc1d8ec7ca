"""
A `solver.scheduling` policy inside stock vLLM's engine core.

The policy decides the order, the token budget, which requests are held and which lose their KV.
vLLM does everything else as usual. The module uses private interfaces of vLLM; the contract suite
fails when these change.
"""

import time
from typing import Any

from vllm.v1.request import RequestStatus

from services.agent.backends.policies import (
    UNLIMITED_TOKENS,
    create_policy,
    free_tokens,
    is_relegated,
)
from services.agent.backends.vllm.core.policy_queue import PolicyQueue
from services.agent.backends.vllm.core.scheduler import AsyncTimedScheduler, Timed, TimedScheduler
from services.agent.backends.vllm.core.work import ScheduledWork, is_prefill, running_request
from services.agent.backends.vllm.shared.core_settings import refusal
from services.agent.backends.vllm.shared.qos import qos_in_core
from shared.contracts.base import RequestId, Seconds, UnixTime
from shared.contracts.errors import SettingsError
from shared.contracts.telemetry import Iteration
from solver.scheduling.engine.decision import (
    BatchState,
    IterationDecision,
    IterationOutcome,
    RequestView,
)
from solver.scheduling.engine.latency import FollowsLatency, OnlineLatencyModel

_WHOLE_ANSWER = frozenset(
    (
        RequestStatus.FINISHED_STOPPED,
        RequestStatus.FINISHED_LENGTH_CAPPED,
        RequestStatus.FINISHED_REPETITION,
    )
)


class PolicyDriven(Timed):
    """Mixin over a vLLM scheduler that applies one policy decision in each iteration."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        settings = self.settings
        self._learner = OnlineLatencyModel(settings.latency, max_tokens=self._largest_budget)
        try:
            self._policy = create_policy(settings.policy, self._learner.table, settings.scheduling)
        except SettingsError as error:
            raise refusal(self.vllm_config.additional_config, str(error)) from error
        self.waiting = PolicyQueue()
        self._preempted: dict[RequestId, None] = {}
        self._stalled = False

    def add_request(self, request: Any) -> None:
        qos = qos_in_core(request)
        view = RequestView(
            request_id=request.request_id,
            arrived_at=qos.arrived_at or request.arrival_time,
            prompt_tokens=request.num_prompt_tokens,
            progress_tokens=qos.progress_tokens,
            max_tokens=request.max_tokens,
            slo=qos.slo,
            importance=qos.importance,
            tenant=qos.tenant,
            application=qos.application,
        )
        super().add_request(request)
        self._policy.add(view)

    def apply_limits(self) -> None:
        super().apply_limits()
        decision = self._policy.decide(self._begins_at(), self._batch())
        self._preempt(decision)
        # Decodes first: they always get their token, and the last request in the list loses its KV
        # first.
        self.running.sort(key=is_prefill)
        if not self._stalled:
            self._hold(decision)
        self.waiting.begin(decision.order)
        if self.computes_whole_prompts:
            return
        self.max_num_scheduled_tokens = max(
            1, min(decision.token_budget, self.max_num_scheduled_tokens)
        )
        self.scheduler_config.long_prefill_token_threshold = decision.per_request_cap or 0

    def on_scheduled(self, work: ScheduledWork, admitted: list[str]) -> None:
        # vLLM computed nothing: the selected request does not fit. In the next iteration no request
        # is held, and the first request in order starts if vLLM has room.
        self._stalled = not work.tokens and not self.in_flight
        # Report admissions and preemptions immediately instead of with the iteration's time: with
        # asynchronous scheduling the next decision precedes that time.
        preempted = self._preempted.keys() - admitted
        self._policy.observe(
            time.time(),
            IterationOutcome(
                iteration=work.iteration(0.0),
                admitted=tuple(RequestId(request_id) for request_id in admitted),
                cached_tokens={
                    RequestId(name): _cached_tokens(self.requests[name]) for name in admitted
                },
                preempted=tuple(name for name in self._preempted if name in preempted),
            ),
        )
        self._preempted.clear()

    def on_iteration(self, work: ScheduledWork, iteration: Iteration) -> None:
        self._policy.observe(time.time(), IterationOutcome(iteration=iteration))
        table = self._learner.observe(work.work(), iteration.duration_s)
        if table is not None and isinstance(self._policy, FollowsLatency):
            self._policy.set_latency(table)

    def _begins_at(self) -> UnixTime:
        """Start of the next iteration: now, or the predicted end of the iterations in flight."""
        return time.time() + self._in_flight_s()

    def _in_flight_s(self) -> Seconds:
        if not self.in_flight:
            return 0.0
        predicted_s = sum(self._learner.predict_s(each.work()) for each in self.in_flight)
        begun = max(self.in_flight[0].begun, self.last_end)
        return max(0.0, begun + predicted_s - time.perf_counter())

    def _hold(self, decision: IterationDecision) -> None:
        """
        Hold the prefills that *decision* holds.

        Held prefills stay at the end of the running list. vLLM looks there for aborted requests,
        and frees their KV first when a decode needs KV. vLLM skips a request until its eligible
        step, a field that vLLM itself sets for decodes only.
        """
        for request in self.running if decision.held else ():
            if request.request_id in decision.held and is_prefill(request):
                # `schedule` increments `current_step` before it compares the step with this field.
                request.next_decode_eligible_step = self.current_step + 2
                self.totals.held += 1

    def _preempt(self, decision: IterationDecision) -> None:
        if not decision.preempted:
            return
        for request in [r for r in self.running if r.request_id in decision.preempted]:
            self.running.remove(request)
            self._preempt_request(request, time.monotonic())
            self.prev_step_scheduled_req_ids.discard(request.request_id)

    def _preempt_request(self, request: Any, *args: Any, **kwargs: Any) -> None:
        super()._preempt_request(request, *args, **kwargs)
        self._preempted[request.request_id] = None
        self.totals.preempted += 1

    def _free_request(self, request: Any, *args: Any, **kwargs: Any) -> Any:
        self.totals.relegated += is_relegated(self._policy, request.request_id)
        self._policy.remove(request.request_id, _answer_tokens(request))
        self._preempted.pop(request.request_id, None)
        return super()._free_request(request, *args, **kwargs)

    def _batch(self) -> BatchState:
        pool = self.kv_cache_manager.block_pool
        return BatchState(
            running=[running_request(request) for request in self.running],
            num_waiting=len(self.waiting),
            max_running=self.max_num_active_reqs,
            max_budget_tokens=self.max_num_scheduled_tokens,
            free_kv_tokens=UNLIMITED_TOKENS
            if self._stalled or not self.has_kv
            else free_tokens(pool.get_num_free_blocks(), self.block_size),
        )


def _cached_tokens(request: Any) -> int:
    """Prompt tokens that were in the prefix cache when the request began; 0 if it resumes."""
    return request.prefill_stats.num_cached_tokens if request.prefill_stats else 0


def _answer_tokens(request: Any) -> int | None:
    """Length of the whole answer, with the tokens of earlier runs; None if it was aborted."""
    if request.status not in _WHOLE_ANSWER:
        return None
    return qos_in_core(request).progress_tokens + int(request.num_output_tokens)


class PolicyScheduler(PolicyDriven, TimedScheduler):
    """vLLM's synchronous scheduler, driven by a policy."""


class AsyncPolicyScheduler(PolicyDriven, AsyncTimedScheduler):
    """vLLM's asynchronous scheduler, driven by a policy."""
