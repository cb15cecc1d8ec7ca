"""KV memory and seats that one scheduling decision has left."""

from collections.abc import Iterable

from solver.scheduling.best_effort import freed_tokens
from solver.scheduling.decision import BatchState, RunningView
from solver.scheduling.entry import Entry

BLOCK_TOKENS = 16
"""KV comes in blocks: a request may need so much more than its tokens."""


class Room:
    """
    What may still begin, while the next tokens of decodes and all of running prefills are kept.

    Args:
        batch: Before the iteration.
        num_decodes: That are computed in it.
    """

    def __init__(self, batch: BatchState, num_decodes: int) -> None:
        self._tokens = batch.free_kv_tokens - num_decodes * BLOCK_TOKENS
        self._num_seats = batch.max_running - len(batch.running)
        self.missing_for_decodes = -self._tokens
        """KV tokens without which decodes cannot go on."""

    def keep(self, tokens: int) -> None:
        """A running prefill will need *tokens* more."""
        self._tokens -= tokens + BLOCK_TOKENS

    def fits(self, entry: Entry, *, reserve_tokens: int) -> bool:
        """Whether *entry* may begin and leave *reserve_tokens* to others."""
        needed = entry.prefill_tokens + BLOCK_TOKENS
        return self._num_seats > 0 and needed <= self._tokens - reserve_tokens

    def missing(self, entry: Entry) -> int:
        """KV tokens that *entry* lacks."""
        return entry.prefill_tokens + BLOCK_TOKENS - self._tokens

    def take(self, entry: Entry) -> None:
        """*entry* begins."""
        self._tokens -= entry.prefill_tokens + BLOCK_TOKENS
        self._num_seats -= 1

    def release(self, victims: Iterable[tuple[Entry, RunningView]]) -> None:
        """They give up what they hold."""
        for victim, run in victims:
            self._tokens += freed_tokens(victim, run)
            self._num_seats += 1
