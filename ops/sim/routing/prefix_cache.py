"""Content of an engine's prefix cache: the least recently used prefixes are dropped first."""

from collections import OrderedDict

from ops.sim.routing.workload import RoutedArrival

BLOCK_TOKENS = 16
"""Number of tokens in a block; only whole blocks are shared."""


class PrefixCache:
    """Cached contexts by key, in KV memory that running requests do not use."""

    def __init__(self) -> None:
        self._contexts: OrderedDict[str, int] = OrderedDict()
        self._tokens = 0

    def match_tokens(self, request: RoutedArrival) -> int:
        """
        Number of tokens of the longest cached prefix, in whole blocks; always less than the prompt.
        """
        most = request.arrival.prompt_tokens - 1
        held = max(
            (min(tokens, self._contexts.get(key, 0)) for key, tokens in request.prefixes),
            default=0,
        )
        return min(held, most) // BLOCK_TOKENS * BLOCK_TOKENS

    def use(self, request: RoutedArrival) -> int:
        """Return `match_tokens` of the request, and mark its prefixes as most recently used."""
        for key, _ in request.prefixes:
            if key in self._contexts:
                self._contexts.move_to_end(key)
        return self.match_tokens(request)

    def store(self, request: RoutedArrival, context_tokens: int) -> None:
        """Store the context of *request*, with *context_tokens* tokens, and its prefixes."""
        self._put(request.stores, context_tokens)
        for key, tokens in request.prefixes:
            if key != request.stores:
                self._put(key, tokens)

    def shrink(self, room_tokens: int) -> None:
        """Drop least recently used contexts until at most *room_tokens* are cached."""
        while self._tokens > max(0, room_tokens) and self._contexts:
            _, tokens = self._contexts.popitem(last=False)
            self._tokens -= tokens

    def _put(self, key: str, tokens: int) -> None:
        self._tokens += tokens - self._contexts.get(key, 0)
        self._contexts[key] = tokens
        self._contexts.move_to_end(key)
