"""One request inside the simulated engine."""

from dataclasses import dataclass, field

from services.agent.backends.base import EngineRequest
from services.agent.backends.host_index import BlockHash
from services.agent.backends.simulated.tokens import TokenSource
from shared.contracts.base import RequestId
from shared.contracts.requests import FinishReason, Tokens


@dataclass(slots=True, kw_only=True, eq=False)
class Run:
    """
    Tokens, KV and progress of a request; implements
    `solver.scheduling.engine.decision.RunningView`.

    Written by the engine core only.
    """

    request_id: RequestId
    tokens: list[int]
    """Tokens of the prompt, of the progress, and of this run's output."""
    num_prefill_tokens: int
    """
    Tokens to compute before the run generates its next token; after a preemption, all tokens of the
    run.
    """
    room_tokens: int
    """Tokens that this run may generate."""
    request: EngineRequest
    stops: Tokens
    source: TokenSource
    best_effort: bool = False
    """True if the request has no target."""
    ended: bool = False
    """True after the run finished or was aborted."""
    num_computed_tokens: int = 0
    num_output_tokens: int = 0
    cached_tokens: int | None = None
    """Prefix-cache hit at first admission, in tokens; None after it was reported."""
    blocks: list[int] = field(default_factory=list)
    hashes: list[BlockHash] = field(default_factory=list)
    """Hashes of the run's full KV blocks so far."""
    num_saved: int = 0
    """Number of blocks with a host copy, counted since KV was last allocated for the run."""

    @property
    def is_prefill(self) -> bool:
        return self.num_computed_tokens < self.num_prefill_tokens

    def preempt(self) -> None:
        """Mark all tokens of the run as not computed; the generated tokens remain."""
        self.num_prefill_tokens = len(self.tokens)
        self.num_computed_tokens = self.num_saved = 0
        self.blocks.clear()

    def generate(self) -> tuple[Tokens, FinishReason | None]:
        """
        Generate the run's next token; the output has a finish reason if the token is the last.

        Runs of a pooling model end without a token.
        """
        if self.request.input_lengths:
            return (), FinishReason.STOP
        index = len(self.request.progress) + self.num_output_tokens
        may_stop = index >= self.request.sampling.min_tokens
        token = self.source.next(may_stop=may_stop)
        self.tokens.append(token)
        self.num_output_tokens += 1
        if may_stop and token in self.stops:
            return (token,), FinishReason.STOP
        if self.num_output_tokens >= self.room_tokens:
            return (token,), FinishReason.LENGTH
        return (token,), None
