"""Requests for a routed mesh as real prompts; prompts share the tokens of the trace's prefixes."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from zlib import crc32

from ops.sim.routing.workload import RoutedArrival
from shared.contracts.base import ModelName
from shared.contracts.ingress import InferenceRequest
from shared.contracts.requests import Tokens

_FIRST, _NUM_IDS = 10, 480
"""First token id that is not special in every tiny model, and number of ids from it on."""


@dataclass(slots=True)
class Prompts:
    """
    Prompts for arrivals of `RoutedTraffic`: arrivals with equal keys get equal prefixes.

    A conversation's next prompt contains the answers so far; generated tokens replace an answer
    that is missing.
    """

    model: ModelName
    _contexts: dict[str, Tokens] = field(default_factory=dict)

    def request(self, number: int, asked: RoutedArrival) -> InferenceRequest:
        """The request that a producer publishes: greedy, with the answer length of the trace."""
        tokens = asked.arrival.prompt_tokens
        prompt = self._prefix(asked)[: tokens - 1]
        own = _stream(f"request {number}", tokens - len(prompt))
        self._contexts[asked.stores] = prompt + own
        return InferenceRequest(
            model=self.model,
            prompt=prompt + own,
            max_tokens=asked.arrival.output_tokens,
            temperature=0.0,
            ignore_eos=True,
            slo=asked.arrival.slo,
            tenant=asked.tenant,
        )

    def answered(self, asked: RoutedArrival, prompt: Tokens, answer: Sequence[int]) -> None:
        """
        Add the answer to the conversation's context, unless the conversation continued without the
        answer.
        """
        if self._contexts.get(asked.stores) == prompt:
            self._contexts[asked.stores] = prompt + tuple(answer)

    def _prefix(self, asked: RoutedArrival) -> Tokens:
        """Tokens of the longest shared prefix; the shorter shared prefixes are its beginnings."""
        prefix: Tokens = ()
        for key, tokens in reversed(asked.prefixes):
            known = self._contexts.get(key, prefix)
            prefix = (known + _stream(key, max(0, tokens - len(known))))[:tokens]
        return prefix


def _stream(key: str, count: int) -> Tokens:
    """Generate *count* pseudo-random tokens, determined by *key*."""
    state, found = crc32(key.encode()), []
    for _ in range(count):
        state = (1103515245 * state + 12345) % 2**31
        found.append(_FIRST + (state >> 8) % _NUM_IDS)
    return tuple(found)
