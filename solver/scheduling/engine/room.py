"""KV tokens and running slots that are left during one scheduling decision."""

from collections.abc import Iterable

from solver.scheduling.engine.best_effort import freed_tokens
from solver.scheduling.engine.decision import BatchState, RunningView
from solver.scheduling.engine.entry import Entry

BLOCK_TOKENS = 16
"""Tokens of a KV block; a request may need up to one block more than its number of tokens."""


class Room:
    """
    KV and running slots for new requests; KV for running prefills and for the next tokens of
    decodes is reserved.

    Args:
        batch: State before the iteration.
        num_decodes: Decodes computed in the iteration.
    """

    def __init__(self, batch: BatchState, num_decodes: int) -> None:
        self._tokens = batch.free_kv_tokens - num_decodes * BLOCK_TOKENS
        self._num_seats = batch.max_running - len(batch.running)
        self.missing_for_decodes = -self._tokens
        """Number of KV tokens that are missing for the next tokens of decodes."""

    def keep(self, tokens: int) -> None:
        """Reserve *tokens* of KV that a running prefill will need."""
        self._tokens -= tokens + BLOCK_TOKENS

    def fits(self, entry: Entry, *, reserve_tokens: int) -> bool:
        """Return True if *entry* may begin and leaves *reserve_tokens* of KV free."""
        needed = entry.prefill_tokens + BLOCK_TOKENS
        return self._num_seats > 0 and needed <= self._tokens - reserve_tokens

    def missing(self, entry: Entry) -> int:
        """Number of KV tokens that are missing for *entry* to begin."""
        return entry.prefill_tokens + BLOCK_TOKENS - self._tokens

    def take(self, entry: Entry) -> None:
        """Take a running slot and KV for *entry*, which begins."""
        self._tokens -= entry.prefill_tokens + BLOCK_TOKENS
        self._num_seats -= 1

    def release(self, victims: Iterable[tuple[Entry, RunningView]]) -> None:
        """Free the running slots and the KV of *victims*."""
        for victim, run in victims:
            self._tokens += freed_tokens(victim, run)
            self._num_seats += 1
