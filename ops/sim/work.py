"""Content of one simulated iteration."""

from collections.abc import Callable

from ops.sim.request import SimRequest
from shared.contracts.base import Seconds
from solver.scheduling.engine.decision import RequestView
from solver.scheduling.engine.latency import LatencyTable

_HIDDEN_MAX_TOKENS = 4096
"""`max_tokens` of every request in the policies' view, which hides the answer's length."""


class Work:
    """
    Decodes of one token each, and chunks of prefills; sizes are from before the iteration.

    Args:
        decodes: Requests that decode, in the order of the engine.
        prefills: Requests that prefill, with the tokens of their chunks.
    """

    __slots__ = ("context_tokens", "decodes", "pairs", "prefills", "tokens")

    def __init__(self, decodes: list[SimRequest], prefills: list[tuple[SimRequest, int]]) -> None:
        self.decodes = decodes
        self.prefills = prefills
        self.tokens = len(decodes)
        self.context_tokens = sum([run.num_computed_tokens for run in decodes])
        self.pairs = 0.0
        for run, count in prefills:
            before = run.num_computed_tokens
            self.tokens += count
            self.context_tokens += before
            self.pairs += count * (before + count / 2)

    def duration_s(self, latency: LatencyTable) -> Seconds:
        """Duration of the iteration by *latency*; 0 if there are no tokens to compute."""
        if not self.tokens:
            return 0.0
        return latency.predict_s(self.tokens, self.pairs, self.context_tokens)

    def only(self, keeps: Callable[[SimRequest], bool]) -> "Work":
        """The part of the work for whose requests *keeps* returns true."""
        return Work(
            [run for run in self.decodes if keeps(run)],
            [part for part in self.prefills if keeps(part[0])],
        )


def view_of(request: SimRequest) -> RequestView:
    """A scheduling policy's view of the request."""
    arrival = request.arrival
    return RequestView(
        request_id=request.request_id,
        arrived_at=arrival.arrived_at,
        prompt_tokens=arrival.prompt_tokens,
        max_tokens=_HIDDEN_MAX_TOKENS,
        slo=arrival.slo,
        importance=arrival.importance,
        application=arrival.class_name,
    )
