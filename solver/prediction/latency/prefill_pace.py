"""How long prefills take beside the other work of an engine."""

from shared.contracts.base import Seconds

_SHARE_KEPT = 0.95
"""Weight of all earlier prefills relative to the last one's, so that some twenty count."""
_LEAST_S: Seconds = 1.0
"""Predicted prefill after which the measured times are used."""
_MOST = 4.0
"""Largest ratio of a measured to a predicted time."""


class PrefillPace:
    """
    Ratio of the measured to the predicted time of the recent prefills of one engine.

    A latency model predicts prefills that run alone. An engine computes them beside the answers
    that it generates, and a server may share its device with others.
    """

    def __init__(self) -> None:
        self._predicted_s = self._measured_s = 0.0

    @property
    def ratio(self) -> float:
        """The ratio, between 1 and 4; 1 while little was measured."""
        if self._predicted_s < _LEAST_S:
            return 1.0
        return min(_MOST, max(1.0, self._measured_s / self._predicted_s))

    def add(self, *, predicted_s: Seconds, measured_s: Seconds) -> None:
        """Record the prefill of one run, with those that the engine computed before it."""
        self._predicted_s = _SHARE_KEPT * self._predicted_s + predicted_s
        self._measured_s = _SHARE_KEPT * self._measured_s + measured_s
