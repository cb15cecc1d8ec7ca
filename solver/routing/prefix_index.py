"""Assumed content of one instance's prefix cache."""

from collections import OrderedDict
from collections.abc import Sequence

_SHRINKS, _GROWS = 0.9, 1.01
"""
Factors of the assumed cache capacity: the first if fewer tokens were cached than assumed, else the
second.
"""
_LEAST_SHARE = 0.02
"""Least share of the KV capacity that is assumed to hold cached prefixes."""
_FOUND_SHARE = 0.5
"""
Share of the tokens assumed to be cached from which the assumption counts as right, despite
incomplete parts.
"""


class PrefixIndex:
    """
    Parts of prompts that an engine is assumed to cache, dropped by least recent use.

    The engine reports its computed prompts, the cached tokens of each prompt, and its KV capacity.
    Evictions from its cache are inferred: running requests also need room, so the assumed capacity
    shrinks when fewer tokens were cached than assumed, and recovers otherwise.

    Decided: vLLM's events of stored and removed blocks are not used, because they identify blocks
    by tokens, and a router has only text.

    Args:
        capacity_tokens: Capacity of the engine's KV.
    """

    def __init__(self, capacity_tokens: float) -> None:
        self._capacity_tokens = capacity_tokens
        self._share = 1.0
        self._parts: OrderedDict[int, float] = OrderedDict()
        """Number of tokens of each cached part, the least recently used part first."""
        self._tokens = 0.0

    @property
    def assumed_tokens(self) -> float:
        """Assumed capacity of the engine's cache for prefixes, in tokens."""
        return self._capacity_tokens * self._share

    def __len__(self) -> int:
        return len(self._parts)

    def resize(self, capacity_tokens: float) -> None:
        """Set the KV capacity that the engine reported."""
        self._capacity_tokens = capacity_tokens
        self._evict()

    def store(self, prefix: Sequence[int], part_tokens: float) -> None:
        """
        Add a computed prompt; if capacity is exceeded, the parts furthest from the beginning are
        removed first.
        """
        part_tokens = max(1.0, part_tokens)  # Parts of zero tokens would never fill the cache.
        for part in reversed(prefix):
            self._tokens += part_tokens - self._parts.pop(part, 0.0)
            self._parts[part] = part_tokens
        self._evict()

    def matched_parts(self, prefix: Sequence[int]) -> int:
        """Number of cached parts from the beginning of the prompt; does not count as a use."""
        for number, part in enumerate(prefix):
            if part not in self._parts:
                return number
        return len(prefix)

    def observe(self, expected_tokens: float, found_tokens: float) -> None:
        """
        Learn that *found_tokens* of a request were cached while *expected_tokens* were assumed to
        be cached.
        """
        if expected_tokens <= 0:
            return
        found = found_tokens >= _FOUND_SHARE * expected_tokens
        share = self._share * (_GROWS if found else _SHRINKS)
        self._share = min(1.0, max(_LEAST_SHARE, share))
        self._evict()

    def clear(self) -> None:
        """Remove all parts from the index, because the engine restarted or has another model."""
        self._parts.clear()
        self._tokens = 0.0

    def _evict(self) -> None:
        while self._parts and self._tokens > self.assumed_tokens:
            _, tokens = self._parts.popitem(last=False)
            self._tokens -= tokens
