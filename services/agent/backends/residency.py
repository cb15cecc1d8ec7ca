"""Which models an engine keeps at hand, and what activating each of them costs."""

from collections.abc import Iterable, Mapping

from shared.contracts.base import ModelName, Seconds
from shared.contracts.telemetry import ModelState, Residency


class ResidencyTable:
    """
    The active model, the warm ones (least recently active first), and all others, cold.

    Args:
        models: All that there are.
        capacity: Active and warm models at most; at least 1.
        prior_s: Activation time by residency, until one was measured.
    """

    def __init__(
        self, models: Iterable[ModelName], *, capacity: int, prior_s: Mapping[Residency, Seconds]
    ) -> None:
        self._models = tuple(models)
        self._capacity = capacity
        self._prior_s = dict(prior_s)
        self._measured_s: dict[tuple[ModelName, Residency], Seconds] = {}
        self._resident: dict[ModelName, None] = {}
        self._active: ModelName | None = None

    @property
    def active(self) -> ModelName | None:
        return self._active

    def limit(self, capacity: int) -> None:
        """Change the capacity; models above it go with the next activation."""
        self._capacity = capacity

    def residency(self, model: ModelName) -> Residency:
        """Where *model* is now."""
        if model == self._active:
            return Residency.ACTIVE
        return Residency.WARM if model in self._resident else Residency.COLD

    def victims(self, model: ModelName) -> tuple[ModelName, ...]:
        """Resident models that must go before *model* can be activated."""
        others = [name for name in self._resident if name != model]
        return tuple(others[: max(0, len(others) + 1 - self._capacity)])

    def drop(self, models: Iterable[ModelName]) -> None:
        """*models* are cold now."""
        for model in models:
            self._resident.pop(model, None)
            if model == self._active:
                self._active = None

    def clear(self) -> None:
        """The engine died: everything is cold. Measured times stay."""
        self._resident.clear()
        self._active = None

    def activated(self, model: ModelName, source: Residency, duration_s: Seconds) -> None:
        """*model* became the active one, from *source*."""
        self._resident.pop(model, None)
        self._resident[model] = None
        self._active = model
        self._measured_s[model, source] = duration_s

    def activate_s(self, model: ModelName) -> Seconds:
        """Expected time to make *model* active from where it is."""
        source = self.residency(model)
        if source is Residency.ACTIVE:
            return 0.0
        return self._measured_s.get((model, source), self._prior_s[source])

    def states(self) -> tuple[ModelState, ...]:
        """All models, for status messages."""
        return tuple(
            ModelState(
                model=model,
                residency=self.residency(model),
                activate_s=self.activate_s(model),
            )
            for model in self._models
        )
