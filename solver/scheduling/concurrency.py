"""Number of requests that a server of others should get at once."""

from collections import deque

from shared.contracts.base import Seconds

_LOOKS = 10
"""
Number of successive looks that must see a queue in the server: a request also waits for the next
iteration, or for its prefill, while the server has places. Under steady arrivals, most looks see
such a request.
"""
_PROBE_LOOKS = 20
"""Number of looks without a queue after which a full server is tried with one request more."""
_TOLERANCE = 2.0
"""Waits up to this multiple of the shortest wait do not count as queueing."""
_BACKOFF = 0.9
_FORGET = 0.02
"""Share by which the shortest wait approaches later waits, so that an old one does not bind."""
_GROWTH = 0.5
"""Growth per look without a queue, as a share of the limit, up to the known places."""
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
        self._places = self._most
        """Number of requests that the server runs at once, as far as it is known."""
        self._queues: deque[tuple[float, float]] = deque(maxlen=_LOOKS)
        """Running and waiting requests of the last looks."""
        self._num_calm = 0
        """Number of looks without a queue, at a server whose places are all taken."""
        self._shortest_s: Seconds | None = None

    @property
    def limit(self) -> int:
        """Number of requests that may be at the server; at least 1."""
        return max(1, int(self._limit))

    def queue_seen(self, *, running: float, waiting: float, ours: int, ours_waiting: int) -> None:
        """
        Adapt to the queue that the server reports.

        Args:
            running: Number of requests that the server runs, other clients' included.
            waiting: Number of requests that wait in the server, other clients' included.
            ours: Number of requests at the server that are ours.
            ours_waiting: Number of ours that have no token. A queue of others alone does not change
                the limit.
        """
        waiting = min(waiting, ours_waiting)
        self._queues.append((running, waiting))
        queued = min(each for _, each in self._queues)
        if queued > 0 and len(self._queues) == _LOOKS:
            self._places = max(1.0, *(each for each, _ in self._queues))
            # Requests of others also take places: ours shrink by those that wait.
            self._limit = max(1.0, min(self._limit, ours - queued, self._places))
            self._queues.clear()
            self._num_calm = 0
        elif waiting == 0 and ours >= _USED * self._limit:
            self._grow()

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

    def _grow(self) -> None:
        """Raise the limit up to the known places, and the known places after a calm time."""
        if self._limit >= self._places:
            self._num_calm += 1
            if self._num_calm < _PROBE_LOOKS:
                return
            self._num_calm = 0
            self._places = min(self._most, self._places + 1.0)
        self._limit = min(self._places, self._limit + max(1.0, _GROWTH * self._limit))
