"""Number of requests that a server of others should get at once."""

from collections import deque

_REMEMBERED_LOOKS = 120
"""Number of looks in which the largest number of running requests was seen in the server."""
_DOUBT_LOOKS, _DOUBT_GROWTH = 2, 0.25
"""
Looks without a queue after which a full server gets more requests, as a share of its places, while
the places were found only once: the request that waited may have had another reason.
"""
_PROBE_LOOKS = (60, 240)
"""
Looks without a queue after which a full server is tried with one request more; doubled, up to the
second number, each time that the same number of places is found.
"""
_CALM_LOOKS = 480
"""Looks without a queue and without a probe after which a full server gets one request more."""
_LASTING_LOOKS = 3
"""Number of looks after which a queue confirms the places, if all of them are taken."""
_GROWTH = 1.0
"""Growth per look without a queue, as a share of the limit, up to the known places."""
_USED = 0.8
"""The limit grows only if at least this share of it is used."""


class ConcurrencyLimit:
    """
    Keeps the queue inside a server short, so that urgent requests do not wait behind batch requests
    there: what waits must wait in the mesh, which orders it.

    The limit is what the server runs once a request has waited in it for longer than an iteration:
    with places, it would have begun. Until then, and until the same number of places was found
    again, it grows while the server begins all that it gets.

    Args:
        most: Maximum limit.
        first: Limit before the first measurement.
    """

    def __init__(self, *, most: int, first: int) -> None:
        self._most = float(most)
        self._limit = float(min(first, most))
        self._places = self._most
        """Number of requests that the server runs at once, as far as it is known."""
        self._running: deque[float] = deque(maxlen=_REMEMBERED_LOOKS)
        """Running requests of the last looks."""
        self._num_calm = 0
        """Number of looks without a queue, at a server whose places are all taken."""
        self._num_found = 0
        """Number of times that the places were found to be the same."""
        self._own: float | None = None
        """Number of places that was last found at this server, not at another of its kind."""
        self._num_queued = 0
        """Number of looks so far at the queue by which the places were found."""

    @property
    def limit(self) -> int:
        """Number of requests that may be at the server; at least 1."""
        return max(1, int(self._limit))

    @property
    def spare(self) -> int:
        """
        Number of requests beyond the limit by which its growth is tried; they must be such as can
        wait.
        """
        is_full = self.is_sure and self._limit >= self._places
        return int(is_full and self._num_calm >= self._probe_looks)

    @property
    def is_sure(self) -> bool:
        """True if the number of places was found more than once."""
        return self._num_found > 1

    @property
    def _probe_looks(self) -> int:
        first, most = _PROBE_LOOKS
        return min(most, first << min(10, max(0, self._num_found - 2)))

    def confirm(self, places: float) -> None:
        """
        Take into account what was found about a server of the same kind: the same number confirms
        what was found about this one, and any number is assumed until more is seen.
        """
        if self._num_found == 0:
            self._places = min(self._most, max(places, 1.0, *self._running))
            self._limit = min(self._limit, self._places)
            self._num_found = 1
        elif self._own == places == self._places:
            self._num_found += 1

    @property
    def own_places(self) -> float | None:
        """Number of requests that this server was found to run at once; None if it never was."""
        return self._own

    def queue_seen(
        self,
        *,
        running: float,
        waiting: float,
        ours: int,
        ours_waiting: int,
        ours_prefilling: int,
        has_waited: bool,
    ) -> bool:
        """
        Adapt to the queue that the server reports; return True if the places were found by it.

        Args:
            running: Number of requests that the server runs, other clients' included.
            waiting: Number of requests that wait in the server, other clients' included.
            ours: Number of requests at the server that are ours.
            ours_waiting: Number of ours that have no token. A queue of others alone does not change
                the limit.
            ours_prefilling: Number of these that stream, so that their first tokens are seen. If
                more of them have no token than wait, prompts are computed, and iterations that are
                full of prefills also leave requests waiting.
            has_waited: True if each of ours without a token has been there for longer than an
                iteration.
        """
        self._running.append(running)
        if running > self._places:
            self._places, self._num_calm = min(self._most, running), 0
            self._num_found = min(1, self._num_found)
        waiting = min(waiting, ours_waiting)
        if waiting == 0:
            self._num_queued = 0
            if min(ours, running) >= _USED * self._limit:
                self._grow()
        elif has_waited and ours_prefilling <= waiting:
            places = min(self._most, max(1.0, *self._running))
            # Places that were tried in doubt do not exist.
            again = self._num_found > 0 and places <= self._places
            # All looks at one queue are one finding, but for one that lasts at a full server.
            lasts = self._num_queued == _LASTING_LOOKS and running >= places
            is_new = not again or not self._num_queued or (lasts and not self.is_sure)
            if is_new:
                self._num_found = self._num_found + 1 if again else 1
            self._num_queued += 1
            self._places = self._own = places
            # Requests of others also take places: ours shrink by those that wait.
            self._limit = max(1.0, min(self._limit, ours - waiting, places))
            self._num_calm = 0
            return is_new
        return False

    def _grow(self) -> None:
        """Raise the limit up to the known places, and the known places after a calm time."""
        if self._limit >= self._places:
            self._num_calm += 1
            in_doubt = self._num_found == 1
            if self._num_calm < (_DOUBT_LOOKS if in_doubt else _CALM_LOOKS):
                return
            self._num_calm = 0
            more = max(1.0, _DOUBT_GROWTH * self._places) if in_doubt else 1.0
            self._places = min(self._most, self._places + more)
        self._limit = min(self._places, self._limit + max(1.0, _GROWTH * self._limit))


class FleetLimits:
    """Limits of servers that are probably equal, since they serve one model with one engine."""

    def __init__(self) -> None:
        self._kinds: dict[str, list[ConcurrencyLimit]] = {}

    def join(self, kind: str, limit: ConcurrencyLimit) -> None:
        """Add the limit of a server of this kind."""
        self._kinds.setdefault(kind, []).append(limit)

    def leave(self, limit: ConcurrencyLimit) -> None:
        """Forget the limit of a server that has left."""
        for limits in self._kinds.values():
            if limit in limits:
                limits.remove(limit)

    def found(self, limit: ConcurrencyLimit) -> None:
        """Compare the places that were found of one server with those of the others of its kind."""
        for limits in self._kinds.values():
            if limit not in limits or limit.own_places is None:
                continue
            others = [each for each in limits if each is not limit]
            if any(each.own_places == limit.own_places for each in others):
                limit.confirm(limit.own_places)
            for each in others:
                each.confirm(limit.own_places)
