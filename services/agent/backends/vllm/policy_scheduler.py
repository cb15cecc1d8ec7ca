"""
A `solver.scheduling` policy inside stock vLLM's engine core.

The policy decides order, token budget, who rests and who gives up KV; vLLM does the rest as it
always does. The interfaces used here are private to vLLM; the contract suite fails when they
change.
"""

import time
from dataclasses import dataclass
from typing import Any

from services.agent.backends.vllm.policy_queue import PolicyQueue
from services.agent.backends.vllm.qos import read_qos
from services.agent.backends.vllm.scheduler import CONFIG_KEY, TimedScheduler
from shared.contracts.base import RequestId
from shared.contracts.telemetry import Iteration
from solver.scheduling.baselines import FixedChunkEdf, FixedChunkFcfs
from solver.scheduling.decision import (
    BatchState,
    IterationDecision,
    IterationOutcome,
    RequestView,
    SchedulingPolicy,
)

POLICIES = {"fcfs": FixedChunkFcfs, "edf": FixedChunkEdf}


@dataclass(frozen=True, slots=True)
class _Running:
    """A vLLM request as a policy sees it."""

    request: Any

    @property
    def request_id(self) -> RequestId:
        return RequestId(self.request.request_id)

    @property
    def num_prefill_tokens(self) -> int:
        # After a preemption the generated tokens are computed again, too.
        return int(self.request.num_tokens if self.is_prefill else self.request.num_prompt_tokens)

    @property
    def num_computed_tokens(self) -> int:
        return int(self.request.num_computed_tokens)

    @property
    def num_output_tokens(self) -> int:
        return int(self.request.num_output_tokens)

    @property
    def is_prefill(self) -> bool:
        return _is_prefill(self.request)


class PolicyScheduler(TimedScheduler):
    """Applies one policy decision in each iteration. For synchronous scheduling."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        name = self.vllm_config.additional_config[CONFIG_KEY]["policy"]
        self._policy: SchedulingPolicy = POLICIES[name](self._largest_budget)
        self.waiting = PolicyQueue()
        self.running: list[Any]  # vLLM's, untyped
        self._held: list[Any] = []
        self._preempted: dict[RequestId, None] = {}

    def add_request(self, request: Any) -> None:
        super().add_request(request)
        qos = read_qos(request.sampling_params.extra_args)
        self._policy.add(
            RequestView(
                request_id=request.request_id,
                arrived_at=qos.arrived_at or request.arrival_time,
                prompt_tokens=request.num_prompt_tokens,
                max_tokens=request.max_tokens,
                slo=qos.slo,
                importance=qos.importance,
            )
        )

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        output = super().schedule(*args, **kwargs)
        self.running.extend(self._held)
        self._held = []
        return output

    def apply_limits(self) -> None:
        super().apply_limits()
        decision = self._policy.decide(time.time(), self._batch())
        self._preempt(decision)
        self._held = [
            request
            for request in self.running
            if request.request_id in decision.held and _is_prefill(request)
        ]
        resting = {request.request_id for request in self._held}
        # Decodes first: they always get their token, and the last loses its KV first.
        self.running = sorted(
            (request for request in self.running if request.request_id not in resting),
            key=_is_prefill,
        )
        self.waiting.begin(decision.order)
        self.max_num_scheduled_tokens = max(
            1, min(decision.token_budget, self.max_num_scheduled_tokens)
        )
        self.max_num_active_reqs = max(0, self.max_num_active_reqs - len(self._held))
        self.scheduler_config.long_prefill_token_threshold = decision.per_request_cap or 0

    def on_iteration(self, iteration: Iteration) -> None:
        # What was admitted and ended in one iteration is no longer known to the policy.
        self._policy.observe(
            time.time(),
            IterationOutcome(
                iteration=iteration,
                admitted=tuple(name for name in self.waiting.popped if name in self.requests),
                preempted=tuple(name for name in self._preempted if name in self.requests),
            ),
        )
        self._preempted.clear()

    def _preempt(self, decision: IterationDecision) -> None:
        for request in [r for r in self.running if r.request_id in decision.preempted]:
            self.running.remove(request)
            self._preempt_request(request, time.monotonic())
            self.prev_step_scheduled_req_ids.discard(request.request_id)

    def _preempt_request(self, request: Any, *args: Any, **kwargs: Any) -> None:
        super()._preempt_request(request, *args, **kwargs)
        self._preempted[request.request_id] = None

    def _free_request(self, request: Any, *args: Any, **kwargs: Any) -> Any:
        self._policy.remove(request.request_id)
        return super()._free_request(request, *args, **kwargs)

    def _batch(self) -> BatchState:
        pool = self.kv_cache_manager.block_pool
        return BatchState(
            running=[_Running(request) for request in self.running],
            num_waiting=len(self.waiting),
            max_running=self.max_num_active_reqs,
            max_budget_tokens=self.max_num_scheduled_tokens,
            free_kv_tokens=pool.get_num_free_blocks() * self.block_size,
        )


def _is_prefill(request: Any) -> bool:
    """More than the next token is to be computed, or nothing was generated yet."""
    return bool(
        request.num_output_tokens == 0 or request.num_computed_tokens < request.num_tokens - 1
    )
