"""How long prefills take: first scheduled to first token, without time preempted."""

from shared.contracts.base import Seconds


class PrefillTimes:
    """
    A stopwatch for each request of one engine; times are of any clock that only grows.

    Source: QUARTZ §3.2, what its quantiles are of.
    """

    def __init__(self) -> None:
        self._since: dict[str, float] = {}
        """Of those that run, as if they had begun when their time adds up."""
        self._taken_s: dict[str, Seconds] = {}
        """Of those that are preempted."""

    def begin(self, request_id: str, now: float) -> None:
        """It was scheduled for the first time, or again after a preemption."""
        self._since[request_id] = now - self._taken_s.pop(request_id, 0.0)

    def pause(self, request_id: str, now: float) -> None:
        """It was preempted; nothing happens once it has its first token."""
        since = self._since.pop(request_id, None)
        if since is not None:
            self._taken_s[request_id] = now - since

    def end(self, request_id: str, now: float) -> Seconds | None:
        """It has its first token: how long that took; nothing the second time."""
        since = self._since.pop(request_id, None)
        return None if since is None else now - since

    def forget(self, request_id: str) -> None:
        """It is over; unknown ones are ignored."""
        self._since.pop(request_id, None)
        self._taken_s.pop(request_id, None)

    def __len__(self) -> int:
        return len(self._since) + len(self._taken_s)
