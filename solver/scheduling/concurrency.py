"""Number of requests that a server of others should get at once."""

from shared.contracts.base import Seconds

_TOLERANCE = 2.0
"""Waits up to this multiple of the shortest wait do not count as queueing."""
_BACKOFF = 0.9
_FORGET = 0.02
"""Share by which the shortest wait approaches later waits, so that an old one does not bind."""
_USED = 0.8
"""The limit grows only if at least this share of it is used."""


class ConcurrencyLimit:
    """
    Keeps the queue inside a server short, so that urgent requests do not wait behind batch requests
    there: what waits must wait in the mesh, which orders it.

    A server that reports its queue is limited to what it runs while requests wait in it. For other
    servers, the time to the first token takes the place of the queue: the limit grows by one per
    round of answers, and shrinks by a tenth when answers begin later than `_TOLERANCE` times the
    shortest wait, as in TCP Vegas.

    Args:
        most: Maximum limit.
        first: Limit before the first measurement.
    """

    def __init__(self, *, most: int, first: int) -> None:
        self._most = float(most)
        self._limit = float(min(first, most))
        self._shortest_s: Seconds | None = None

    @property
    def limit(self) -> int:
        """Number of requests that may be at the server; at least 1."""
        return max(1, int(self._limit))

    def queue_seen(self, *, running: float, waiting: float, ours: int) -> None:
        """
        Adapt to the queue that the server reports.

        Args:
            running: Number of requests that the server runs, other clients' included.
            waiting: Number of requests that wait in the server.
            ours: Number of requests at the server that are ours.
        """
        if waiting > 0:
            # Requests of others also take places: ours shrink by those that wait.
            self._limit = max(1.0, min(self._limit, ours - waiting, running))
        elif ours >= _USED * self._limit:
            self._limit = min(self._most, self._limit + max(1.0, 0.1 * self._limit))

    def answer_begun(self, wait_s: Seconds, *, ours: int) -> None:
        """
        Adapt to the time from sending a request to its first token.

        Args:
            wait_s: The time, of a request of usual length.
            ours: Number of requests at the server that are ours.
        """
        if self._shortest_s is None or wait_s < self._shortest_s:
            self._shortest_s = wait_s
        else:
            self._shortest_s += _FORGET * (wait_s - self._shortest_s)
        if wait_s > _TOLERANCE * self._shortest_s:
            self._limit = max(1.0, self._limit * _BACKOFF)
        elif ours >= _USED * self._limit:
            self._limit = min(self._most, self._limit + 1.0 / self._limit)
