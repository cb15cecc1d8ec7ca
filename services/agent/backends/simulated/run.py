"""One request inside the simulated engine."""

from dataclasses import dataclass, field

from services.agent.backends.host_index import BlockHash
from services.agent.backends.simulated.tokens import TokenSource
from shared.contracts.base import RequestId
from shared.contracts.requests import FinishReason, Tokens


@dataclass(slots=True, kw_only=True, eq=False)
class Run:
    """
    Tokens, KV and progress of a request; also a `solver.scheduling.decision.RunningView`.

    Only the engine core writes it.
    """

    request_id: RequestId
    tokens: list[int]
    """Prompt, progress, and what this run generated."""
    num_prefill_tokens: int
    """Tokens to compute before the next one is generated; all of them after a preemption."""
    room_tokens: int
    """Tokens that this run may generate."""
    num_tokens_before: int
    """Of the answer, from earlier runs."""
    min_tokens: int
    stops: Tokens
    source: TokenSource
    checkpointed: bool = False
    origin: str = ""
    """The request of which it is a run."""
    best_effort: bool = False
    """It has no target."""
    ended: bool = False
    """It finished or was aborted."""
    num_computed_tokens: int = 0
    num_output_tokens: int = 0
    cached_tokens: int | None = None
    """Prefix hit at first admission, until it was reported."""
    blocks: list[int] = field(default_factory=list)
    hashes: list[BlockHash] = field(default_factory=list)
    """Of the full blocks so far."""
    num_saved: int = 0
    """Blocks with a copy in host memory, since the run last got KV memory."""

    @property
    def is_prefill(self) -> bool:
        return self.num_computed_tokens < self.num_prefill_tokens

    def preempt(self) -> None:
        """All is to be computed again; what was generated stays."""
        self.num_prefill_tokens = len(self.tokens)
        self.num_computed_tokens = self.num_saved = 0
        self.blocks.clear()

    def generate(self) -> tuple[int, FinishReason | None]:
        """The next token of the answer, and why it is the last if it is."""
        index = self.num_tokens_before + self.num_output_tokens
        may_stop = index >= self.min_tokens
        token = self.source.next(may_stop=may_stop)
        self.tokens.append(token)
        self.num_output_tokens += 1
        if may_stop and token in self.stops:
            return token, FinishReason.STOP
        if self.num_output_tokens >= self.room_tokens:
            return token, FinishReason.LENGTH
        return token, None
