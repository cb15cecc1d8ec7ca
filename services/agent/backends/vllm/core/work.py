"""
The work of iterations in an engine core, and its requests in the form that policies read.

Imports no vLLM.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from shared.contracts.base import RequestId, Seconds
from shared.contracts.telemetry import EngineIteration
from solver.prediction.latency.iteration_fit import IterationWork


class ScheduledWork(NamedTuple):
    """The work of one iteration, created in `schedule` and used in `update_from_output`."""

    begun: float
    """Start time, by the performance counter."""
    tokens: int
    pairs: float
    context_tokens: int
    num_decodes: int
    cut: bool = False
    """
    True if part of the iteration was dropped. This record is then the remaining part, which began
    at the preemption.
    """

    def work(self) -> IterationWork:
        """The work as input of latency models."""
        return IterationWork(self.tokens, self.pairs, self.context_tokens)

    def iteration(self, duration_s: Seconds) -> EngineIteration:
        """Telemetry record of the iteration."""
        return EngineIteration(
            compute_tokens=self.tokens,
            context_tokens=self.context_tokens,
            num_decodes=self.num_decodes,
            duration_s=duration_s,
            prefill_pairs=self.pairs,
        )


class RunningRequest(NamedTuple):
    """
    A vLLM request in the form that policies read: `solver.scheduling.engine.decision.RunningView`.
    """

    request_id: RequestId
    num_prefill_tokens: int
    num_computed_tokens: int
    num_output_tokens: int
    is_prefill: bool


def is_prefill(request: Any) -> bool:
    """True if tokens before the next output token remain to be computed after this iteration."""
    return bool(request.num_computed_tokens < request.headway_prefill_tokens)


def running_request(request: Any) -> RunningRequest:
    """
    A running vLLM request in its state after all scheduled iterations.

    With asynchronous scheduling, tokens in flight count as computed and as generated, since they
    are complete when the next iteration begins.
    """
    return RunningRequest(
        request_id=request.request_id,
        num_prefill_tokens=request.headway_prefill_tokens,
        num_computed_tokens=request.num_computed_tokens,
        num_output_tokens=request.num_output_tokens + request.num_output_placeholders,
        is_prefill=is_prefill(request),
    )


def work_of(
    num_scheduled: Mapping[str, int], requests: Mapping[str, Any], begun: float
) -> ScheduledWork:
    """Work of an iteration that `schedule` has already counted as computed."""
    tokens = context = decodes = 0
    pairs = 0.0
    for request_id, count in num_scheduled.items():
        request = requests[request_id]
        before = request.num_computed_tokens - count
        tokens += count
        context += before
        if before < request.headway_prefill_tokens:
            pairs += count * (before + count / 2)
        else:
            decodes += 1
    return ScheduledWork(begun, tokens, pairs, context, decodes)
