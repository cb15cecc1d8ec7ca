"""What one iteration computes, while it is being put together."""

from services.agent.backends.simulated.run import Run
from shared.contracts.estimates import LatencyCoefficients
from shared.contracts.telemetry import Iteration
from solver.prediction.latency_model import predict_s
from solver.scheduling.decision import IterationDecision


class Schedule:
    """Requests with the tokens that each of them computes, within a budget."""

    def __init__(self, decision: IterationDecision, max_budget_tokens: int) -> None:
        self.decision = decision
        self.parts: list[tuple[Run, int]] = []
        self.budget_tokens = max(1, min(decision.token_budget, max_budget_tokens))
        self._compute_tokens = 0
        self._context_tokens = 0
        self._num_decodes = 0

    def is_held(self, run: Run) -> bool:
        """The policy lets *run* rest; decodes never do."""
        return run.is_prefill and run.request_id in self.decision.held

    def share(self, run: Run) -> int:
        """Tokens that *run* may compute of what is left."""
        count = min(len(run.tokens) - run.num_computed_tokens, self.budget_tokens)
        cap = self.decision.per_request_cap
        return count if cap is None or not run.is_prefill else min(count, max(1, cap))

    def take(self, run: Run, count: int) -> None:
        """*run* computes *count* tokens; its memory is allocated."""
        self.parts.append((run, count))
        self.budget_tokens -= count
        self._compute_tokens += count
        self._context_tokens += run.num_computed_tokens
        self._num_decodes += not run.is_prefill

    def iteration(self, latency: LatencyCoefficients) -> Iteration:
        """The iteration as telemetry reports it; takes no time if it computes nothing."""
        duration_s = predict_s(
            latency, compute_tokens=self._compute_tokens, context_tokens=self._context_tokens
        )
        return Iteration(
            compute_tokens=self._compute_tokens,
            context_tokens=self._context_tokens,
            num_decodes=self._num_decodes,
            duration_s=duration_s if self.parts else 0.0,
        )
