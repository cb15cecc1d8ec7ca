"""Online and offline work in one engine without a latency model: ConServe's baselines (§6.1)."""

from collections.abc import Iterator

from shared.contracts.base import RequestId, UnixTime
from shared.contracts.qos import QosClass
from solver.scheduling.baselines import FixedChunk, SortKey
from solver.scheduling.engine.decision import (
    BatchState,
    IterationDecision,
    RequestView,
    RunningView,
)
from solver.scheduling.engine.preemption import shared_cap

_BLOCK_TOKENS = 16


def _online_first(request: RequestView) -> SortKey:
    return float(_is_offline(request)), request.arrived_at


def _is_offline(request: RequestView) -> bool:
    return request.slo.qos_class is QosClass.BEST_EFFORT


class NonPreemptive(FixedChunk):
    """
    Online requests start first; offline requests that have started run to their end.

    Source: ConServe §6.1 *Non-Preemptive*: the highest offline throughput, ignoring latency.
    vLLM's priority order without preemption.

    Args:
        token_budget: Tokens per iteration.
    """

    def __init__(self, token_budget: int) -> None:
        super().__init__(token_budget, _online_first)


class SarathiPreemptive(FixedChunk):
    """
    Fixed chunks in which online prefills precede offline prefills; offline requests lose KV to
    online requests.

    Source: ConServe §3.2 and §6.1 *Sarathi-Preemptive*: chunked prefill with priorities and
    preemption under memory pressure.
    Decided: the latest offline request is preempted first, as vLLM does. Offline prefills pause
    while online ones need the chunk.

    Args:
        token_budget: Tokens per iteration.
    """

    def __init__(self, token_budget: int) -> None:
        super().__init__(token_budget, _online_first)
        self._offline: dict[RequestId, int] = {}
        """Offline requests -> their numbers in the order of arrival at this engine."""
        self._prompts: dict[RequestId, int] = {}
        """Number of prompt tokens of each online request."""

    def add(self, request: RequestView) -> None:
        super().add(request)
        if _is_offline(request):
            self._offline[request.request_id] = self._num_added
        else:
            self._prompts[request.request_id] = request.prompt_tokens

    def remove(self, request_id: RequestId, answer_tokens: int | None = None) -> None:
        super().remove(request_id, answer_tokens)
        self._offline.pop(request_id, None)
        self._prompts.pop(request_id, None)

    def decide(self, now: UnixTime, batch: BatchState) -> IterationDecision:
        decision = super().decide(now, batch)
        decodes = [run for run in batch.running if not run.is_prefill]
        offline = [run for run in batch.running if run.request_id in self._offline]
        waiting = list(self._waiting_online())
        victims = self._victims(batch, decodes, offline, waiting)
        budget = max(0, decision.token_budget - len(decodes))
        online = [
            run.num_prefill_tokens - run.num_computed_tokens
            for run in batch.running
            if run.is_prefill and run.request_id not in self._offline
        ]
        online += [self._prompts[request_id] for request_id in waiting]
        prefills = [run for run in offline if run.is_prefill and run.request_id not in victims]
        cap = None
        if sum(online) >= budget:
            held = frozenset(run.request_id for run in prefills)
        else:
            held = frozenset()
            rest = [run.num_prefill_tokens - run.num_computed_tokens for run in prefills]
            cap = shared_cap([*online, *rest], budget) if online else None
        return IterationDecision(
            order=decision.order,
            token_budget=decision.token_budget,
            per_request_cap=cap,
            held=held,
            preempted=victims,
        )

    def _waiting_online(self) -> Iterator[RequestId]:
        for request_id in self._in_order():
            if request_id in self._offline:
                return
            yield request_id

    def _victims(
        self,
        batch: BatchState,
        decodes: list[RunningView],
        offline: list[RunningView],
        waiting: list[RequestId],
    ) -> frozenset[RequestId]:
        """
        Offline requests to preempt, so that waiting online requests and running decodes get KV.
        """
        blocks = sum(run.num_computed_tokens % _BLOCK_TOKENS == 0 for run in decodes)
        needed = _BLOCK_TOKENS * blocks - batch.free_kv_tokens
        needed += sum(self._prompts[request_id] + _BLOCK_TOKENS for request_id in waiting)
        needed += sum(
            run.num_prefill_tokens - run.num_computed_tokens
            for run in batch.running
            if run.is_prefill and run.request_id not in self._offline
        )
        victims = set()
        for run in sorted(offline, key=lambda run: -self._offline[run.request_id]):
            if needed <= 0:
                break
            victims.add(run.request_id)
            needed -= run.num_computed_tokens
        return frozenset(victims)
