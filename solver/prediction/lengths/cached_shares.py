"""Shares of prompts that prefix caches have, by application."""

from collections import OrderedDict
from dataclasses import dataclass

_ENOUGH = 10
"""Number of requests of an application from which its share is used."""
_KEEP = 0.99
"""Weight of the sums before each request, so that a share follows the traffic of late."""


@dataclass(slots=True)
class _Sums:
    prompt: float = 0.0
    cached: float = 0.0
    count: int = 0


class CachedShares:
    """
    Share of the prompt tokens of an application that prefix caches had when requests began.

    What one conversation has in a cache is not known here: its requests have the share of all.

    Args:
        max_applications: Maximum number of applications with a share, because clients choose their
            names; the application without a request for longest is forgotten first.
    """

    def __init__(self, *, max_applications: int = 1000) -> None:
        self._max_applications = max_applications
        self._sums: OrderedDict[str, _Sums] = OrderedDict()

    def observe(self, application: str, *, prompt_tokens: int, cached_tokens: int) -> None:
        """Learn from a request that has begun."""
        sums = self._sums.setdefault(application, _Sums())
        self._sums.move_to_end(application)
        if len(self._sums) > self._max_applications:
            self._sums.popitem(last=False)
        sums.prompt = _KEEP * sums.prompt + prompt_tokens
        sums.cached = _KEEP * sums.cached + min(prompt_tokens, max(0, cached_tokens))
        sums.count += 1

    def share(self, application: str) -> float:
        """Expected share of a prompt of *application*, 0..1; 0 while too few have begun."""
        sums = self._sums.get(application)
        if sums is None or sums.count < _ENOUGH or not sums.prompt:
            return 0.0
        return sums.cached / sums.prompt

    def shares(self) -> dict[str, float]:
        """Share of each application that has one above 0."""
        return {name: share for name in self._sums if (share := self.share(name)) > 0}


def expected_cached_tokens(share: float, prompt_tokens: int) -> int:
    """Tokens of a prompt that a prefix cache is expected to have; the last one is computed."""
    return min(max(0, prompt_tokens - 1), int(share * prompt_tokens))
