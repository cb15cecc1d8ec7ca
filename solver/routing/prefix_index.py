"""Assumed content of one instance's prefix cache."""

from collections import OrderedDict
from collections.abc import Sequence

_SHRINKS, _GROWS = 0.9, 1.01
"""Factors of the assumed capacity after a request that found less than assumed, or as much."""
_LEAST_SHARE = 0.02
"""Least share of the KV capacity that an engine full of running requests still keeps."""
_FOUND_SHARE = 0.5
"""Share of the assumed cached tokens that counts as found; allows for incomplete parts."""


class PrefixIndex:
    """
    Parts of prompts that an engine has computed, by least recent use, within its KV capacity.

    The engine reports three things: which prompts it computed, how much of each it found in its
    cache, and how many tokens its KV holds. Its cache evictions are inferred: running requests
    also need room, so the assumed capacity shrinks when less was found than assumed and recovers
    while as much as assumed is found.

    Decided: no log of stored and removed blocks, which vLLM could publish: blocks are identified by
    tokens, and a router sees text.

    Args:
        capacity_tokens: Capacity of the engine's KV.
    """

    def __init__(self, capacity_tokens: float) -> None:
        self._capacity_tokens = capacity_tokens
        self._share = 1.0
        self._parts: OrderedDict[int, float] = OrderedDict()
        """Tokens of each part, the least recently used first."""
        self._tokens = 0.0

    @property
    def assumed_tokens(self) -> float:
        """Assumed room of cached prefixes."""
        return self._capacity_tokens * self._share

    def __len__(self) -> int:
        return len(self._parts)

    def resize(self, capacity_tokens: float) -> None:
        """Set the reported token capacity of the engine's KV."""
        self._capacity_tokens = capacity_tokens
        self._evict()

    def store(self, prefix: Sequence[int], part_tokens: float) -> None:
        """Add a computed prompt; the parts furthest from its beginning are removed first."""
        part_tokens = max(1.0, part_tokens)  # Otherwise any number of them would fit.
        for part in reversed(prefix):
            self._tokens += part_tokens - self._parts.pop(part, 0.0)
            self._parts[part] = part_tokens
        self._evict()

    def matched_parts(self, prefix: Sequence[int]) -> int:
        """Number of parts from the beginning that are known; changes nothing."""
        for number, part in enumerate(prefix):
            if part not in self._parts:
                return number
        return len(prefix)

    def observe(self, thought_tokens: float, found_tokens: float) -> None:
        """Learn that a request found *found_tokens* where *thought_tokens* were assumed."""
        if thought_tokens <= 0:
            return
        found = found_tokens >= _FOUND_SHARE * thought_tokens
        share = self._share * (_GROWS if found else _SHRINKS)
        self._share = min(1.0, max(_LEAST_SHARE, share))
        self._evict()

    def clear(self) -> None:
        """Remove everything, because the engine restarted or has another model."""
        self._parts.clear()
        self._tokens = 0.0

    def _evict(self) -> None:
        while self._parts and self._tokens > self.assumed_tokens:
            _, tokens = self._parts.popitem(last=False)
            self._tokens -= tokens
