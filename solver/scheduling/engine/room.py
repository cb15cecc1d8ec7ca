"""KV memory and running slots that one scheduling decision has left."""

from collections.abc import Iterable

from solver.scheduling.engine.best_effort import freed_tokens
from solver.scheduling.engine.decision import BatchState, RunningView
from solver.scheduling.engine.entry import Entry

BLOCK_TOKENS = 16
"""KV is allocated in blocks: a request may need up to one block more than its tokens."""


class Room:
    """
    Room for new requests after reserving that of running prefills and the decodes' next tokens.

    Args:
        batch: State before the iteration.
        num_decodes: Decodes computed in the iteration.
    """

    def __init__(self, batch: BatchState, num_decodes: int) -> None:
        self._tokens = batch.free_kv_tokens - num_decodes * BLOCK_TOKENS
        self._num_seats = batch.max_running - len(batch.running)
        self.missing_for_decodes = -self._tokens
        """KV tokens that decodes lack to continue."""

    def keep(self, tokens: int) -> None:
        """Reserve *tokens* that a running prefill will need."""
        self._tokens -= tokens + BLOCK_TOKENS

    def fits(self, entry: Entry, *, reserve_tokens: int) -> bool:
        """Return whether *entry* may begin and leaves *reserve_tokens* free for other requests."""
        needed = entry.prefill_tokens + BLOCK_TOKENS
        return self._num_seats > 0 and needed <= self._tokens - reserve_tokens

    def missing(self, entry: Entry) -> int:
        """KV tokens that *entry* lacks."""
        return entry.prefill_tokens + BLOCK_TOKENS - self._tokens

    def take(self, entry: Entry) -> None:
        """Allocate the room of *entry*, which begins."""
        self._tokens -= entry.prefill_tokens + BLOCK_TOKENS
        self._num_seats -= 1

    def release(self, victims: Iterable[tuple[Entry, RunningView]]) -> None:
        """Free what *victims* hold."""
        for victim, run in victims:
            self._tokens += freed_tokens(victim, run)
            self._num_seats += 1
