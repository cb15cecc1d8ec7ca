"""Number of a request's tokens that fit into an iteration (ConServe §4.2, `can_schedule`)."""

from dataclasses import dataclass

from shared.contracts.base import Seconds
from solver.scheduling.engine.latency import LatencyTable


@dataclass(slots=True)
class PlannedBatch:
    """Work that is planned for an iteration so far."""

    tokens: int = 0
    pairs: float = 0.0
    context_tokens: int = 0

    def add(self, tokens: int, before_tokens: int) -> None:
        """Add *tokens* of a prefill of which *before_tokens* are already computed."""
        self.tokens += tokens
        self.pairs += tokens * (before_tokens + tokens / 2)
        self.context_tokens += before_tokens

    def duration_s(self, latency: LatencyTable) -> Seconds:
        return latency.predict_s(self.tokens, self.pairs, self.context_tokens)


def admissible_tokens(
    latency: LatencyTable,
    batch: PlannedBatch,
    *,
    before_tokens: int,
    wanted_tokens: int,
    limit_s: Seconds,
) -> int:
    """
    Largest part of a prefill with which the iteration stays within a time limit.

    Args:
        batch: Content of the iteration so far, decodes included.
        before_tokens: Tokens of the request that are computed already.
        wanted_tokens: Maximum number of tokens.
        limit_s: Longest duration of the whole iteration; may be infinite.

    Returns:
        Tokens, 0 if even one token would be too many. Never falls as *limit_s* grows.

    Source: ConServe §4.2 `can_schedule(batch, req, TBT)`, algorithm 1.
    Decided: there is no minimum chunk. A rule like "at least 16 tokens" would permanently block a
    request with fewer tokens left.
    """
    wanted_tokens = min(wanted_tokens, latency.max_tokens - batch.tokens)
    room_s = limit_s - latency.context_s * (batch.context_tokens + before_tokens)
    room_s -= latency.pair_s * batch.pairs
    high = min(wanted_tokens, latency.tokens_within(room_s) - batch.tokens)
    if high <= 0:
        return 0
    # Attention of the most tokens that could fit gives a lower bound of the result.
    pair_s, tokens_s, base = latency.pair_s, latency.tokens_s, batch.tokens

    def spare_s(count: int) -> Seconds:
        return room_s - tokens_s[base + count] - pair_s * count * (before_tokens + count / 2)

    if spare_s(high) >= 0:
        return high
    attention_s = pair_s * high * (before_tokens + high / 2)
    low = max(0, latency.tokens_within(room_s - attention_s) - base)
    while low + 1 < high:
        middle = (low + high) // 2
        if spare_s(middle) >= 0:
            low = middle
        else:
            high = middle
    return low
