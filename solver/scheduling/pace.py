"""How fast the engine is at present, learnt from its iterations."""

from shared.contracts.base import Seconds, UnixTime
from shared.contracts.telemetry import Iteration
from solver.scheduling.eager_relegation import will_violate
from solver.scheduling.entry import Entry
from solver.scheduling.latency import LatencyTable

_SMOOTHING = 0.05
_LEARN_TOKENS = 64
"""Iterations with fewer prefill tokens say little about the time of one."""
_STALL_FACTOR = 10.0
"""What takes so many times what it should, or usually does, has stood still."""


class EnginePace:
    """
    Time of a prefill token and of an iteration, as moving averages.

    They begin as the latency model has them, which counts as one iteration.

    Args:
        latency: Of the engine; may be replaced by a better one.
        chunk_tokens: Chunk that the first estimates assume.
    """

    def __init__(self, latency: LatencyTable, *, chunk_tokens: int) -> None:
        self.latency = latency
        self.iteration_s: Seconds = latency.predict_s(chunk_tokens, chunk_tokens**2 / 2, 0)
        self.token_s: Seconds = self.iteration_s / chunk_tokens
        self._num_iterations = 1
        self._num_prefills = 1

    def observe(self, iteration: Iteration) -> None:
        """An iteration took place."""
        if iteration.duration_s <= 0:
            return
        duration_s = self._without_stall_s(iteration)
        self._num_iterations += 1
        self.iteration_s += _share(self._num_iterations) * (duration_s - self.iteration_s)
        prefill_tokens = iteration.compute_tokens - iteration.num_decodes
        if prefill_tokens >= _LEARN_TOKENS:
            self._num_prefills += 1
            token_s = duration_s / prefill_tokens
            self.token_s += _share(self._num_prefills) * (token_s - self.token_s)

    def _without_stall_s(self, iteration: Iteration) -> Seconds:
        """Its duration; bounded, since a host that stood still is not slow when it goes on."""
        usual_s = _STALL_FACTOR * self.iteration_s
        if iteration.duration_s <= usual_s:
            return iteration.duration_s
        tokens, context = iteration.compute_tokens, iteration.context_tokens
        # All its tokens attending to all its context is the most that it can be.
        predicted_s = self.latency.predict_s(tokens, tokens * context, context)
        return min(iteration.duration_s, max(usual_s, _STALL_FACTOR * predicted_s))

    def is_hopeless(self, entry: Entry, now: UnixTime) -> bool:
        """Whether *entry* would be late even if it were served from *now* on."""
        return will_violate(
            entry,
            now=now,
            prefill_tokens=entry.prefill_tokens,
            token_s=self.token_s,
            decode_s=self.iteration_s,
        )


def _share(count: int) -> float:
    """Weight of the newest of *count* observations: at first all count alike."""
    return max(_SMOOTHING, 1 / count)
