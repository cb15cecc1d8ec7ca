"""Times of the next attempts after failed activations of models."""

import math
from dataclasses import dataclass

from shared.contracts.base import ModelName, Seconds, UnixTime

MOST_PAUSE_S = 60.0


@dataclass(slots=True, kw_only=True)
class ActivationRetries:
    """
    Backoff after failed activations of one model; each failure doubles the pause.

    Every attempt ends the runs of the active model, so frequent attempts would stop all service.
    """

    first_pause_s: Seconds
    _model: ModelName | None = None
    _pause_s: Seconds = 0.0
    _next_at: UnixTime = -math.inf

    def failed(self, model: ModelName, now: UnixTime) -> Seconds:
        """Record a failed activation of *model*; return the pause before the next attempt."""
        again = model == self._model
        self._pause_s = min(MOST_PAUSE_S, 2 * self._pause_s) if again else self.first_pause_s
        self._model, self._next_at = model, now + self._pause_s
        return self._pause_s

    def succeeded(self, model: ModelName) -> None:
        """Record that *model* is active, and reset the count of its failed activations."""
        if model == self._model:
            self._model = None

    def rests(self, model: ModelName, now: UnixTime) -> bool:
        """Return whether *model* must still wait after a failed activation."""
        return model == self._model and now < self._next_at
