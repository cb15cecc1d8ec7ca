"""Ends of runs inside an engine, which computes no token of a run from its end on."""

from collections.abc import Callable
from dataclasses import dataclass, field
from math import inf

from shared.contracts.base import RequestId, UnixTime


@dataclass(slots=True)
class RunEnds:
    """The runs of one engine that have ends, each from `add` to `remove`."""

    _ends: dict[RequestId, tuple[UnixTime, UnixTime]] = field(default_factory=dict)
    """Run -> its end, and its end if it has no token then."""
    _next_at: UnixTime = inf
    """Time before which no run ends."""

    def add(
        self, run_id: RequestId, expires_at: UnixTime | None, first_token_by: UnixTime | None
    ) -> None:
        """Add a run; no-op if it has no end."""
        ends = (
            inf if expires_at is None else expires_at,
            inf if first_token_by is None else first_token_by,
        )
        if min(ends) < inf:
            self._ends[run_id] = ends
            self._next_at = min(self._next_at, *ends)

    def remove(self, run_id: RequestId) -> None:
        """Remove a run that has left the engine; unknown runs are ignored."""
        self._ends.pop(run_id, None)

    def over(self, now: UnixTime, has_token: Callable[[RequestId], bool]) -> list[RequestId]:
        """
        The runs that are past their ends.

        Args:
            now: Begin of the next iteration.
            has_token: Returns whether a run has a token.
        """
        if now < self._next_at:
            return []
        over, self._next_at = [], inf
        for run_id, (expires_at, first_token_by) in self._ends.items():
            end = expires_at
            if first_token_by < end and not (first_token_by <= now and has_token(run_id)):
                end = first_token_by
            if end <= now:
                over.append(run_id)
            else:
                self._next_at = min(self._next_at, end)
        return over
