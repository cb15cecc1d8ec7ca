"""What one instance's prefix cache is thought to hold."""

from collections import OrderedDict
from collections.abc import Sequence

_SHRINKS, _GROWS = 0.9, 1.01
"""Of the capacity believed in, for each request that found less, or as much as was thought."""
_LEAST_SHARE = 0.02
"""Of the KV capacity: what an engine that is full of running requests still keeps."""
_FOUND_SHARE = 0.5
"""Of the tokens thought to be cached; a part of a prompt that is not told apart is no less."""


class PrefixIndex:
    """
    Parts of prompts that an engine has computed, by least recent use, within its KV capacity.

    The engine itself tells three things: which prompts it computed, how much of each it found in
    its cache, and how many tokens its KV holds. What it throws away is inferred: running requests
    need room, too, so the capacity believed in shrinks when less was found than thought and
    recovers while as much was.

    Decided: no log of blocks stored and removed, which vLLM could tell: blocks are named by
    tokens, and a router sees text.

    Args:
        capacity_tokens: Of the engine's KV.
    """

    def __init__(self, capacity_tokens: float) -> None:
        self._capacity_tokens = capacity_tokens
        self._share = 1.0
        self._parts: OrderedDict[int, float] = OrderedDict()
        """Tokens of each, the least recently used first."""
        self._tokens = 0.0

    @property
    def believed_tokens(self) -> float:
        """Room that cached prefixes are thought to have."""
        return self._capacity_tokens * self._share

    def __len__(self) -> int:
        return len(self._parts)

    def resize(self, capacity_tokens: float) -> None:
        """The engine says how many tokens its KV holds."""
        self._capacity_tokens = capacity_tokens
        self._evict()

    def store(self, prefix: Sequence[int], part_tokens: float) -> None:
        """A prompt was computed; the parts furthest from its beginning are given up first."""
        part_tokens = max(1.0, part_tokens)  # Without, there would be room for any number of them.
        for part in reversed(prefix):
            self._tokens += part_tokens - self._parts.pop(part, 0.0)
            self._parts[part] = part_tokens
        self._evict()

    def matched_parts(self, prefix: Sequence[int]) -> int:
        """How many parts from the beginning are known; nothing changes."""
        for number, part in enumerate(prefix):
            if part not in self._parts:
                return number
        return len(prefix)

    def observe(self, thought_tokens: float, found_tokens: float) -> None:
        """A request was thought to find *thought_tokens* there, and found so many."""
        if thought_tokens <= 0:
            return
        found = found_tokens >= _FOUND_SHARE * thought_tokens
        share = self._share * (_GROWS if found else _SHRINKS)
        self._share = min(1.0, max(_LEAST_SHARE, share))
        self._evict()

    def clear(self) -> None:
        """The engine has another model, or began anew."""
        self._parts.clear()
        self._tokens = 0.0

    def _evict(self) -> None:
        while self._parts and self._tokens > self.believed_tokens:
            _, tokens = self._parts.popitem(last=False)
            self._tokens -= tokens
