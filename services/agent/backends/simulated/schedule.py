"""An iteration of the simulated engine, while it is scheduled and while it runs."""

from collections.abc import Sequence
from dataclasses import dataclass

from msgspec import structs

from services.agent.backends.simulated.run import Run
from shared.contracts.base import RequestId, Seconds
from shared.contracts.estimates import LatencyCoefficients
from shared.contracts.requests import FinishReason, Tokens
from shared.contracts.telemetry import EngineIteration
from solver.prediction.latency.latency_model import predict_batch_s
from solver.scheduling.engine.decision import IterationDecision


@dataclass(frozen=True, slots=True)
class TokenOutput:
    """
    One generated token of one request, or none if the model pools; available when its iteration is
    over.
    """

    request_id: RequestId
    token_ids: Tokens
    finish_reason: FinishReason | None
    cached_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class IterationResult:
    """Result of one iteration; empty if the policy held all requests that could run."""

    duration_s: Seconds
    outputs: tuple[TokenOutput, ...]
    iteration: EngineIteration | None


class Schedule:
    """Scheduled requests with their token counts, within a budget."""

    def __init__(self, decision: IterationDecision, max_budget_tokens: int) -> None:
        self.decision = decision
        self.parts: list[tuple[Run, int]] = []
        self.budget_tokens = max(1, min(decision.token_budget, max_budget_tokens))

    def is_held(self, run: Run) -> bool:
        """True if the policy holds *run* in this iteration; a run that decodes is never held."""
        return run.is_prefill and run.request_id in self.decision.held

    def share(self, run: Run) -> int:
        """
        Number of tokens that *run* may compute within the remaining token budget of the iteration.
        """
        count = min(len(run.tokens) - run.num_computed_tokens, self.budget_tokens)
        cap = self.decision.per_request_cap
        return count if cap is None or not run.is_prefill else min(count, max(1, cap))

    def take(self, run: Run, count: int) -> None:
        """Schedule *count* tokens of *run*, for which KV is already allocated."""
        self.parts.append((run, count))
        self.budget_tokens -= count


@dataclass(slots=True)
class Pass:
    """An iteration in progress; its results become valid when the iteration is over."""

    parts: list[tuple[Run, int]]
    latency: LatencyCoefficients
    copy_s: Seconds = 0.0
    """Time of the KV copies that precede the iteration."""

    def iteration(self) -> EngineIteration:
        """Telemetry record of the iteration; its duration is zero if nothing is computed."""
        computed = iteration_of(self.parts, self.latency)
        if not self.parts:
            return computed
        return structs.replace(computed, duration_s=computed.duration_s + self.copy_s)

    @property
    def offline_tokens(self) -> int:
        """Number of scheduled tokens of requests without targets."""
        return sum(count for run, count in self.parts if run.best_effort)

    def drop_offline(self) -> int:
        """
        Remove the best-effort requests from the iteration; return the number of their scheduled
        tokens.

        The engine then computes the other requests again from the first layer, as vLLM does.
        """
        dropped = self.offline_tokens
        self.parts = [(run, count) for run, count in self.parts if not run.best_effort]
        return dropped


def iteration_of(parts: Sequence[tuple[Run, int]], latency: LatencyCoefficients) -> EngineIteration:
    """Predicted telemetry record of an iteration that computes *parts*."""
    compute_tokens = sum(count for _, count in parts)
    context_tokens = sum(run.num_computed_tokens for run, _ in parts)
    prefill_pairs = sum(
        count * (run.num_computed_tokens + count / 2) for run, count in parts if run.is_prefill
    )
    duration_s = predict_batch_s(
        latency,
        compute_tokens=compute_tokens,
        context_tokens=context_tokens,
        prefill_pairs=prefill_pairs,
    )
    return EngineIteration(
        compute_tokens=compute_tokens,
        context_tokens=context_tokens,
        num_decodes=sum(not run.is_prefill for run, _ in parts),
        duration_s=duration_s if parts else 0.0,
        prefill_pairs=prefill_pairs,
    )
