"""
Medha's adaptive chunks, which shrink as the computed prompt grows, for a constant iteration time.
"""

from shared.contracts.base import RequestId, Seconds, UnixTime
from solver.scheduling.baselines import FixedChunkFcfs
from solver.scheduling.engine.admission import PlannedBatch, admissible_tokens
from solver.scheduling.engine.decision import (
    BatchState,
    IterationDecision,
    IterationOutcome,
    RequestView,
)
from solver.scheduling.engine.latency import LatencyTable


class ShrinkingChunk:
    """
    First come first served; each iteration has the most tokens that keep it within a fixed time.

    Source: Medha's adaptive chunking as QoServe §4.5.1 describes it: it considers latency but not
    slack, so time saved by early iterations stays unused.

    Args:
        limit_s: Time of an iteration: the strictest TBT target.
        max_chunk_tokens: Maximum tokens of an iteration.
    """

    def __init__(
        self, latency: LatencyTable, *, limit_s: Seconds, max_chunk_tokens: int = 2048
    ) -> None:
        self._latency = latency
        self._limit_s = limit_s
        self._max_chunk_tokens = max_chunk_tokens
        self._queue = FixedChunkFcfs(max_chunk_tokens)

    def add(self, request: RequestView) -> None:
        self._queue.add(request)

    def remove(self, request_id: RequestId, answer_tokens: int | None = None) -> None:
        self._queue.remove(request_id, answer_tokens)

    def observe(self, now: UnixTime, outcome: IterationOutcome) -> None:
        self._queue.observe(now, outcome)

    def decide(self, now: UnixTime, batch: BatchState) -> IterationDecision:
        planned = PlannedBatch()
        before_tokens = 0
        for run in reversed(batch.running):
            if run.is_prefill:
                before_tokens = run.num_computed_tokens
            else:
                planned.tokens += 1
                planned.context_tokens += run.num_computed_tokens
        chunk = admissible_tokens(
            self._latency,
            planned,
            before_tokens=before_tokens,
            wanted_tokens=min(self._max_chunk_tokens, batch.max_budget_tokens) - planned.tokens,
            limit_s=self._limit_s,
        )
        return IterationDecision(
            order=self._queue.decide(now, batch).order,
            # At least one prefill token is computed, so that prefills also end while decodes alone
            # exceed the time limit.
            token_budget=planned.tokens + max(1, chunk),
        )
