"""Current speed of the engine, learned from its iterations."""

from shared.contracts.base import Seconds, UnixTime
from shared.contracts.qos import QosClass
from shared.contracts.telemetry import Iteration
from solver.scheduling.engine.entry import Entry
from solver.scheduling.engine.latency import LatencyTable

_SMOOTHING = 0.05
_LEARN_TOKENS = 64
"""
Least number of prefill tokens in an iteration from which the time per prefill token is learned.
"""
_STALL_FACTOR = 10.0
"""A duration above this multiple of the predicted or usual one counts as a stall."""


class EnginePace:
    """
    Moving averages of the time per prefill token and of the duration of an iteration.

    Initial values come from the latency model and count as one iteration.

    Args:
        latency: Latency table of the engine; may be replaced by a newer table.
        chunk_tokens: Chunk that the first estimates assume.
    """

    def __init__(self, latency: LatencyTable, *, chunk_tokens: int) -> None:
        self.latency = latency
        self.iteration_s: Seconds = latency.predict_s(chunk_tokens, chunk_tokens**2 / 2, 0)
        self.token_s: Seconds = self.iteration_s / chunk_tokens
        self._num_iterations = 1
        self._num_prefills = 1

    def observe(self, iteration: Iteration) -> None:
        """Learn from an iteration that the engine executed."""
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
        """
        Duration of *iteration*, bounded, so that a single stall does not make the host appear slow.
        """
        usual_s = _STALL_FACTOR * self.iteration_s
        if iteration.duration_s <= usual_s:
            return iteration.duration_s
        tokens, context = iteration.compute_tokens, iteration.context_tokens
        # Upper bound: all its tokens attend to all its context.
        predicted_s = self.latency.predict_s(tokens, tokens * context, context)
        return min(iteration.duration_s, max(usual_s, _STALL_FACTOR * predicted_s))

    def is_infeasible(self, entry: Entry, now: UnixTime) -> bool:
        """
        True if *entry*, which does not decode yet, would be late even if it were served from now
        on.

        Source: QoServe §3.4, algorithm 1 line 12.
        Decided: the prediction reaches to the end of the prefill, or of the expected answer if the
        deadline is that of the last token, not only to the end of the current iteration. So a
        request that cannot finish in time is relegated before it takes time. The answer has its
        mean length: with the over-approximation of §3.4, which is for the order of service, nearly
        all requests that would just be in time are relegated. What the prefix cache is expected to
        have takes no time.
        """
        prefill_tokens = max(0, entry.prefill_tokens - entry.cached_tokens)
        finish_at = now + prefill_tokens * self.token_s
        if entry.qos_class is QosClass.NON_INTERACTIVE:
            finish_at += entry.mean_decode_tokens * self.iteration_s
        return finish_at > entry.deadline_at


def _share(count: int) -> float:
    """
    Weight of the newest of *count* observations; the first observations all have equal weights.
    """
    return max(_SMOOTHING, 1 / count)
