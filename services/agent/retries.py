"""When to try again what has failed, while something else goes on."""

import math
from dataclasses import dataclass

from shared.contracts.base import ModelName, Seconds, UnixTime

MOST_PAUSE_S = 60.0


@dataclass(slots=True, kw_only=True)
class ActivationRetries:
    """
    Of the model that could not be activated last: each failure doubles the pause after it.

    Whoever is active has to be emptied for each try, and serves nothing meanwhile.
    """

    first_pause_s: Seconds
    _model: ModelName | None = None
    _pause_s: Seconds = 0.0
    _next_at: UnixTime = -math.inf

    def failed(self, model: ModelName, now: UnixTime) -> Seconds:
        """*model* could not be activated; the pause before it is tried again."""
        again = model == self._model
        self._pause_s = min(MOST_PAUSE_S, 2 * self._pause_s) if again else self.first_pause_s
        self._model, self._next_at = model, now + self._pause_s
        return self._pause_s

    def succeeded(self, model: ModelName) -> None:
        """*model* is active: its failures are forgotten."""
        if model == self._model:
            self._model = None

    def rests(self, model: ModelName, now: UnixTime) -> bool:
        """Whether it is too early for *model*."""
        return model == self._model and now < self._next_at
