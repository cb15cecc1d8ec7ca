"""Prefill times: from first scheduling to first token, without preempted time."""

from shared.contracts.base import Seconds


class PrefillTimes:
    """
    Measures the prefill time of each request of one engine; callers pass times of one monotonic
    clock.

    Source: QUARTZ §3.2, which predicts quantiles of this time.
    """

    def __init__(self) -> None:
        self._since: dict[str, float] = {}
        """Start times of the running requests' prefills, shifted forward by the preempted time."""
        self._taken_s: dict[str, Seconds] = {}
        """Prefill time of preempted requests until their preemption."""

    def begin(self, request_id: str, now: float) -> None:
        """Start measuring the prefill time of a request, or continue after a preemption."""
        self._since[request_id] = now - self._taken_s.pop(request_id, 0.0)

    def pause(self, request_id: str, now: float) -> None:
        """Pause measuring the prefill time of a preempted request; no-op after its first token."""
        since = self._since.pop(request_id, None)
        if since is not None:
            self._taken_s[request_id] = now - since

    def end(self, request_id: str, now: float) -> Seconds | None:
        """Return the prefill time of a request at its first token; None on later calls."""
        since = self._since.pop(request_id, None)
        return None if since is None else now - since

    def forget(self, request_id: str) -> None:
        """Drop the prefill time of a finished request; unknown ids are ignored."""
        self._since.pop(request_id, None)
        self._taken_s.pop(request_id, None)

    def __len__(self) -> int:
        return len(self._since) + len(self._taken_s)
