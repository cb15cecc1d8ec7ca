"""The requests of a load, and clients that choose the server for each of them."""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from ops.sim.attached.outcomes import Outcome
from ops.sim.attached.servers import Server, ServerRun
from ops.sim.attached.timeline import Timeline
from shared.contracts.base import UnixTime
from shared.contracts.qos import Importance, Slo

INTERACTIVE, BATCH = "Q1", "batch"
PRIORITIES = {INTERACTIVE: 0, "Q2": 1, BATCH: 2}
"""Priority of each class for vLLM's server, lower first."""


@dataclass(slots=True, kw_only=True)
class LoadRequest:
    """A request of a load."""

    class_name: str
    prompt_tokens: int
    output_tokens: int
    slo: Slo
    importance: Importance
    outcome: Outcome
    priority: int = 0
    """Priority that a client gives to vLLM's server, lower first."""
    ended: Callable[[], None] = lambda: None
    """Is called after the last token."""

    def on_token(self, number: int, now: UnixTime) -> None:
        """Record the answer token with this number, counted from 1, unless it was sent before."""
        outcome = self.outcome
        if number <= outcome.num_tokens:
            return
        outcome.add(1, now)
        outcome.finished = number >= self.output_tokens
        if outcome.finished:
            self.ended()


class Front(Protocol):
    """One way to the servers."""

    def send(self, request: LoadRequest) -> None:
        """Begin a request."""
        ...


@dataclass(slots=True, kw_only=True)
class ClientSideBalancer:
    """
    A client that chooses a server for each request itself.

    Args:
        least_loaded: True: the server with the fewest open requests; False: in turn.
        has_priorities: True: each class has its priority; False: the servers order by arrival.
    """

    timeline: Timeline
    servers: Sequence[Server]
    least_loaded: bool
    has_priorities: bool
    _turns: "itertools.count[int]" = field(default_factory=itertools.count)
    _open: dict[int, list[LoadRequest]] = field(default_factory=dict)

    def send(self, request: LoadRequest) -> None:
        number = self._chosen()
        self._open.setdefault(number, []).append(request)
        self.servers[number].submit(
            ServerRun(
                prompt_tokens=request.prompt_tokens,
                output_tokens=request.output_tokens,
                priority=request.priority if self.has_priorities else 0,
                on_token=lambda number: request.on_token(number, self.timeline.now),
            )
        )

    def _chosen(self) -> int:
        turn, num_servers = next(self._turns), len(self.servers)
        numbers = [(turn + each) % num_servers for each in range(num_servers)]
        if not self.least_loaded:
            return numbers[0]
        for number, requests in self._open.items():
            self._open[number] = [request for request in requests if not request.outcome.finished]
        return min(numbers, key=lambda number: len(self._open.get(number, ())))
