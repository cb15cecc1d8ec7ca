"""What one simulated iteration computes."""

from collections.abc import Callable

from ops.sim.request import SimRequest
from shared.contracts.base import Seconds
from solver.scheduling.decision import RequestView
from solver.scheduling.latency import LatencyTable

_HIDDEN_MAX_TOKENS = 4096
"""Policies know a limit of the answer, never its length."""


class Work:
    """
    Decodes, a token each, and parts of prefills; its sizes are those before it is computed.

    Args:
        decodes: In the order of the engine.
        prefills: With their tokens of this iteration.
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
        """Undisturbed; 0 when there is nothing to compute."""
        if not self.tokens:
            return 0.0
        return latency.predict_s(self.tokens, self.pairs, self.context_tokens)

    def only(self, keeps: Callable[[SimRequest], bool]) -> "Work":
        """The part of the requests that *keeps* holds for."""
        return Work(
            [run for run in self.decodes if keeps(run)],
            [part for part in self.prefills if keeps(part[0])],
        )


def view_of(request: SimRequest) -> RequestView:
    """What a policy is told of it."""
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
